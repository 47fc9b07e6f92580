"""`mtp-zoo graft`: what it prints, and how it ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import mtp_zoo as mz
from mtp_zoo.cli import app, main
from mtp_zoo.errors import ExportError, GraftMismatchError
from tests.exporting import CONFIG, HEAD, TENSORS, TRUNK, same, snapshot, stored
from tests.tiny import tiny_config, tiny_tensors, write_checkpoint


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["graft", *map(str, arguments)])


@pytest.fixture
def donor(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "donor", CONFIG, TENSORS)


@pytest.fixture
def trunk(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "trunk", CONFIG, {name: TENSORS[name] for name in TRUNK})


def test_it_prints_one_object_with_the_fields_of_an_export(donor: Path, trunk: Path, tmp_path: Path) -> None:
    result = run(donor, trunk, tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    exported = CliRunner().invoke(app, ["export", str(donor), str(tmp_path / "other"), "--json"])
    found = json.loads(result.stdout)
    assert found.keys() == json.loads(exported.stdout).keys()
    assert found["out"] == str(tmp_path / "out")
    assert same(stored(tmp_path / "out"), TENSORS, TENSORS)


def test_it_tells_people_what_to_know(donor: Path, trunk: Path, tmp_path: Path) -> None:
    lines = run(donor, trunk, tmp_path / "out", "--dtype", "fp32", "--copy").stdout.splitlines()
    assert "files_linked: 0" in lines
    assert [line.partition(":")[2].split()[0] for line in lines if line.startswith("notice: ")] == ["tokens", "the"]
    assert {stored(tmp_path / "out")[name].dtype for name in HEAD} == {torch.float32}


def test_two_models_end_with_two_and_every_fact(
    donor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(num_attention_heads=4)
    other = write_checkpoint(tmp_path / "other", config, tiny_tensors(config))
    monkeypatch.setattr(sys, "argv", ["mtp-zoo", "graft", str(donor), str(other), str(tmp_path / "out"), "--json"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("GraftMismatchError: ")
    assert "  - num_attention_heads: the head's trunk has 2, this one 4\n" in captured.err
    assert not (tmp_path / "out").exists()


def test_a_revision_is_that_of_the_source(donor: Path, trunk: Path, tmp_path: Path) -> None:
    tree = tmp_path / "models--org--donor"
    commit = "b" * 40
    (tree / "snapshots").mkdir(parents=True)
    donor.rename(tree / "snapshots" / commit)
    assert run(tree, trunk, tmp_path / "none", "--revision", "c" * 40).exception is not None
    assert run(tree, trunk, tmp_path / "out", "--revision", commit).exit_code == 0


def test_a_dry_run_checks_and_writes_nothing(donor: Path, trunk: Path, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    result = run(donor, trunk, tmp_path / "out", "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert snapshot(tmp_path) == before
    done = json.loads(run(donor, trunk, tmp_path / "out", "--json").stdout)
    assert (len(told["linked"]), told["head_bytes"], told["notices"]) == (
        done["files_linked"],
        done["head_bytes"],
        done["notices"],
    )
    config = tiny_config(num_attention_heads=4)
    other = write_checkpoint(tmp_path / "other", config, tiny_tensors(config))
    assert isinstance(run(donor, other, tmp_path / "new", "--dry-run").exception, GraftMismatchError)


def test_in_place_goes_into_the_trunks_own_directory_and_back(donor: Path, trunk: Path) -> None:
    before = stored(trunk)
    assert run(donor, trunk, "--in-place").exit_code == 0
    assert same(stored(trunk), TENSORS, TENSORS)
    mz.rollback(trunk)
    assert stored(trunk).keys() == before.keys()
    assert same(stored(trunk), before, before)


@pytest.mark.parametrize("rest", [[], ["out", "--in-place"]])
def test_a_goal_that_is_unclear_is_refused_before_anything_is_read(rest: list[str], tmp_path: Path) -> None:
    result = run(tmp_path / "nothing", tmp_path / "nothing", *rest)
    assert isinstance(result.exception, ExportError)
