"""What the draft/verify loop counts, and the figures that follow from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

LONGEST_LOOP = 16
"""Longest cycle, in tokens, that counts as an output that ends in a loop."""


@dataclass(frozen=True)
class PromptResult:
    """One prompt: accepted drafts of every verify step, the tokens it gave, and what plain decoding gave if it was run."""

    accepted: tuple[int, ...]
    output: tuple[int, ...]
    plain: tuple[int, ...] | None = None


@dataclass(frozen=True)
class AcceptanceReport:
    """Counts over all prompts; averages are sums over counts, never means of means.

    Attributes:
        k: drafted tokens a verify step.
        prompts: per-prompt results.
    """

    k: int
    prompts: tuple[PromptResult, ...] = field(repr=False)

    @property
    def verify_steps(self) -> int:
        """Target passes that verified drafts; a prompt's prefill is none."""
        return sum(len(prompt.accepted) for prompt in self.prompts)

    @property
    def drafted(self) -> int:
        """Tokens that the head proposed: k a verify step."""
        return self.k * self.verify_steps

    @property
    def accepted(self) -> int:
        """Proposed tokens that the target kept."""
        return sum(sum(prompt.accepted) for prompt in self.prompts)

    @property
    def tokens(self) -> int:
        """Tokens that the verify steps gave: the accepted ones and one of the target's own each."""
        return self.accepted + self.verify_steps

    @property
    def accept_rate(self) -> float:
        """accepted / drafted."""
        return self.accepted / max(self.drafted, 1)

    @property
    def accept_length(self) -> float:
        """Tokens a verify step, 1 to k + 1."""
        return self.tokens / max(self.verify_steps, 1)

    @property
    def per_depth(self) -> list[dict[str, float]]:
        """For each depth: in how many verify steps it was drafted and accepted."""
        steps = self.verify_steps
        counts = [
            sum(accepted >= depth for prompt in self.prompts for accepted in prompt.accepted)
            for depth in range(1, self.k + 1)
        ]
        return [
            {"depth": depth, "drafted": steps, "accepted": count, "accept_rate": count / max(steps, 1)}
            for depth, count in enumerate(counts, start=1)
        ]

    @property
    def lossless(self) -> bool | None:
        """Whether every output equals plain greedy decoding token for token; None where that was not run."""
        if any(prompt.plain is None for prompt in self.prompts):
            return None
        return all(prompt.output == prompt.plain for prompt in self.prompts)

    @property
    def standard_error(self) -> float | None:
        """Standard error of the accept length over prompts; None for fewer than two."""
        lengths = [1 + sum(p.accepted) / len(p.accepted) for p in self.prompts if p.accepted]
        if len(lengths) < 2:
            return None
        mean = sum(lengths) / len(lengths)
        return math.sqrt(sum((x - mean) ** 2 for x in lengths) / (len(lengths) - 1) / len(lengths))

    @property
    def loop_share(self) -> float:
        """Share of outputs that end in a loop; small models loop, and loops are easy to draft."""
        return sum(ends_in_loop(prompt.output) for prompt in self.prompts) / max(len(self.prompts), 1)

    def as_dict(self) -> dict[str, Any]:
        """The report for `--json`."""
        names = (
            "accept_rate",
            "accept_length",
            "drafted",
            "accepted",
            "verify_steps",
            "tokens",
            "per_depth",
            "lossless",
        )
        return {name: getattr(self, name) for name in names}


def ends_in_loop(tokens: Sequence[int]) -> bool:
    """Whether the last tokens are one cycle of at most `LONGEST_LOOP` tokens, three times over."""
    tail = list(tokens)
    return any(
        len(tail) >= 3 * size and tail[-size:] == tail[-2 * size : -size] == tail[-3 * size : -2 * size]
        for size in range(1, LONGEST_LOOP + 1)
    )
