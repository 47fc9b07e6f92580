"""Hostile checkpoints: every public entry point ends in the typed error, writes nothing, and runs nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mtp_zoo as mz
from mtp_zoo.cli import main
from mtp_zoo.errors import MTPZooError, RollbackError
from mtp_zoo.inspection import inspect
from mtp_zoo.journal import UPDATE
from tests.hostile import CORPUS, NUMBERS, good_checkpoint

ENTRY_POINTS: dict[str, Callable[[Path], object]] = {
    "open": lambda root: mz.CheckpointIndex.open(root).verify(),
    "load_head": mz.load_head,
    "load_shared": mz.load_shared,
    "export": lambda root: mz.export(mz.load_head(root), root, root.parent / "out"),
    "graft from": lambda root: mz.graft(root, root.parent / "good", root.parent / "out"),
    "graft into": lambda root: mz.graft(root.parent / "good", root, root.parent / "out"),
    "verify against": lambda root: mz.verify(root.parent / "good", against=root),
    "push": lambda root: mz.push(root, "acme/tiny", dry_run=True),
}
"""Every way in that reads the whole of a checkpoint, or its head."""

REPORTS: dict[str, Callable[[Path], tuple[object, bool]]] = {
    "inspect": lambda root: (found := inspect(root), found.loads),
    "verify": lambda root: (found := mz.verify(root), found.ok),
    "doctor": lambda root: (found := mz.doctor(root, deep=True), found.healthy),
}
"""Those that say what is wrong, as far as that can be read."""


def state(root: Path) -> dict[str, Any]:
    """What a look at the directory and around it shows, without opening or following anything."""
    found = {}
    for folder, folders, files in os.walk(root.parent):
        for name in (*folders, *files):
            path = Path(folder, name)
            status = path.lstat()
            found[str(path)] = (status.st_mode, status.st_mtime_ns, status.st_size, status.st_nlink)
    return found


@pytest.mark.parametrize("name", CORPUS)
def test_every_entry_point_refuses_it_by_type_and_touches_nothing(tmp_path: Path, name: str) -> None:
    """https://github.com/sgl-project/sglang/issues/14754"""
    hostile = CORPUS[name]
    good_checkpoint(tmp_path / "good")
    root = good_checkpoint(tmp_path / "base")
    hostile.change(root)
    before = state(root)
    for entry, call in ENTRY_POINTS.items():
        with pytest.raises(hostile.error, match=f"(?s){hostile.says}") as caught:
            call(root)
        str(caught.value).encode()
        assert state(root) == before, entry


def test_code_that_comes_with_a_checkpoint_is_carried_along_and_never_run(tmp_path: Path) -> None:
    good_checkpoint(tmp_path / "good")
    root = good_checkpoint(tmp_path / "base")
    code = f"open({str(tmp_path / 'harmed')!r}, 'w')\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py"):
        (root / name).write_text(code)
    config = json.loads((root / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
    (root / "config.json").write_text(json.dumps(config))
    (root / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["tokenization_evil.T", null]}}')
    (root / "pytorch_model.bin").write_bytes(
        b"cbuiltins\nopen\n(S'" + str(tmp_path / "harmed").encode() + b"'\nS'w'\ntR."
    )
    for entry in ("open", "load_head", "load_shared", "graft into", "verify against"):
        ENTRY_POINTS[entry](root)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    mz.export(mz.load_head(root), root, tmp_path / "out")
    for call in REPORTS.values():
        call(tmp_path / "out")
    assert (tmp_path / "out" / "modeling_evil.py").read_text() == code
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("name", NUMBERS)
def test_a_config_of_impossible_numbers_is_refused_before_anything_is_allocated(tmp_path: Path, name: str) -> None:
    hostile = NUMBERS[name]
    root = good_checkpoint(tmp_path / "base")
    hostile.change(root)
    for call in (mz.load_head, mz.load_shared):
        with pytest.raises(hostile.error, match=f"(?s){hostile.says}"):
            call(root)


@pytest.mark.parametrize("name", CORPUS)
def test_what_reports_tells_what_is_wrong(tmp_path: Path, name: str) -> None:
    root = good_checkpoint(tmp_path / "base")
    CORPUS[name].change(root)
    before = state(root)
    for entry, call in REPORTS.items():
        try:
            found, right = call(root)
        except MTPZooError as error:
            told, code = str(error), 2
        else:
            told, code = str(found), 1
            assert not right, entry
        assert re.search(CORPUS[name].says, told, re.DOTALL), (entry, told)
        assert run([entry, str(root)]) == code
        assert state(root) == before, entry


@pytest.mark.parametrize(
    ("journal", "link"),
    [
        ({"added": ["linked/file"]}, "linked"),
        ({"replaced": ["file"]}, ".mtp-zoo-update/old"),
        ({"added": ["../elsewhere/file"]}, None),
        ({"added": ["a\0b"]}, None),
        ({"added": [{}]}, None),
    ],
)
def test_a_journal_that_comes_with_a_checkpoint_moves_nothing_outside(
    tmp_path: Path, journal: dict[str, Any], link: str | None
) -> None:
    """`rollback`, and the next update in place, would remove what was added and move what was replaced."""
    root = good_checkpoint(tmp_path / "base")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("mine")
    (root / UPDATE).mkdir()
    if link:
        os.symlink(tmp_path / "elsewhere", root / link)
    content = {"format": 1, "replaced": [], "added": [], "written": {}, **journal}
    (root / UPDATE / "journal.json").write_text(json.dumps(content))
    head, before = mz.load_head(good_checkpoint(tmp_path / "good")), state(root)
    for call in (lambda: mz.rollback(root), lambda: mz.export(head, root, in_place=True)):
        with pytest.raises(RollbackError, match="not what an update in place writes"):
            call()
        assert state(root) == before


def run(arguments: list[str]) -> int:
    """The exit code of the command, as a shell would see it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["mtp-zoo", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
    return int(left.value.code or 0)
