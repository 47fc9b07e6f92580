"""Run a function in a process of its own and report its peak memory and time."""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any


def _child(pipe: Any, prepare: Callable[[], Any], work: Callable[[Any], Any], repeats: int) -> None:
    state = prepare()
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        work(state)
        times.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pipe.send((statistics.median(times), (peak - base) / 2**20))


def measure(prepare: Callable[[], Any], work: Callable[[Any], Any], *, repeats: int = 3) -> tuple[float, float]:
    """(median seconds, peak extra GiB) of `work(prepare())`; both must be importable by name."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, prepare, work, repeats))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()
