"""The head's part of the draft/verify loop: KV caches that follow the verified tokens, and drafts that run ahead of them.

A recycled head has one cache, of the slots whose state and token are verified; what it writes at depths 2 and up is dropped
again. A head of distinct depths has a cache a depth. Depth j reads token x[t + j] in slot t, so of n verified slots (token
x[n] known) its cache holds the first n - j + 1, and it runs over the others again with the drafts as their last tokens:

    n = 5, j = 3    slots 0 1 2 stay, with tokens x3 x4 x5    slots 3 4 run with drafts d1 d2, and are dropped again

Either way this is what the rollout that trains the head computes, see `mtp_zoo.rollout`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import add

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mtp_zoo.head import DepthState, DraftHead
from mtp_zoo.ragged_cache import RaggedCache
from mtp_zoo.rollout import default_rollout, slot_positions


class Drafter(ABC):
    """Caches of a head for some rows; see the module. Make one with `drafter_of`."""

    def __init__(self, head: DraftHead, k: int, rows: int, caches: int) -> None:
        self.head, self.k = head, k
        self.caches = [RaggedCache(head.factory.config, rows) for _ in range(caches)]

    @abstractmethod
    def draft(
        self, ids: Int[Tensor, "rows new"], hidden: Float[Tensor, "rows new hidden"], counts: Sequence[int]
    ) -> Int[Tensor, "rows k"]:
        """Read what was verified since, then draft k tokens.

        Args:
            ids, hidden: the token and the target's state that enter every new slot, on the left of each row.
            counts: new slots of each row, at least one.
        """

    def select(self, rows: Sequence[int]) -> None:
        """Go on with some of the rows."""
        self.caches = [cache.select(rows) for cache in self.caches]

    def _run(
        self,
        cache: RaggedCache,
        depth: int,
        ids: Tensor,
        hidden: Tensor,
        position_ids: Tensor,
        counts: Sequence[int],
        final: Sequence[int],
    ) -> DepthState:
        """One pass of a depth over new slots, `counts[i]` in row i, of which its cache keeps the first `final[i]`.

        Slots behind the last one of a row are padding, which no real one sees.
        """
        new = ids.shape[1]
        self.head.check_context(max(map(add, cache.lengths, counts)))
        mask = torch.ones(new, cache.width + new, dtype=torch.bool, device=ids.device).tril(cache.width)[None]
        filled = cache.filled(new, ids.device)
        mask = mask if filled is None else mask & filled[:, None]
        state = self.head.draft_step(ids, hidden, position_ids, cache=cache.layers, depth=depth, mask=mask[:, None])
        cache.keep(new, final)
        return state

    def _choose(self, depth: int, state: DepthState, last: Tensor) -> Tensor:
        """[rows, 1]: what a depth drafts in the last slot of each row."""
        return self.head.logits(depth, at(state.normed, last)).argmax(-1)


class RecycledDrafter(Drafter):
    """One block, applied k times over one cache."""

    def draft(
        self, ids: Int[Tensor, "rows new"], hidden: Float[Tensor, "rows new hidden"], counts: Sequence[int]
    ) -> Int[Tensor, "rows k"]:
        """Read what was verified since, then draft k tokens, see `Drafter.draft`."""
        cache, last = self.caches[0], torch.tensor(counts, device=ids.device) - 1
        positions = _positions(cache, last, ids.shape[1])
        state = self._run(cache, 1, ids, hidden, slot_positions(self.head, positions, 1), counts, counts)
        drafts = [self._choose(1, state, last)]
        recycled, behind = at(state.recycled, last), at(positions, last)
        ahead, one = cache.snapshot(), [1] * len(counts)
        for depth in range(2, self.k + 1):
            positions = slot_positions(self.head, behind, depth)
            state = self._run(ahead, depth, drafts[-1], recycled, positions, one, one)
            drafts.append(self.head.logits(depth, state.normed).argmax(-1))
            recycled = state.recycled
        return torch.cat(drafts, dim=1)


class DistinctDrafter(Drafter):
    """A block and a cache for each depth; more depths than are stored use them in turn, each with a cache of its own."""

    def __init__(self, head: DraftHead, k: int, rows: int, caches: int) -> None:
        super().__init__(head, k, rows, caches)
        self._recycled: list[Tensor] = []

    def draft(
        self, ids: Int[Tensor, "rows new"], hidden: Float[Tensor, "rows new hidden"], counts: Sequence[int]
    ) -> Int[Tensor, "rows k"]:
        """Read what was verified since, then draft k tokens, see `Drafter.draft`."""
        slots = [length + count for length, count in zip(self.caches[0].lengths, counts, strict=True)]
        known = torch.cat([ids, ids.new_zeros(len(ids), self.k)], dim=1)
        ends = torch.tensor(counts, device=ids.device)
        drafts: list[Tensor] = []
        before, kept = list(counts), self._recycled
        self._recycled = []
        for depth in range(1, self.k + 1):
            cache = self.caches[depth - 1]
            here = [total - length for total, length in zip(slots, cache.lengths, strict=True)]
            if depth > 1:
                hidden = _with_carried(hidden, kept[depth - 2] if kept else hidden[:, :1], before, here)
            size = torch.tensor(here, device=ids.device)
            tokens = window(known, ends + depth - 1 - size, max(here))
            positions = slot_positions(self.head, _positions(cache, size - 1, max(here)), 1)
            final = [count - min(total, depth - 1) for count, total in zip(here, slots, strict=True)]
            state = self._run(cache, depth, tokens, hidden[:, : max(here)], positions, here, final)
            drafts.append(self._choose(depth, state, size - 1))
            known = known.scatter(1, (ends + depth - 1)[:, None], drafts[-1])
            self._recycled.append(at(state.recycled, (size - depth).clamp(min=0)))
            hidden, before = state.recycled, here
        return torch.cat(drafts, dim=1)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with some of the rows."""
        super().select(rows)
        self._recycled = [state[list(rows)] for state in self._recycled]


