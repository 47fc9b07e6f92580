"""How many drafted tokens a target accepts, under greedy decoding.

speculate  the loop that a server runs, one prompt at a time, with real KV caches on target and head: draft k tokens, verify
           them in one target pass, keep the leading ones that equal the target's own choice, and one token of the target's.
replay     the same counts without the loop. Under greedy verification a draft only matters where all drafts before it were
           right, and there the drafted tokens are the target's own. So one pass of the chain rollout over the target's
           greedy output tells what every verify step would have accepted.

Both count alike. For a verify step that starts behind token x[t+1], with k = 3 drafts for x[t+2], x[t+3], x[t+4], of which
the first two are right: drafted 3, accepted 2, tokens 3 (two drafts and the target's own x[t+4]), verify steps 1.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mtp_zoo.batch import TokenBatch
from mtp_zoo.errors import AcceptanceError
from mtp_zoo.head import DraftHead
from mtp_zoo.progress import progress
from mtp_zoo.rollout import slot_positions
from mtp_zoo.shared import language_model
from mtp_zoo.targets import target_states

LONGEST_LOOP = 16
"""Longest cycle, in tokens, that counts as an output that ends in a loop."""

REPLAY_BATCH = 64
"""Prompts a pass of `replay`; its states are held at once, its logits a row at a time."""


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


@torch.no_grad()
def speculate(
    target: Any,
    head: DraftHead,
    prompts: Sequence[Sequence[int]],
    *,
    k: int,
    max_new_tokens: int,
    eos: Sequence[int] = (),
    check: bool = True,
) -> AcceptanceReport:
    """Run the draft/verify loop on every prompt.

    Args:
        target: transformers causal language model.
        head: its head.
        prompts: token ids, at least one each.
        k: drafts a verify step.
        max_new_tokens: tokens to generate, the prefill's own included; the last step may overshoot and is then cut.
        eos: ids that end an output.
        check: also decode plainly, for `lossless`.

    Raises:
        AcceptanceError: no prompts, an empty prompt, or a k or length below 1.
    """
    _check(prompts, k, max_new_tokens)
    head.attach(target)
    results: list[PromptResult] = []
    with progress("Drafting and verifying", total=len(prompts)) as advance:
        for prompt in prompts:
            loop = _Loop(target, head, prompt, k)
            while len(loop.output) < max_new_tokens and not set(loop.output) & set(eos):
                loop.step()
            output = _cut(loop.output, max_new_tokens, eos)
            plain = _cut(_greedy(target, [prompt], max_new_tokens)[0], max_new_tokens, eos) if check else None
            results.append(PromptResult(tuple(loop.accepted), output, plain))
            advance()
    return AcceptanceReport(k, tuple(results))


@torch.no_grad()
def replay(
    target: Any,
    head: DraftHead,
    prompts: Sequence[Sequence[int]],
    *,
    k: int,
    max_new_tokens: int,
    eos: Sequence[int] = (),
) -> AcceptanceReport:
    """What `speculate` would count, from the target's greedy outputs and one rollout over them.

    Prompts of equal length share passes. The arguments are those of `speculate`; its numeric ties are not reproduced.
    """
    _check(prompts, k, max_new_tokens)
    head.attach(target)
    results: dict[int, PromptResult] = {}
    with progress("Replaying drafts", total=len(prompts)) as advance:
        for group in _equal_lengths(prompts):
            outputs = _greedy(target, [prompts[i] for i in group], max_new_tokens + k)
            hits = _leading_hits(target, head, [[*prompts[i], *out] for i, out in zip(group, outputs, strict=True)], k)
            for row, number in enumerate(group):
                accepted = _walk(hits[row], len(prompts[number]), outputs[row], max_new_tokens, eos)
                results[number] = PromptResult(accepted, _cut(outputs[row], max_new_tokens, eos))
                advance()
    return AcceptanceReport(k, tuple(results[number] for number in range(len(prompts))))


class _Loop:
    """State of one prompt: slots 0..n-1 are in both caches, token x[n] is known and verified."""

    def __init__(self, target: Any, head: DraftHead, prompt: Sequence[int], k: int) -> None:
        from transformers import DynamicCache

        self.model, self.head, self.k = language_model(target), head, k
        self.cache = DynamicCache(config=self.model.config)
        self.head_cache = DynamicCache(config=head.factory.config)
        self.accepted: list[int] = []
        self.device = next(self.model.parameters()).device
        self.hidden = self._target([*prompt])
        self.unseen = [*prompt[1:], self._choose(self.hidden[:, -1:])[0]]
        self.output = [self.unseen[-1]]
        self.done = 0

    def step(self) -> None:
        drafts = self._draft()
        before = _snapshot(self.cache)
        verified = self._target([self.unseen[-1], *drafts])
        choices = self._choose(verified)
        good = next((i for i, draft in enumerate(drafts) if draft != choices[i]), self.k)
        if good < self.k:
            self.cache = before
            self._target([self.unseen[-1], *drafts[:good]])
        self.done += len(self.unseen)
        self.hidden, self.unseen = verified[:, : good + 1], choices[: good + 1]
        self.accepted.append(good)
        self.output += self.unseen

    def _draft(self) -> list[int]:
        """Feed the head what was verified since, then let it run on its own states; the drafts' keys are dropped."""
        positions = torch.arange(self.done, self.done + len(self.unseen), device=self.device)[None]
        state = self.head.draft_step(
            self._ids(self.unseen), self.hidden, slot_positions(self.head, positions, 1), cache=self.head_cache
        )
        kept = _snapshot(self.head_cache)
        drafts = self._choose(state.normed[:, -1:])
        for depth in range(2, self.k + 1):
            state = self.head.draft_step(
                self._ids(drafts[-1:]),
                state.recycled[:, -1:],
                slot_positions(self.head, positions[:, -1:], depth),
                cache=self.head_cache,
                depth=depth,
            )
            drafts += self._choose(state.normed[:, -1:])
        self.head_cache = kept
        return drafts

    def _target(self, tokens: list[int]) -> Tensor:
        return _forward(self.model, self._ids(tokens), self.cache)

    def _choose(self, states: Tensor) -> list[int]:
        return self.head.shared.logits(states).argmax(-1).flatten().tolist()

    def _ids(self, tokens: list[int]) -> Tensor:
        return torch.tensor([tokens], device=self.device)


