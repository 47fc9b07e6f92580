"""Updates in place: what changes, what stays, the way back, and what is refused."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import mtp_zoo as mz
from mtp_zoo.cli import app
from mtp_zoo.errors import BrokenCheckpointError, ExportError, RollbackError
from mtp_zoo.exporter import export
from mtp_zoo.index_file import INDEX_NAME
from mtp_zoo.journal import GUARDS, UNDO, UPDATE, discard_undo, owned, refuse_half_updated, rollback, updating
from mtp_zoo.loader import load_head
from tests.exporting import CONFIG, FC, LAST, ONE, TENSORS, THREE, TRUNK, TWO, make_base, same, stored, train
from tests.faulty_exports import contents
from tests.tiny import write_checkpoint


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_base(tmp_path / "base")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory that stands for a checkpoint: files of one line."""
    for name in ("config.json", INDEX_NAME, "a", "b", "sub/c"):
        (tmp_path / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / name).write_text(f"old {name}")
    return tmp_path / "folder"


def update(root: Path, *, gone: tuple[str, ...] = (), **files: str) -> None:
    with owned(root), updating(root, gone) as new:
        for name, text in {"config.json": "new", **files}.items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).write_text(text)


def test_update_in_place_is_the_checkpoint_that_an_export_makes(base: Path, tmp_path: Path) -> None:
    head = train(load_head(base))
    export(head, base, tmp_path / "out")
    untouched = (base / ONE).stat()
    report = export(head, base, in_place=True)
    assert contents(base) == contents(tmp_path / "out")
    assert (base / ONE).stat().st_ino == untouched.st_ino
    assert report.out == base
    assert (report.files_linked, report.files_rewritten, report.files_copied) == (1, 1, 1)
    assert same(stored(base), TENSORS, TRUNK)
    assert not torch.equal(stored(base)[FC], TENSORS[FC])
    assert sorted(path.name for path in (base / UNDO / "old").iterdir()) == sorted(
        [TWO, THREE, INDEX_NAME, "config.json"]
    )


def test_rollback_brings_back_every_byte_and_leaves_nothing_of_its_own(base: Path) -> None:
    before = contents(base)
    export(train(load_head(base)), base, in_place=True)
    report = mz.rollback(base)
    assert contents(base) == before
    assert report.undone == "finished"
    assert sorted(report.restored) == sorted([TWO, THREE, INDEX_NAME, "config.json"])
    assert {LAST, "mtp_zoo.json"} <= set(report.removed)
    assert not (base / UNDO).exists()
    with pytest.raises(RollbackError, match="no update in place is recorded"):
        rollback(base)


