"""Context parallel: one batch cut along its slots over several ranks.

Everything that looks ahead (input ids, labels, gates of every depth) is computed on the whole batch by `TokenBatch` and cut
afterwards, so no rank rolls anything across the edge of its part. A part is a `TokenBatch` to the objective: it says which
slots count, what enters them, and how to attend to keys and target states that lie on other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, cast, get_args

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from torch.distributed import ProcessGroup

from mtp_zoo.batch import DepthSlots, Segment, TokenBatch
from mtp_zoo.context_attention import ContextState, KeyPlaces
from mtp_zoo.context_layout import Layout, gather_order, pick
from mtp_zoo.errors import ParallelError


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedBatch(TokenBatch):
    """The slots of one rank; made by `split`. The fields of `TokenBatch` are cut: seq is whole / size.

    Attributes:
        rank, size: which part of how many.
        depths: per depth what the slots read and predict, computed on the whole batch.
        main: the slots that the target's own next-token loss counts, computed on the whole batch.
        order: slot of the whole row at every place of a gather over the ranks, rank 0 first.
        order_doc_ids: its document.
        group: the ranks that hold the parts; without it nothing can be asked of them.
    """

    rank: int
    size: int
    depths: tuple[DepthSlots, ...]
    main: Bool[Tensor, "batch seq"]
    order: Int[Tensor, "batch whole"]
    order_doc_ids: Int[Tensor, "batch whole"]
    group: ProcessGroup | None = None

    @property
    def slot_ids(self) -> Int[Tensor, "batch seq"]:
        """Where this rank's slots lie in the whole row, rising."""
        return self._mine(self.order)

    def slots(self, depth: int) -> DepthSlots:
        """What `depth` (1-based) reads and predicts in this rank's slots.

        Raises:
            ParallelError: the batch was split for fewer depths.
        """
        if not 1 <= depth <= len(self.depths):
            raise ParallelError(
                f"Reading depth {depth} of a split batch: it was split for depths 1 to {len(self.depths)}.",
                remedy="Split the batch for as many depths as the objective unrolls.",
            )
        return self.depths[depth - 1]

    def main_gate(self) -> Bool[Tensor, "batch seq"]:
        """Slots that the target's own next-token loss would count."""
        return self.main

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Refused: documents do not lie whole on one rank."""
        raise ParallelError(
            "Taking a split batch apart into documents: other ranks hold parts of them.",
            remedy="Compute target states on the whole batch and cut them with ShardedBatch.take.",
        )

    def chain_state(self) -> ContextState:
        """What the attention of a rollout over this batch needs."""
        places = KeyPlaces(self.slot_ids, self.doc_ids, self.order, self.order_doc_ids, self.group)
        return ContextState(places)

    def to(self, device: torch.device | str) -> ShardedBatch:
        """The same part on another device."""
        moved = cast("ShardedBatch", super().to(device))
        depths = tuple(DepthSlots(*(getattr(d, f.name).to(device) for f in fields(d))) for d in self.depths)
        whole = {name: getattr(self, name).to(device) for name in ("main", "order", "order_doc_ids")}
        return replace(moved, depths=depths, **whole)

    def take(self, whole: Shaped[Tensor, "batch whole *rest"]) -> Shaped[Tensor, "batch seq *rest"]:
        """This rank's slots of anything that is aligned with the whole batch: states, advantages, masks.

        Raises:
            ParallelError: it is not aligned.
        """
        if whole.shape[:2] != self.order.shape:
            raise ParallelError(
                f"Cutting a tensor for rank {self.rank}: expected a whole batch, {list(self.order.shape)}, in front, got "
                f"{list(whole.shape)}.",
                remedy="Pass the tensor of the whole batch, as it was split.",
            )
        return pick(whole, self.slot_ids)

    def reassemble(self, parts: Sequence[Shaped[Tensor, "batch seq *rest"]]) -> Shaped[Tensor, "batch whole *rest"]:
        """The whole tensor from the parts of all ranks, rank 0 first: the inverse of `take`.

        Raises:
            ParallelError: not one part a rank, or parts of other shapes.
        """
        wrong = [f"part {n}: {list(part.shape)}" for n, part in enumerate(parts) if part.shape[:2] != self.shape]
        if wrong or len(parts) != self.size:
            raise ParallelError(
                f"Reassembling: expected {self.size} parts [{self.shape[0]}, {self.shape[1]}, ...], got {len(parts)}.",
                remedy="Gather the parts over the context-parallel group, in the order of its ranks.",
                problems=wrong,
            )
        return pick(torch.cat(list(parts), dim=1), self.order.argsort(dim=1))

    @torch.no_grad()
    def ahead_states(self, hidden: Shaped[Tensor, "batch seq *rest"], steps: int) -> Shaped[Tensor, "batch seq *rest"]:
        """States `steps` slots ahead of every slot, also from other ranks; zero where there is none. Without a graph.

        Only states at the edges of the parts travel: `steps` a chunk. All ranks of the group must call it.

        Raises:
            ParallelError: states of other ranks are needed and the batch has no group.
        """
        whole, local = self.order.shape[1], self.shape[1]
        rows = whole * torch.arange(len(hidden), device=hidden.device)[:, None]
        wanted = self.order + steps
        exists = wanted < whole
        # The place in a gather at which the wanted slot lies, numbered through all rows; the same on all ranks.
        source = self.order.argsort(dim=1).gather(1, wanted.clamp(max=whole - 1)) + rows
        owner, asker = source % whole // local, torch.arange(whole, device=hidden.device) // local
        travelling = source[exists & (owner != asker)].unique()
        arrived = self._exchange(hidden, travelling)
        source, exists = self._mine(source), self._mine(exists)
        near = exists & (self._mine(owner) == self.rank)
        far = exists & ~near
        out = torch.zeros_like(hidden)
        out[near] = self._at(hidden, source[near])
        out[far] = arrived[torch.searchsorted(travelling, source[far])]
        return out

    def _mine(self, by_place: Tensor) -> Tensor:
        local = self.shape[1]
        return by_place[:, self.rank * local : (self.rank + 1) * local]

    def _at(self, hidden: Tensor, source: Tensor) -> Tensor:
        """States of this rank at places that are numbered through all rows."""
        whole = self.order.shape[1]
        return hidden[source // whole, source % whole - self.rank * self.shape[1]]

    def _exchange(self, hidden: Tensor, source: Tensor) -> Tensor:
        """States of all ranks at places that are numbered through all rows: the own from here, others from where they are."""
        values = hidden.new_zeros(len(source), *hidden.shape[2:])
        if not len(source):
            return values
        if self.group is None:
            raise ParallelError(
                "Reading target states ahead: other ranks hold some of them, and the batch was split without a group.",
                remedy="Pass group= to split, or train on the text alone: loss='ce', agreement=False.",
            )
        mine = source % self.order.shape[1] // self.shape[1] == self.rank
        values[mine] = self._at(hidden, source[mine])
        torch.distributed.all_reduce(values, group=self.group)
        return values


def split(
    tokens: TokenBatch,
    depths: int,
    rank: int | None = None,
    size: int | None = None,
    layout: Layout = "zigzag",
    *,
    group: ProcessGroup | None = None,
) -> ShardedBatch:
    """The slots of one rank, with everything that looks ahead computed before the cut.

    Args:
        tokens: the whole batch, the same on all ranks.
        depths: for how many depths.
        rank, size: which part of how many; by default those of `group`.
        layout: "zigzag" needs rooms that divide by 2 * size (`pad_documents`), "contiguous" rows that divide by size.
        group: the ranks that hold the parts. Layouts need none; attention and target states do.

    Raises:
        ParallelError: a part, a layout or a number of depths that is none, or slots that do not divide.
    """
    if group is not None:
        rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    _check_request(tokens, depths, rank, size, layout)
    assert rank is not None
    assert size is not None
    order = gather_order(tokens, size, layout)
    local = tokens.shape[1] // size
    here = order[:, rank * local : (rank + 1) * local]
    whole = {f.name: getattr(tokens, f.name) for f in fields(TokenBatch)}
    cut = {name: None if value is None else pick(value, here) for name, value in whole.items()}
    return ShardedBatch(
        **cast("dict[str, Any]", cut),
        rank=rank,
        size=size,
        depths=tuple(_cut_slots(tokens.slots(depth), here) for depth in range(1, depths + 1)),
        main=pick(tokens.main_gate(), here),
        order=order,
        order_doc_ids=tokens.doc_ids.gather(1, order),
        group=group,
    )


def _cut_slots(slots: DepthSlots, here: Tensor) -> DepthSlots:
    return DepthSlots(*(pick(getattr(slots, f.name), here) for f in fields(slots)))


def _check_request(tokens: TokenBatch, depths: int, rank: int | None, size: int | None, layout: str) -> None:
    problems = [f"layout: expected one of {get_args(Layout)}, got {layout!r}"] if layout not in get_args(Layout) else []
    if depths < 1:
        problems.append(f"depths: expected at least 1, got {depths}")
    if rank is None or size is None or not 0 <= rank < size:
        problems.append(f"rank and size: expected 0 <= rank < size, or a group, got {rank} and {size}")
    if isinstance(tokens, ShardedBatch):
        problems.append("tokens: expected a whole batch, got one that is split")
    if problems:
        raise ParallelError(
            "Splitting a batch: it can't be done as asked.", remedy="Correct the arguments.", problems=problems
        )
