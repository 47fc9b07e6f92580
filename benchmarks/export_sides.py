"""The sides of `export.py`, each run in a process of its own: `main` with the arguments SIDE BASE OUT prints a JSON object.

Runs in two environments, so it imports the library of its side only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def resident(field: str) -> int:
    """`VmRSS` (now) or `VmHWM` (peak since the last reset) of this process, in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


def written() -> int:
    """Bytes that this process has made the kernel write."""
    found = re.search(r"write_bytes: (\d+)", Path("/proc/self/io").read_text())
    assert found is not None
    return int(found.group(1))


def flush(out: Path) -> None:
    """Wait until every file of `out` is on the disk."""
    for path in [*out.rglob("*"), out]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def ours(base: Path, out: Path, in_place: bool) -> Callable[[], Any]:
    from mtp_zoo.exporter import export
    from mtp_zoo.loader import load_head

    head = load_head(base)
    return lambda: export(head, base, in_place=True) if in_place else export(head, base, out)


def copy(base: Path, out: Path) -> Callable[[], Any]:
    def work() -> None:
        shutil.copytree(base, out)
        flush(out)

    return work


def main() -> None:
    side, base, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if side == "speculators":
        from export_theirs import prepare

        stitch = prepare(base, out)

        def work() -> None:
            stitch()
            flush(out)
    else:
        work = copy(base, out) if side == "copy" else ours(base, out, "in place" in side)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is resident now
    before, bytes_before = resident("VmRSS"), written()
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    peak = resident("VmHWM")
    print(json.dumps({"seconds": seconds, "written": written() - bytes_before, "growth": peak - before, "peak": peak}))
