"""The directory of a run: what it was started with, its metrics, its training checkpoints.

run.json              the settings that change the curve
metrics.jsonl         one line a step; floats in full, so that equal curves are equal bytes
checkpoints/          see `checkpoints.py`
report.html
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtp_zoo.errors import OutputExistsError, ResumeError
from mtp_zoo.training.files import read_object, write_atomic

FRESH = "Start a new run with another run_dir."


class RunDirectory:
    """One run's directory.

    Args:
        path: where it is or will be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.report = path / "report.html"
        self._run = path / "run.json"

    def refuse_existing(self) -> None:
        """Raise OutputExistsError where the path is taken."""
        if self.path.exists() or self.path.is_symlink():
            raise OutputExistsError(
                f"Starting a run in {self.path}: the path exists.",
                remedy="Choose another run_dir, or continue the run with --resume.",
            )

    def create(self, identity: Mapping[str, Any]) -> None:
        """Make the directory of a new run.

        Raises:
            OutputExistsError: it has come to exist.
        """
        self.refuse_existing()
        self.checkpoints.mkdir(parents=True)
        write_atomic(self._run, json.dumps(identity, indent=2) + "\n")
        self.metrics.touch()

    def require(self, identity: Mapping[str, Any]) -> None:
        """Compare with what the run was started with; keys that `identity` lacks are left out.

        Raises:
            ResumeError: there is no run here, or it was started with something else; every difference is listed.
        """
        try:
            begun = read_object(self._run)
        except (OSError, ValueError) as error:
            raise ResumeError(f"Resuming {self.path}: no run in it ({error}).", remedy=FRESH) from error
        differences = [
            f"{name}: the run has {_short(begun[name]) if name in begun else 'no such setting'}, got {_short(value)}"
            for name, value in identity.items()
            if name not in begun or begun[name] != value
        ]
        if differences:
            raise ResumeError(
                f"Resuming {self.path}: {len(differences)} settings that change the curve differ.",
                remedy=f"Restore them. {FRESH}",
                problems=differences,
            )

    def append(self, record: Mapping[str, float]) -> None:
        """Add the line of one step."""
        with self.metrics.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")

    def rewind(self, step: int) -> None:
        """Drop the lines of steps behind `step`, and one that was cut off by a kill.

        Raises:
            ResumeError: lines of earlier steps are missing.
        """
        kept = self._lines()[:step]
        steps = [json.loads(line)["step"] for line in kept]
        if steps != list(range(1, step + 1)):
            raise ResumeError(
                f"Resuming {self.path}: expected {self.metrics.name} to hold steps 1 to {step}, got {len(kept)} lines.",
                remedy=f"Restore the file. {FRESH}",
            )
        write_atomic(self.metrics, "".join(kept))

    def records(self) -> list[dict[str, float]]:
        """The metrics of every step."""
        return [json.loads(line) for line in self._lines()]

    def _lines(self) -> list[str]:
        if not self.metrics.exists():
            return []
        lines = self.metrics.read_text(encoding="utf-8").splitlines(keepends=True)
        return [line for line in lines if line.endswith("\n")]


def digest(identity: Mapping[str, Any]) -> str:
    """sha256 of what a run was started with."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