def _forward(model: Any, input_ids: Tensor, cache: Any) -> Tensor:
    """Last hidden states; `cache` is updated in place. The keyword's name changed within transformers 5."""
    import inspect

    names = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    keyword = "cache" if "cache" in names else "past_key_values"
    return model(input_ids=input_ids, use_cache=True, **{keyword: cache}).last_hidden_state


def _snapshot(cache: Any) -> Any:
    """A cache that stays as it is while the original goes on.

    Keys and values grow by concatenation, so a reference keeps them; states that are written in place are cloned.
    """
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in twin.layers:
        for name, value in vars(layer).items():
            if name not in ("keys", "values"):
                setattr(layer, name, _cloned(value))
    return twin


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return {key: _cloned(item) for key, item in value.items()} if isinstance(value, dict) else value


def _greedy(target: Any, prompts: Sequence[Sequence[int]], steps: int) -> list[list[int]]:
    """Plain greedy decoding of equally long prompts."""
    from transformers import DynamicCache

    model = language_model(target)
    lm_head = target.get_output_embeddings()
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([list(prompt) for prompt in prompts], device=next(model.parameters()).device)
    out: list[Tensor] = []
    for _ in range(steps):
        ids = lm_head(_forward(model, ids, cache)[:, -1:]).argmax(-1)
        out.append(ids)
    return torch.cat(out, dim=1).tolist()


def _leading_hits(target: Any, head: DraftHead, rows: Sequence[Sequence[int]], k: int) -> list[list[int]]:
    """For every slot of every row: how many leading depths would draft the tokens that follow."""
    device = next(language_model(target).parameters()).device
    tokens = TokenBatch.all_tokens(torch.tensor([list(row) for row in rows], device=device))
    states = head(tokens, target_states(target, tokens, head.spec), depths=k)
    leading = torch.zeros(tokens.shape, dtype=torch.int64, device=device)
    alive = torch.ones(tokens.shape, dtype=torch.bool, device=device)
    for depth, state in enumerate(states, start=1):
        choices = torch.stack([head.shared.logits(row).argmax(-1) for row in state.normed])
        alive &= choices == tokens.slots(depth).labels
        leading += alive
    return leading.tolist()


def _walk(
    hits: list[int], prompt_length: int, output: list[int], max_new_tokens: int, eos: Sequence[int]
) -> tuple[int, ...]:
    """Accepted drafts of each verify step. `known` counts output tokens; the step behind them drafts from slot `known` - 2."""
    accepted: list[int] = []
    known = 1
    while known < max_new_tokens and not set(output[:known]) & set(eos):
        accepted.append(hits[prompt_length + known - 2])
        known += accepted[-1] + 1
    return tuple(accepted)


def _equal_lengths(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Prompt numbers in groups of equal length, at most `REPLAY_BATCH` each."""
    by_length: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(number)
    return [
        group[start : start + REPLAY_BATCH]
        for group in by_length.values()
        for start in range(0, len(group), REPLAY_BATCH)
    ]


def _cut(tokens: Sequence[int], length: int, eos: Sequence[int]) -> tuple[int, ...]:
    """At most `length` tokens, up to and with the first end-of-sequence."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in eos), len(tokens))
    return tuple(tokens[: min(end, length)])


def _check(prompts: Sequence[Sequence[int]], k: int, max_new_tokens: int) -> None:
    empty = [number for number, prompt in enumerate(prompts) if len(prompt) == 0]
    if not prompts or empty or k < 1 or max_new_tokens < 1:
        raise AcceptanceError(
            f"Measuring acceptance: expected prompts of at least one token, k >= 1 and max_new_tokens >= 1; got "
            f"{len(prompts)} prompts (empty: {empty}), k={k}, max_new_tokens={max_new_tokens}.",
            remedy="Give prompts and positive lengths.",
        )
