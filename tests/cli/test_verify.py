"""`mtp-zoo verify`: what it prints, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mtp_zoo.cli import app
from mtp_zoo.errors import SourceNotFoundError
from mtp_zoo.exporter import export
from mtp_zoo.loader import load_head
from tests.exporting import HEAD, LAST, TRUNK, make_base


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


@pytest.fixture
def out(tmp_path: Path) -> Path:
    base = make_base(tmp_path / "base")
    return export(load_head(base), base, tmp_path / "out").out


def test_right_checkpoint_ends_with_0(out: Path) -> None:
    result = run(out, "--against", out.parent / "base")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{out}: 15 tensors of the head by hash, {len(TRUNK)} of the trunk against the base; ")
    assert lines[1:] == ["no problems"]
    found = json.loads(run(out, "--json").stdout)
    assert (found["ok"], found["problems"], found["head_tensors"]) == (True, [], len(HEAD))


def test_changed_checkpoint_ends_with_1_and_says_what_changed(out: Path) -> None:
    content = bytearray((out / LAST).read_bytes())
    content[-1] ^= 1
    (out / LAST).write_bytes(content)
    result = run(out)
    assert result.exit_code == 1
    assert "of the head in model_mtp_head.safetensors has other numbers than at the export" in result.stdout
    found = json.loads(run(out, "--json").stdout)
    assert (found["ok"], len(found["problems"])) == (False, 1)


def test_what_is_no_checkpoint_is_the_users_error(tmp_path: Path) -> None:
    assert isinstance(run(tmp_path).exception, SourceNotFoundError)