def drafter_of(head: DraftHead, k: int, rows: int) -> Drafter:
    """The drafter that serves a head."""
    if default_rollout(head) == "chain":
        return RecycledDrafter(head, k, rows, 1)
    return DistinctDrafter(head, k, rows, k)


def _positions(cache: RaggedCache, last: Tensor, new: int) -> Tensor:
    """[rows, new]: positions of new slots; padding stays at that of the last one."""
    positions = cache.positions(new, last.device)
    return positions.minimum(at(positions, last))


def _with_carried(states: Tensor, carried: Tensor, before: Sequence[int], here: Sequence[int]) -> Tensor:
    """States of the depth before for the slots of this one: it may begin one slot earlier, whose state was carried over.

    Args:
        states: [rows, new, hidden], `before[i]` of them real.
        carried: [rows, 1, hidden], the last state that the depth before had final when it ran last.
        before, here: slots that the depth before and this one run.
    """
    earlier = torch.tensor([now > then for now, then in zip(here, before, strict=True)], device=states.device)
    both = torch.cat([carried, states], dim=1)
    return window(both, (~earlier).long(), states.shape[1] + 1)


def window(values: Tensor, start: Tensor, width: int) -> Tensor:
    """[rows, width, ...]: entries of each row from its own start; the last one again where a row ends earlier.

    Example: `window([[5, 6, 7], [1, 2, 3]], start=[0, 1], width=2)` is `[[5, 6], [2, 3]]`.
    """
    index = start[:, None] + torch.arange(width, device=values.device)
    index = index.clamp(0, values.shape[1] - 1)
    return values[torch.arange(len(values), device=values.device)[:, None], index]


def at(values: Tensor, place: Tensor) -> Tensor:
    """[rows, 1, ...]: one entry of each row."""
    return window(values, place, 1)
