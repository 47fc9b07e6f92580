"""Progress on stderr, so that stdout stays one JSON object for machines."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

SHOW_AFTER_SECONDS = 1.0
"""Work that ends sooner shows no bar."""


@contextmanager
def progress(label: str, *, total: int) -> Generator[Callable[[], None]]:
    """A bar that appears once the work has taken `SHOW_AFTER_SECONDS`; yields the function that advances it by one."""
    from rich.progress import MofNCompleteColumn

    with _bar(label, total, MofNCompleteColumn()) as advance:
        yield lambda: advance(1)


@contextmanager
def progress_bytes(label: str, *, total: int) -> Generator[Callable[[int], None]]:
    """The same for bytes: it shows how many are done and how many go by in a second; yields the function that adds some."""
    from rich.progress import DownloadColumn, TransferSpeedColumn

    with _bar(label, total, DownloadColumn(binary_units=True), TransferSpeedColumn()) as advance:
        yield advance


@contextmanager
def _bar(label: str, total: int, *columns: Any) -> Generator[Callable[[int], None]]:
    import time

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    shown = (TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn())
    bar = Progress(*shown, console=Console(stderr=True), transient=True, get_time=time.monotonic)
    task = bar.add_task(label, total=total)
    began = time.monotonic()

    def advance(amount: int) -> None:
        bar.advance(task, amount)
        if not bar.live.is_started and time.monotonic() - began > SHOW_AFTER_SECONDS:
            bar.start()

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()
