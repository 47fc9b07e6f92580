"""Peak memory and time of a piece of work. Linux only: the kernel keeps the peak. Needs the standard library alone."""

from __future__ import annotations

import multiprocessing
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _resident(field: str) -> float:
    """`VmRSS` (now) or `VmHWM` (peak since the last reset) of this process, in GiB."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) / 2**20


def watch(work: Callable[[], Any], repeats: int, warm_up: Callable[[], Any] | None = None) -> tuple[list[float], float]:
    """(seconds of each repeat, peak GiB above what is resident at the start, warm-up included) in this process."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is resident now
    base = _resident("VmRSS")
    if warm_up is not None:
        warm_up()
    times: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return times, _resident("VmHWM") - base


def _child(pipe: Any, prepare: Callable[[], Any], work: Callable[[Any], Any], repeats: int) -> None:
    state = prepare()
    times, peak = watch(lambda: work(state), repeats)
    pipe.send((statistics.median(times), peak))


def measure(prepare: Callable[[], Any], work: Callable[[Any], Any], *, repeats: int = 3) -> tuple[float, float]:
    """(median seconds, peak extra GiB) of `work(prepare())` in a process of its own; both must be importable by name."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, prepare, work, repeats))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()
