"""The target's part of the draft/verify loop: prefill, verification of drafts, and taking back what was rejected."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mtp_zoo.ragged_cache import RaggedCache
from mtp_zoo.shared import SharedTensors, language_model
from mtp_zoo.spec import HiddenTap
from mtp_zoo.targets import norm_switched_off


@dataclass(frozen=True)
class Verified:
    """What the target makes of some tokens.

    Attributes:
        hidden: [rows, new, hidden], states at the head's tap.
        choices: [rows, new], the target's choice behind every token; of a prefill, behind the last one alone.
    """

    hidden: Tensor
    choices: Tensor


class Verifier:
    """A target and the tokens of some rows that it has seen.

    Args:
        target: transformers causal language model.
        shared: its lm_head and final norm.
        tap: where the head reads its states.
    """

    def __init__(self, target: Any, shared: SharedTensors, tap: HiddenTap) -> None:
        self.model, self.shared, self.tap = language_model(target), shared, tap
        self.device = next(self.model.parameters()).device
        self.cache = RaggedCache(self.model.config, 0)
        self._before: RaggedCache | None = None
        self._pending = torch.empty(0)
        names = inspect.signature(inspect.unwrap(type(self.model).forward)).parameters
        self._cache_keyword = "cache" if "cache" in names else "past_key_values"

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Verified]:
        """Read prompts of any lengths into empty rows; those of equal length share a pass, so that nothing is padding."""
        caches: dict[int, RaggedCache] = {}
        results: dict[int, Verified] = {}
        for group in equal_lengths(prompts).values():
            cache = RaggedCache(self.model.config, len(group))
            found = self._run(cache, self._ids([prompts[number] for number in group]), last=True)
            for row, number in enumerate(group):
                results[number] = Verified(found.hidden[row : row + 1], found.choices[row : row + 1])
                caches[number] = cache.select([row])
        self.cache = RaggedCache.join([caches[number] for number in range(len(prompts))])
        return [results[number] for number in range(len(prompts))]

    def verify(self, tokens: Int[Tensor, "rows new"]) -> Verified:
        """Read as many tokens in every row; `keep` must follow."""
        self._before = self.cache.snapshot() if self.cache.recurrent else None
        self._pending = tokens
        return self._run(self.cache, tokens, keep=False)

    def keep(self, counts: Sequence[int]) -> None:
        """Keep the first tokens of the last `verify` in each row, and take back the others.

        A recurrent state can't drop a token: rows that lost some go back to the state before, and read the kept ones again,
        together with the rows that keep as many.
        """
        new = self._pending.shape[1]
        self.cache.keep(new, counts)
        if self._before is None:
            return
        for count in sorted({count for count in counts if count < new}):
            rows = [row for row, each in enumerate(counts) if each == count]
            again = self._before.select(rows)
            self._run(again, self._pending[rows, :count])
            self.cache.restore_states(rows, again)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with some of the rows."""
        self.cache = self.cache.select(rows)

    def greedy(self, prompts: Sequence[Sequence[int]], steps: int) -> list[list[int]]:
        """Plain greedy decoding of prompts of equal length, apart from the rows that are verified."""
        cache = RaggedCache(self.model.config, len(prompts))
        out = [self._run(cache, self._ids(prompts), last=True).choices]
        while len(out) < steps:
            out.append(self._run(cache, out[-1]).choices)
        return torch.cat(out, dim=1).tolist()

    def _run(self, cache: RaggedCache, ids: Tensor, *, last: bool = False, keep: bool = True) -> Verified:
        new = ids.shape[1]
        filled = cache.filled(new, self.device)
        arguments: Mapping[str, Any] = {
            "attention_mask": None if filled is None else filled.long(),
            "position_ids": cache.positions(new, self.device),
            self._cache_keyword: cache.layers,
        }
        hidden, normed = self._states(ids, arguments)
        if keep:
            cache.keep(new, [new] * len(ids))
        return Verified(hidden, self.shared.logits(normed[:, -1:] if last else normed).argmax(-1))

    def _states(
        self, ids: Tensor, arguments: Mapping[str, Any]
    ) -> tuple[Float[Tensor, "rows new hidden"], Float[Tensor, "rows new hidden"]]:
        """States at the tap, and those in front of the lm_head."""
        if self.tap == "post_norm":
            states = self.model(input_ids=ids, use_cache=True, **arguments).last_hidden_state
            return states, states
        with norm_switched_off(self.model):
            states = self.model(input_ids=ids, use_cache=True, **arguments).last_hidden_state
        return states, self.model.norm(states)

    def _ids(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([list(row) for row in rows], device=self.device)


def equal_lengths(prompts: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Numbers of the prompts of each length."""
    groups: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        groups.setdefault(len(prompt), []).append(number)
    return groups
