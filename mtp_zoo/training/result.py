"""What a training run gives back."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtp_zoo.training.curves import EVAL


@dataclass(frozen=True)
class TrainResult:
    """What a run gave.

    Attributes:
        out: the servable checkpoint.
        run_dir: training checkpoints and metrics.
        report: the HTML report.
        steps: optimiser steps of the whole run.
        seconds: time that this process trained, without loading and exporting.
        tokens_per_second: over the same time, all processes together.
        metrics: of the last step, as in metrics.jsonl.
    """

    out: Path
    run_dir: Path
    report: Path
    steps: int
    seconds: float
    tokens_per_second: float
    metrics: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """The result for `--json`."""
        paths = {name: str(getattr(self, name)) for name in ("out", "run_dir", "report")}
        return {**asdict(self), **paths}

    def __str__(self) -> str:
        m = self.metrics
        held_out = f", held out {m[EVAL + 'mtp/accept_length']:.3f}" if f"{EVAL}loss" in m else ""
        return (
            f"{self.steps} steps, loss {m['loss']:.4f}, expected accept length {m['mtp/accept_length']:.3f}{held_out}\n"
            f"servable checkpoint: {self.out}\nreport: {self.report}"
        )
