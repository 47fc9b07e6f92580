"""The objective of a run, in the form that accelerate can wrap."""

from __future__ import annotations

import torch
from torch import nn

from mtp_zoo.batch import TokenBatch
from mtp_zoo.head import DraftHead
from mtp_zoo.objective import DEFAULT_BETA, MTPObjective, MTPOutput, MTPStats
from mtp_zoo.training.config import ObjectiveConfig


class HeadLoss(nn.Module):
    """The objective as a module over the head's parameters, which is what accelerate can wrap."""

    def __init__(self, objective: MTPObjective) -> None:
        super().__init__()
        self.head = objective.head
        self.objective = objective

    def forward(self, tokens: TokenBatch, hidden: torch.Tensor, counts: torch.Tensor | None) -> MTPOutput:
        """See `MTPObjective`."""
        return self.objective(tokens, hidden, step_counts=counts)


def make_objective(head: DraftHead, config: ObjectiveConfig) -> MTPObjective:
    """The objective that a configuration asks for."""
    return MTPObjective(
        head,
        depths=config.depths,
        loss=config.loss if isinstance(config.loss, str) else {str(name): w for name, w in config.loss.items()},
        beta=config.beta or DEFAULT_BETA,
        weights=config.weights,
        rollout=config.rollout,
        chunk_size=config.chunk_size,
    )


def freeze_unused(head: DraftHead, depths: int) -> None:
    """Freeze what depths behind `depths` have to themselves: no loss reaches it, and data parallelism would wait for it."""
    for name, parameter in head.named_parameters():
        if int(name.split(".")[1]) >= depths:
            parameter.requires_grad_(False)


def no_stats(depths: int, device: torch.device) -> MTPStats:
    """The sums of no batch."""
    each = torch.zeros(depths, dtype=torch.float64, device=device)
    one = torch.zeros((), dtype=torch.float64, device=device)
    return MTPStats(
        loss=each,
        slots=each,
        correct=each,
        matched=each,
        accepted=each,
        leading_greedy=one,
        leading_sampled=one,
        full_slots=one,
    )
