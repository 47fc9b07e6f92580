"""Kills and failing system calls at boundaries spread over an export, an update in place, and a rollback.

`scripts/export_faults.py` tries every boundary.
"""

from __future__ import annotations

import errno
import resource
from pathlib import Path

import pytest

from mtp_zoo.errors import ExportError
from mtp_zoo.exporter import export
from mtp_zoo.loader import load_head
from tests import syscalls
from tests.exporting import make_base, snapshot
from tests.faulty_exports import KINDS, Kind, Trials

KILLS, ERRORS = 5, 4
"""Boundaries tried here, of each kind."""

traced = pytest.mark.skipif(not syscalls.available(), reason="processes can't be traced here")


def spread(count: int, calls: int) -> list[int]:
    """`count` numbers from 1 to `calls`, both ends included."""
    return sorted({1 + (calls - 1) * step // (count - 1) for step in range(count)})


@traced
@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_leaves_all_of_the_old_or_all_of_the_new(tmp_path: Path, kind: Kind) -> None:
    trials = Trials(tmp_path, kind)
    calls = trials.calls()
    trials.kill_at([*spread(KILLS, calls), calls - 4])
    trials.kill_randomly(2, seed=0)
    assert trials.tally.wrong == []
    assert trials.tally.ended["killed"] >= KILLS


@traced
@pytest.mark.parametrize("kind", ["new directory", "in place"])
def test_a_call_that_fails_leaves_everything_as_it_was(tmp_path: Path, kind: Kind) -> None:
    trials = Trials(tmp_path, kind)
    calls = trials.calls()
    trials.fail_at(spread(ERRORS, calls), errno.ENOSPC)
    trials.fail_at([calls - 2], errno.EROFS)
    assert trials.tally.wrong == []
    assert trials.tally.ended["error"] >= ERRORS


def test_files_that_may_not_grow_are_told_of(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    before, head = snapshot(base), load_head(base)
    said = tmp_path / "said"

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        try:
            export(head, base, tmp_path / "out")
        except ExportError as error:
            said.write_text(str(error))

    assert syscalls.run(limited) == 0
    assert "File too large" in said.read_text()
    assert "ulimit -f" in said.read_text()
    said.unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]
    assert snapshot(base) == before
