"""MTPStats: what a batch measured, as sums that add up over micro-batches, ranks and evaluation sets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor

from mtp_zoo.chunked_loss import DepthLoss
from mtp_zoo.loss_plan import LossPlan


@dataclass(frozen=True)
class MTPStats:
    """Sums of one or several batches; `a + b` is what one batch of both would give.

    Attributes:
        loss, slots, correct: [depths], sums over gated slots.
        matched, accepted: the same; None where agreement with the target was not measured.
        leading_greedy: sum over slots with every gate open of the number of leading depths that match the target, or None.
        leading_sampled: the same for rejection sampling, in expectation.
        full_slots: number of slots with every gate open.
    """

    loss: Tensor
    slots: Tensor
    correct: Tensor
    matched: Tensor | None
    accepted: Tensor | None
    leading_greedy: Tensor | None
    leading_sampled: Tensor | None
    full_slots: Tensor

    @classmethod
    def none(cls, depths: int, device: torch.device) -> MTPStats:
        """The sums of no batch."""
        each = torch.zeros(depths, dtype=torch.float64, device=device)
        one = torch.zeros((), dtype=torch.float64, device=device)
        return cls(each, each, each, each, each, one, one, one)

    def __add__(self, other: MTPStats) -> MTPStats:
        mine, theirs = self._values(), other._values()
        sums = (None if a is None or b is None else a + b for a, b in zip(mine, theirs, strict=True))
        return MTPStats(*sums)  # type: ignore[arg-type]

    def all_reduce(self) -> MTPStats:
        """The sums over all ranks; itself where torch.distributed is not initialised."""
        return MTPStats(*(None if value is None else all_reduce(value) for value in self._values()))  # type: ignore[arg-type]

    def _values(self) -> list[Tensor | None]:
        return [getattr(self, field.name) for field in fields(self)]

    def means(self) -> dict[str, Float[Tensor, ""]]:
        """Micro averages: sums over counts, as tensors, which nothing has to wait for."""
        named = {"loss": self.loss, "acc": self.correct, "match": self.matched, "accept": self.accepted}
        out: dict[str, Tensor] = {}
        for index, slots in enumerate(self.slots):
            for name, sums in named.items():
                if sums is not None:
                    out[f"mtp/{name}_{index + 1}"] = sums[index] / slots.clamp(min=1)
            out[f"mtp/slots_{index + 1}"] = slots
        for name, lengths in (("", self.leading_greedy), ("_sampled", self.leading_sampled)):
            if lengths is not None:
                out[f"mtp/accept_length{name}"] = 1 + lengths / self.full_slots.clamp(min=1)
        return out

    def metrics(self) -> dict[str, float]:
        """`means` as numbers. A depth without slots reports `mtp/slots_k` 0 and zeros."""
        means = self.means()
        return dict(zip(means, torch.stack([value.double() for value in means.values()]).tolist(), strict=True))


def gather_stats(plan: LossPlan, slots: int, losses: Sequence[DepthLoss]) -> MTPStats:
    """The sums of one batch; nothing waits for the device.

    Args:
        plan: which slots of each depth count.
        slots: how many slots the batch has.
        losses: of the slots that count, in their order.
    """
    compared = [
        (loss.matched, loss.accepted) for loss in losses if loss.matched is not None and loss.accepted is not None
    ]
    known = len(compared) == len(losses)
    return MTPStats(
        loss=_sums(loss.values for loss in losses),
        slots=plan.counts.double(),
        correct=_sums(loss.correct for loss in losses),
        matched=_sums(matched for matched, _ in compared) if known else None,
        accepted=_sums(accepted for _, accepted in compared) if known else None,
        leading_greedy=_leading(plan, slots, [matched.float() for matched, _ in compared]) if known else None,
        leading_sampled=_leading(plan, slots, [accepted for _, accepted in compared]) if known else None,
        full_slots=plan.counts.new_full((), len(plan.full), dtype=torch.float64),
    )


def _sums(values: Iterable[Tensor]) -> Float[Tensor, " depths"]:
    return torch.stack([value.detach().double().sum() for value in values])


def _leading(plan: LossPlan, slots: int, accepted: Sequence[Tensor]) -> Float[Tensor, ""]:
    """Sum over the slots that count at every depth of the expected number of leading depths that are accepted.

    Example: accepted with probabilities 1, 0.5 and 0.5, a slot expects 1 + 0.5 + 0.25 of them.
    """
    chance = plan.counts.new_zeros(slots, dtype=torch.float64).index_fill_(0, plan.full, 1.0)
    total = torch.zeros_like(chance)
    for depth, values in zip(plan.depths, accepted, strict=True):
        chance = chance * torch.zeros_like(chance).index_copy_(0, depth.slots, values.double())
        total = total + chance
    return total.sum()


def all_reduce(value: Tensor) -> Tensor:
    """The sum over all ranks; itself where torch.distributed is not initialised."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    value = value.clone()
    torch.distributed.all_reduce(value)
    return value
