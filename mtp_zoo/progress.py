"""Progress on stderr, so that stdout stays one JSON object for machines."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

SHOW_AFTER_SECONDS = 1.0
"""Work that ends sooner shows no bar."""


@contextmanager
def progress(label: str, *, total: int) -> Generator[Callable[[], None]]:
    """A bar that appears once the work has taken `SHOW_AFTER_SECONDS`; yields the function that advances it by one."""
    import time

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(label, total=total)
    began = time.monotonic()

    def advance() -> None:
        bar.advance(task)
        if not bar.live.is_started and time.monotonic() - began > SHOW_AFTER_SECONDS:
            bar.start()

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()
