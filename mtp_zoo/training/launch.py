"""Accelerate: processes, devices, autocast and trackers of a run."""

from __future__ import annotations

import importlib.util
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType

from mtp_zoo.errors import SettingsError
from mtp_zoo.training.config import TrainConfig

SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def make_accelerator(config: TrainConfig) -> Accelerator:
    """The accelerator of a run. It accumulates nothing: the trainer counts tokens over the whole step.

    Raises:
        SettingsError: the launcher asks for sharded weights, which training checkpoints can't hold.
    """
    precision = {"bf16": "bf16", "fp32": "no"}[config.precision]
    accelerator = Accelerator(
        mixed_precision=precision, log_with=list(config.trackers) or None, project_dir=str(config.run_dir)
    )
    if accelerator.distributed_type in SHARDED:
        raise SettingsError(
            f"Preparing the run: expected one process or data parallelism, got {accelerator.distributed_type.value}.",
            remedy="Launch with data parallelism (MULTI_GPU), or in one process.",
        )
    return accelerator


@contextmanager
def own_accelerate_state() -> Generator[None]:
    """Give Accelerators that are made and used inside a precision and an accumulation of their own.

    accelerate keeps both for the whole process. The caller's, which may be in the middle of a training of its own, are put
    aside and come back untouched.
    """
    kinds: tuple[Any, ...] = (AcceleratorState, GradientState)
    kept = [(kind, kind._shared_state) for kind in kinds]
    for kind, state in kept:
        kind._shared_state = type(state)()
    try:
        yield
    finally:
        for kind, state in kept:
            kind._shared_state = state


def require_trackers(names: Sequence[str]) -> None:
    """Raise SettingsError for trackers that are not installed; accelerate would leave them out without a word."""
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    if absent:
        raise SettingsError(
            f"Preparing the trackers: {', '.join(absent)} can't be imported.",
            remedy=f"Install them (pip install {' '.join(absent)}), or take them out of trackers.",
        )
