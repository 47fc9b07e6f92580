"""Context parallel: one batch cut along its slots over several ranks.

Everything that looks ahead (input ids, labels, gates of every depth) is computed on the whole batch by `TokenBatch` and cut
afterwards, so no rank rolls anything across the edge of its part. A part is a `TokenBatch` to the objective: it says which
slots count, what enters them, and how to attend to keys and target states that lie on other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, cast, get_args

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from torch.distributed import ProcessGroup

from mtp_zoo.arguments import DEPTHS, checked, instance, one_of, optional, refuse, whole
from mtp_zoo.batch import Segment, TokenBatch
from mtp_zoo.context_attention import ContextState, KeyPlaces
from mtp_zoo.context_layout import Layout, gather_order, pick
from mtp_zoo.errors import ParallelError
from mtp_zoo.host_copies import moved
from mtp_zoo.loss_plan import DepthSlots
from mtp_zoo.targets import tap_of, with_tap


@dataclass(frozen=True)
class Route:
    """How target states travel between the parts of a batch.

    Attributes:
        order: of this rank's states and, behind them, those that travel: what puts them in the order of the whole batch.
        sent: which of those that travel this rank holds.
        source: where these lie in the rank's rows laid end to end.
        travelling: how many travel.
    """

    order: Int[Tensor, " rows"]
    sent: Int[Tensor, " n"]
    source: Int[Tensor, " n"]
    travelling: int


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
        local = self.shape[1]
        return self.order[:, self.rank * local : (self.rank + 1) * local]

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

    @cached_property
    def largest_label(self) -> int:
        """The highest token id that is trained on from one of this rank's slots; -1 where there is none."""
        return max(int(each.labels.max()) for each in self.host.depths)

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
        return with_tap(pick(whole, self.slot_ids), tap_of(whole))

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
    def reached(self, hidden: Shaped[Tensor, "batch seq hidden"], depths: int) -> Shaped[Tensor, "rows hidden"]:
        """As in `TokenBatch`, with states that lie on other ranks. Without a graph. All ranks of the group must call it.

        Only the states at the edges of parts travel, `depths` a chunk. Rows are in the order of the whole batch.

        Raises:
            ParallelError: states of other ranks are needed and the batch has no group.
        """
        route = self._route(depths)
        return torch.cat([hidden.flatten(0, 1), self._exchange(hidden, route)]).index_select(0, route.order)

    def places(self, depths: int) -> list[Int[Tensor, "batch seq"]]:
        """As in `TokenBatch`."""
        own, travelling = self._numbered(self.host.slot_ids), self.host._travelling(depths)
        held = torch.cat([own.flatten(), travelling]).sort().values
        rows = [torch.searchsorted(held, own + depth) for depth in range(1, depths + 1)]
        return [row.clamp(max=len(held) - 1) for row in rows]

    def _route(self, depths: int) -> Route:
        """What travels for so many depths, computed on the host, once a batch."""
        if depths not in self._routes:
            host, device = self.host, self.input_ids.device
            self._routes[depths] = host._make_route(depths) if host is self else moved(host._route(depths), device)
        return self._routes[depths]

    @cached_property
    def _routes(self) -> dict[int, Route]:
        return {}

    def _make_route(self, depths: int) -> Route:
        travelling, (length, local) = self._travelling(depths), (self.order.shape[1], self.shape[1])
        place = self.order.argsort(dim=1).flatten()[travelling] - self.rank * local
        sent = ((place >= 0) & (place < local)).nonzero().squeeze(-1)
        order = torch.cat([self._numbered(self.slot_ids).flatten(), travelling]).argsort()
        return Route(order, sent, travelling[sent] // length * local + place[sent], len(travelling))

    def _numbered(self, slots: Tensor) -> Tensor:
        """Slots of rows as slots of all rows end to end."""
        return slots + self.order.shape[1] * torch.arange(len(slots), device=slots.device)[:, None]

    def _travelling(self, depths: int) -> Tensor:
        """The slots of all rows whose states some rank needs from another, rising; the same on all ranks."""
        owner = self.order.argsort(dim=1) // self.shape[1]
        asker = torch.arange(self.order.shape[1], device=self.order.device) // self.shape[1]
        found: list[Tensor] = []
        for depth in range(1, depths + 1):
            wanted = (self.order + depth).clamp(max=self.order.shape[1] - 1)  # beyond: any, no slot there counts
            found.append(self._numbered(wanted)[owner.gather(1, wanted) != asker])
        return torch.cat(found).unique()

    def _exchange(self, hidden: Tensor, route: Route) -> Tensor:
        """States that travel: the own from here, the others from the ranks that hold them."""
        values = hidden.new_zeros(route.travelling, hidden.shape[-1])
        if not route.travelling:
            return values
        if self.group is None:
            raise ParallelError(
                "Reading target states ahead: other ranks hold some of them, and the batch was split without a group.",
                remedy="Pass group= to split, or train on the text alone: loss='ce', agreement=False.",
            )
        values.index_copy_(0, route.sent, hidden.flatten(0, 1).index_select(0, route.source))
        torch.distributed.all_reduce(values, group=self.group)
        return values


@checked(
    "Splitting a batch",
    error=ParallelError,
    tokens=instance("a TokenBatch", TokenBatch),
    depths=DEPTHS,
    rank=optional(whole(least=0)),
    size=optional(whole(least=1, most=2**16)),
    layout=one_of(*get_args(Layout)),
    group=optional(instance("a process group", ProcessGroup)),
)
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
    _check_request(tokens, rank, size)
    assert rank is not None
    assert size is not None
    device, tokens = tokens.input_ids.device, tokens.host
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
    ).to(device)


def _cut_slots(slots: DepthSlots, here: Tensor) -> DepthSlots:
    return DepthSlots(*(pick(getattr(slots, f.name), here) for f in fields(slots)))


def _check_request(tokens: TokenBatch, rank: int | None, size: int | None) -> None:
    problems: list[str] = []
    if rank is None or size is None or not 0 <= rank < size:
        problems.append(f"rank and size: expected 0 <= rank < size, or a group, got {rank} and {size}")
    if isinstance(tokens, ShardedBatch):
        problems.append("tokens: expected a whole batch, got one that is split")
    refuse("Splitting a batch", problems, ParallelError)
