"""The objective of a run."""

from __future__ import annotations

from mtp_zoo.head import DraftHead
from mtp_zoo.objective import DEFAULT_BETA, MTPObjective
from mtp_zoo.training.config import ObjectiveConfig


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
