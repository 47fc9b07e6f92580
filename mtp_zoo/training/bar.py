"""Progress of a training run on stderr: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 30.0


class TrainingBar:
    """Shows loss, accuracy of every depth and tokens a second; a context manager.

    Args:
        steps: steps of the whole run.
        done: steps that were done before.
        depths: depths whose accuracy is shown.
        shown: False for all processes but one.
    """

    def __init__(self, steps: int, done: int, depths: int, *, shown: bool) -> None:
        self.steps, self.depths, self.shown = steps, depths, shown
        self.tokens = 0.0
        self._began = self._last_line = time.monotonic()
        self._console = Console(stderr=True)
        self._live = shown and self._console.is_terminal
        numbers = TextColumn("{task.fields[numbers]}")
        columns = (TextColumn("Training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), numbers)
        self._bar = Progress(*columns, console=self._console, disable=not self._live)
        self._task = self._bar.add_task("", total=steps, completed=done, numbers="")

    def __enter__(self) -> TrainingBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    @property
    def seconds(self) -> float:
        """Seconds since the bar was made."""
        return time.monotonic() - self._began

    @property
    def tokens_per_second(self) -> float:
        """Tokens trained on a second since the bar was made, over all processes."""
        return self.tokens / max(self.seconds, 1e-9)

    def step(self, record: Mapping[str, float]) -> None:
        """Show the metrics of a finished step."""
        self.tokens += record["tokens"]
        accuracy = " ".join(f"{record[f'mtp/acc_{depth}']:.3f}" for depth in range(1, self.depths + 1))
        numbers = f"loss {record['loss']:.4f}  acc {accuracy}  {self.tokens_per_second:,.0f} tokens/s"
        self._bar.update(self._task, completed=record["step"], numbers=numbers)
        if self.shown and not self._live and time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            self._console.print(f"step {record['step']:.0f}/{self.steps}  {numbers}", highlight=False)
            self._last_line = time.monotonic()
