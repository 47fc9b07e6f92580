"""LossPlan: which slots of a batch the losses read, as indices that are computed on the host, once a batch.

A boolean mask as an index makes the host wait until the device has counted it. Here the counting is done where the batch was
built, and a forward pass only uploads what it needs.

One row of six tokens, all to be learnt, at two depths:

    slot                   0    1    2    3    4    5
    depth 1 counts         1    1    1    1    .    .      slots 0 1 2 3,  target rows 0 1 2 3
    depth 2 counts         1    1    1    .    .    .      slots 0 1 2,    target rows 1 2 3
    target states read     .    1    1    1    1    .      target slots 1 2 3 4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mtp_zoo.host_copies import moved


@dataclass(frozen=True)
class DepthSlots:
    """What depth k reads and predicts in every slot; see the table at the top of `mtp_zoo/batch.py`.

    Attributes:
        input_ids: token whose embedding enters the slot; 0 where there is none.
        labels: token to predict; `IGNORED` where the gate is closed.
        gate: whether the slot counts.
        enters: whether a token of the slot's document enters that is no placeholder; elsewhere the embedding is zero.
    """

    input_ids: Int[Tensor, "batch seq"]
    labels: Int[Tensor, "batch seq"]
    gate: Bool[Tensor, "batch seq"]
    enters: Bool[Tensor, "batch seq"]


@dataclass(frozen=True)
class DepthPlan:
    """The slots of one depth that count.

    Attributes:
        slots: where they lie in the batch's rows laid end to end, rising.
        labels: the token that each predicts.
        target_rows: for each, the place in the plan's target slots of the state from which the target predicts the same token.
        known_rows: the same numbers, on the host.
    """

    slots: Int[Tensor, " n"]
    labels: Int[Tensor, " n"]
    target_rows: Int[Tensor, " n"]
    known_rows: Sequence[int]


@dataclass(frozen=True)
class LossPlan:
    """What the losses of depths 1..K read.

    Attributes:
        depths: one plan a depth.
        target_slots: rows of `TokenBatch.reached` that some depth is compared with, each once, rising.
        full: slots that count at every depth, rising.
        counts: number of slots a depth, FP32.
    """

    depths: tuple[DepthPlan, ...]
    target_slots: Int[Tensor, " rows"]
    full: Int[Tensor, " m"]
    counts: Float[Tensor, " depths"]

    def to(self, device: torch.device | str) -> LossPlan:
        """The same plan on another device; the host does not wait for it."""
        return moved(self, device)


def make_plan(slots: Sequence[DepthSlots], places: Sequence[Int[Tensor, "batch seq"]]) -> LossPlan:
    """The plan of a batch that lies on the CPU.

    Args:
        slots: of every depth.
        places: of every depth, each slot's row in `TokenBatch.reached`.
    """
    found = [each.gate.flatten().nonzero().squeeze(-1) for each in slots]
    wanted = [place.flatten()[index] for place, index in zip(places, found, strict=True)]
    read = torch.zeros(max((int(rows[-1]) + 1 for rows in wanted if len(rows)), default=0), dtype=torch.bool)
    for rows in wanted:
        read[rows] = True
    place_of = read.cumsum(0) - 1
    depths: list[DepthPlan] = []
    for each, index, rows in zip(slots, found, wanted, strict=True):
        target_rows = place_of[rows]
        depths.append(DepthPlan(index, each.labels.flatten()[index], target_rows, target_rows.tolist()))
    full = torch.stack([each.gate for each in slots]).all(dim=0).flatten().nonzero().squeeze(-1)
    counts = torch.tensor([float(len(index)) for index in found])
    return LossPlan(tuple(depths), read.nonzero().squeeze(-1), full, counts)
