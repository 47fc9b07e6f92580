"""A dry run: what it says is what the export then does, and it reads no tensor and writes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mtp_zoo.checkpoint import TensorReader
from mtp_zoo.cli import app
from mtp_zoo.errors import ExportError, OutputExistsError
from mtp_zoo.export_preview import head_on_meta, preview_export
from mtp_zoo.exporter import export
from mtp_zoo.loader import load_head
from tests.exporting import CONFIG, HEAD, LAST, ONE, TENSORS, THREE, TRUNK, TWO, make_base, snapshot
from tests.quantizing import BLOCKS, make_fp8
from tests.stored_forms import plain_form
from tests.tiny import tiny_config, write_checkpoint


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_base(tmp_path / "base")


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor can be read."""

    def refuse(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(TensorReader, "_fill", refuse)


@pytest.mark.usefixtures("blind")
def test_files_are_told_apart_without_reading_a_tensor_or_writing(base: Path, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    seen = preview_export(head_on_meta(base), base, tmp_path / "out")
    assert (seen.linked, seen.rewritten, seen.left_out) == ((ONE,), (TWO,), (THREE,))
    assert seen.copied == ("tokenizer.json", "code/modeling.py", "config.json")
    assert seen.written == (LAST, "model.safetensors.index.json", "mtp_zoo.json", "README.md")
    assert seen.bytes_linked == (base / ONE).stat().st_size
    assert snapshot(tmp_path) == before
    lines = str(seen).splitlines()
    assert lines[0] == f"make {tmp_path / 'out'}"
    assert lines[1].split() == ["link", "1", ONE]


@pytest.mark.parametrize("options", [{}, {"copy": True}, {"dtype": torch.float32}, {"in_place": True}])
@pytest.mark.parametrize("form", ["bf16", "fp8", "grafted"])
def test_bytes_foreseen_are_the_bytes_written(tmp_path: Path, form: str, options: dict[str, object]) -> None:
    """To the byte, the texts included: only the digests of the provenance are unknown, and those are of equal length."""
    if form == "fp8":
        config, tensors = make_fp8(plain_form("qwen3_5"), BLOCKS)
        base = source = write_checkpoint(tmp_path / "base", config, tensors)
    else:
        base = source = make_base(tmp_path / "base")
    if form == "grafted":
        base = write_checkpoint(tmp_path / "bare", tiny_config(depths=None), {n: TENSORS[n] for n in TRUNK}, shards=2)
    out = None if "in_place" in options else tmp_path / "out"
    seen = preview_export(head_on_meta(source), base, out, **options)  # type: ignore[arg-type]
    report = export(load_head(source), base, out, **options)  # type: ignore[arg-type]
    assert seen.bytes_written == report.bytes_written
    assert seen.head_bytes == report.head_bytes
    assert seen.notices == report.notices
    assert len(seen.rewritten) == report.files_rewritten
    assert len(seen.written) == report.files_written


def test_what_the_export_refuses_the_dry_run_refuses(base: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OutputExistsError):
        preview_export(head_on_meta(base), base, tmp_path / "taken")
    with pytest.raises(ExportError, match="got neither"):
        preview_export(head_on_meta(base), base)
    wide = write_checkpoint(tmp_path / "wide", {**CONFIG, "hidden_size": 96}, TENSORS)
    with pytest.raises(ExportError, match="made for another model"):
        preview_export(head_on_meta(base), wide, tmp_path / "out")


@pytest.mark.usefixtures("blind")
def test_command_prints_one_object(base: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["export", str(base), str(tmp_path / "out"), "--dry-run", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["rewritten"] == [TWO]
    assert found["head_bytes"] == sum(TENSORS[name].nbytes for name in HEAD)
    assert not (tmp_path / "out").exists()
