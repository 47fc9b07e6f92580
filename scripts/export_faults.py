"""Exports that are killed, and exports whose system calls fail: every one of them, and what was found behind.

    python scripts/export_faults.py                  # 200 kills at random moments, a kill and four errors at every boundary
    python scripts/export_faults.py --random 20      # fewer
    python scripts/export_faults.py --disk-full      # also on a real disk that is too small (mounts a tmpfs: needs root)

A tiny checkpoint is exported to a new directory, updated in place, and rolled back. Behind each fault there must be no half
output, an unchanged base, unchanged files of other checkpoints that share them, and a next run that comes out right. Linux on
x86-64. Ends with 1 where something else was found.
"""

from __future__ import annotations

import argparse
import errno
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from mtp_zoo.errors import ExportError
from mtp_zoo.exporter import export
from mtp_zoo.loader import load_head
from mtp_zoo.tables import render_table
from tests import syscalls
from tests.exporting import make_base, snapshot
from tests.faulty_exports import FAILURES, KINDS, Tally, Trials


def main() -> int:
    """Make them all and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, default=200, help="kills at random moments, for each kind of export")
    parser.add_argument("--every", type=int, default=1, help="take every n-th boundary only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--disk-full", action="store_true")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not syscalls.available():
        print("Processes can't be traced here.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        rows = list(_rows(Path(name), arguments))
        if arguments.disk_full:
            rows.append(("new directory", "disks of 16 to 304 KiB", _small_disks(Path(name))))
    wrong = [problem for _, _, tally in rows for problem in tally.wrong]
    found = [
        {"export": kind, "fault": fault, "runs": t.faults, **t.ended, "wrong": len(t.wrong)} for kind, fault, t in rows
    ]
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        cells = [(r["export"], r["fault"], *(str(r.get(k, 0)) for k in (*ENDS, "wrong"))) for r in found]
        print(render_table("Faults", ("export", "fault", *ENDS, "wrong"), cells, right=(2, 3, 4, 5, 6)))
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


ENDS = ("runs", "killed", "error", "done")


def _rows(folder: Path, arguments: argparse.Namespace) -> Iterator[tuple[str, str, Tally]]:
    for kind in KINDS:
        trials = Trials(folder / kind.replace(" ", "-"), kind)
        boundaries = range(1, trials.calls() + 1, arguments.every)
        trials.kill_randomly(arguments.random, arguments.seed)
        yield kind, "SIGKILL at a random moment", trials.tally
        trials.tally = Tally()
        trials.kill_at(boundaries)
        yield kind, "SIGKILL before every writing call", trials.tally
        for number in FAILURES if kind != "rollback" else ():
            trials.tally = Tally()
            trials.fail_at(boundaries, number)
            yield kind, f"{errno.errorcode[number]} from every writing call", trials.tally


def _small_disks(folder: Path) -> Tally:
    """Export onto file systems that are too small by ever less."""
    base, tally = make_base(folder / "spare-base"), Tally()
    before, head = snapshot(base), load_head(base)
    for kib in range(16, 320, 32):
        disk = folder / f"disk-{kib}"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", str(disk)], check=True)
        try:
            tally.faults += 1
            export(head, base, disk / "out")
            tally.ended["done"] += 1
        except ExportError as error:
            tally.ended["error"] += 1
            left = [path.name for path in disk.iterdir()]
            if left or "No space left" not in str(error) or snapshot(base) != before:
                tally.wrong.append(f"a disk of {kib} KiB: {left} is left after {error}")
        finally:
            subprocess.run(["umount", str(disk)], check=True)
    return tally


if __name__ == "__main__":
    sys.exit(main())