def test_single_file_becomes_a_listed_shard_and_comes_back(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", CONFIG, TENSORS)
    before = contents(base)
    export(train(load_head(base)), base, in_place=True)
    assert not (base / "model.safetensors").exists()
    assert same(stored(base), TENSORS, TRUNK)
    rollback(base)
    assert contents(base) == before


def test_a_second_update_takes_the_place_of_the_first_as_the_way_back(base: Path) -> None:
    export(train(load_head(base), seed=1), base, in_place=True)
    first = contents(base)
    export(train(load_head(base), seed=2), base, in_place=True)
    assert contents(base) != first
    rollback(base)
    assert contents(base) == first


def test_other_checkpoints_that_share_the_files_are_not_touched(base: Path, tmp_path: Path) -> None:
    export(load_head(base), base, tmp_path / "out")
    before = contents(tmp_path / "out")
    export(train(load_head(base)), base, in_place=True)
    assert os.path.samefile(base / ONE, tmp_path / "out" / ONE)
    assert contents(tmp_path / "out") == before


def test_an_export_does_not_take_the_old_files_along(base: Path, tmp_path: Path) -> None:
    export(train(load_head(base)), base, in_place=True)
    export(load_head(base), base, tmp_path / "out")
    assert not (tmp_path / "out" / UNDO).exists()


def test_discarding_frees_what_nothing_else_holds(base: Path) -> None:
    freed = sum((base / name).stat().st_size for name in (TWO, THREE, INDEX_NAME, "config.json"))
    export(train(load_head(base)), base, in_place=True)
    after = contents(base)
    assert discard_undo(base) == freed
    assert contents(base) == after
    with pytest.raises(RollbackError, match="nothing is kept"):
        discard_undo(base)


def test_files_written_since_the_update_are_not_overwritten(base: Path) -> None:
    """As by a trainer that saves into the directory that it read."""
    export(train(load_head(base)), base, in_place=True)
    (base / LAST).write_bytes(b"trained for a week")
    after = contents(base)
    with pytest.raises(RollbackError, match=rf"1 files are not as the update(.|\n)*- {LAST}"):
        rollback(base)
    assert contents(base) == after


@pytest.mark.parametrize("place", ["tree", "snapshot"])
def test_hub_cache_is_never_updated(tmp_path: Path, place: str) -> None:
    tree = tmp_path / "models--acme--tiny"
    snapshot = make_base(tree / "snapshots" / ("c" * 40))
    before = contents(tree)
    with pytest.raises(ExportError, match="a part of a hub cache"):
        export(load_head(snapshot), tree if place == "tree" else snapshot, in_place=True)
    assert contents(tree) == before


def test_place_must_be_clear(base: Path, tmp_path: Path) -> None:
    head = load_head(base)
    for arguments in ({}, {"out": tmp_path / "out", "in_place": True}):
        with pytest.raises(ExportError, match="expected an output directory or in_place"):
            export(head, base, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ExportError, match="nothing to copy"):
        export(head, base, in_place=True, copy=True)
    with pytest.raises(ExportError, match="no directory"):
        export(head, "acme/none", in_place=True)
    assert not (base / UPDATE).exists()


@pytest.mark.parametrize("moved", [0, 1, 3, 5, 6, 8])
def test_half_update_is_refused_by_readers_and_taken_back_by_rollback(
    base: Path, monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    before, head = contents(base), train(load_head(base))
    moves = iter(range(moved))

    def power_cut(source: Path, place: Path) -> None:
        next(moves)
        place.parent.mkdir(exist_ok=True)
        os.replace(source, place)

    with monkeypatch.context() as patch:
        patch.setattr("mtp_zoo.journal._move", power_cut)
        patch.setattr("mtp_zoo.journal._take_back", lambda root: None)
        with pytest.raises((StopIteration, RuntimeError)):
            export(head, base, in_place=True)
    assert (base / "config.json").exists() is (moved == 0)
    with pytest.raises(BrokenCheckpointError, match=f"mtp-zoo rollback {base}"):
        refuse_half_updated(base)
    with pytest.raises(BrokenCheckpointError):
        discard_undo(base)
    assert rollback(base).undone == "interrupted"
    assert contents(base) == before


def test_failure_while_files_move_is_taken_back_at_once(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, head = contents(base), train(load_head(base))
    replace, calls = os.replace, iter(range(5))

    def full(source: Path, place: Path) -> None:
        if next(calls, None) == 4:
            raise OSError(28, "No space left on device")
        replace(source, place)

    monkeypatch.setattr("mtp_zoo.journal.os.replace", full)
    with pytest.raises(ExportError, match=r"No space left on device\. The checkpoint is as it was"):
        export(head, base, in_place=True)
    assert contents(base) == before
    assert not (base / UPDATE).exists()


def test_failure_to_take_back_names_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(source: Path, place: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("mtp_zoo.journal.os.replace", broken)
    monkeypatch.setattr("mtp_zoo.journal._sync_folders", broken)
    with pytest.raises(ExportError, match=f"failed as well(.|\n)*mtp-zoo rollback {folder}"):
        update(folder, a="new a")


def test_files_below_folders_are_replaced_added_and_removed(folder: Path) -> None:
    before = contents(folder)
    update(folder, gone=("b",), **{"sub/c": "new c", "sub/deeper/d": "new d", "a": "old a"})
    after = contents(folder)
    assert after.keys() == {"config.json", INDEX_NAME, "a", "sub/c", "sub/deeper/d"}
    assert after["sub/deeper/d"] == b"new d"
    record = json.loads((folder / UNDO / "journal.json").read_text())
    assert record["replaced"] == ["b", "config.json", "sub/c"], "a and the index hold what they held"
    assert record["added"] == ["sub/deeper/d"]
    rollback(folder)
    assert contents(folder) == before


def test_guards_leave_first_and_come_last(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[str] = []
    replace = os.replace

    def note(source: Path, place: Path) -> None:
        moves.append(("out " if "old" in place.parts else "in ") + place.name)
        replace(source, place)

    monkeypatch.setattr("mtp_zoo.journal.os.replace", note)
    update(folder, **{INDEX_NAME: "new", "a": "new", "z": "new"})
    last = list(GUARDS)
    assert last[-1] == "config.json"
    assert moves == [f"out {name}" for name in [*last[::-1], "a"]] + [f"in {name}" for name in ["a", "z", *last]]


@pytest.fixture
def held(folder: Path) -> Iterator[Path]:
    """A directory that another thread is updating."""
    inside, done = threading.Event(), threading.Event()

    def work() -> None:
        with owned(folder):
            inside.set()
            done.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(30)
    yield folder
    done.set()
    thread.join()


def test_one_update_at_a_time(held: Path) -> None:
    with pytest.raises(ExportError, match="another process is doing so"), owned(held):
        pytest.fail("two at once")
    with pytest.raises(ExportError, match="another process is doing so"):
        rollback(held)


def test_what_is_no_directory_is_told(tmp_path: Path) -> None:
    with pytest.raises(RollbackError, match="No such file or directory"):
        rollback(tmp_path / "none")


def test_journal_that_leads_out_of_the_directory_is_refused(folder: Path) -> None:
    (folder / UPDATE / "old").mkdir(parents=True)
    record = {"format": 1, "replaced": ["../victim"], "added": [], "written": {}}
    (folder / UPDATE / "journal.json").write_text(json.dumps(record))
    (folder.parent / "victim").write_text("keep")
    with pytest.raises(RollbackError, match="not what an update in place writes"):
        rollback(folder)
    assert (folder.parent / "victim").read_text() == "keep"


def test_commands(base: Path) -> None:
    run = CliRunner().invoke
    before = contents(base)
    done = run(app, ["export", str(base), "--in-place", "--dtype", "fp32", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["out"] == str(base)
    done = run(app, ["rollback", str(base), "--json"])
    assert json.loads(done.stdout)["undone"] == "finished"
    assert contents(base) == before
    assert run(app, ["export", str(base), "--in-place"]).exit_code == 0
    assert "bytes freed" in run(app, ["rollback", str(base), "--discard"]).stdout
    assert isinstance(run(app, ["rollback", str(base)]).exception, RollbackError)
