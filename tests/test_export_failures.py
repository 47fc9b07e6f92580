"""export: what is refused before anything is written, and what a failure leaves behind: nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_zoo.checkpoint import INDEX_NAME
from mtp_zoo.errors import BrokenCheckpointError, ExportError, OutputExistsError, UnsupportedQuantizationError
from mtp_zoo.exporter import export
from mtp_zoo.loader import load_head
from mtp_zoo.overlay import Overlay
from tests.exporting import CONFIG, FC, LAST, ONE, TENSORS, TWO, make_base, same, snapshot, stored
from tests.tiny import tiny_config, tiny_tensors, write_checkpoint


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_base(tmp_path / "base")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.mark.parametrize("name", [TWO, LAST, INDEX_NAME, "mtp_zoo.json"])
def test_full_disk_leaves_nothing_and_a_rerun_succeeds(
    base: Path, out: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = snapshot(base)
    write = Overlay._write

    def full(self: Overlay, file: str, *args: Any, **options: Any) -> None:
        write(self, file, *args, **options)
        if file == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Overlay, "_write", full)
        with pytest.raises(ExportError, match=r"No space left(.|\n)*Free disk space"):
            export(load_head(base), base, out)
    assert sorted(path.name for path in out.parent.iterdir()) == ["base"]
    assert snapshot(base) == before
    export(load_head(base), base, out)
    assert same(stored(out), TENSORS, TENSORS)


@pytest.mark.parametrize("place", [".", "inner", "code/inner", ".."])
def test_output_that_overlaps_the_base_is_refused(base: Path, place: str) -> None:
    """https://github.com/bghira/SimpleTuner/pull/2714"""
    before = snapshot(base)
    with pytest.raises(ExportError, match="the same place, or one lies inside the other"):
        export(load_head(base), base, base / place)
    assert snapshot(base) == before


def test_output_that_reaches_the_base_through_a_link_is_refused(base: Path, tmp_path: Path) -> None:
    os.symlink(base, tmp_path / "link")
    with pytest.raises(ExportError, match="same place"):
        export(load_head(base), base, tmp_path / "link" / "inner")


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_output_that_exists_is_refused_and_left_alone(base: Path, out: Path, kind: str) -> None:
    {"folder": out.mkdir, "file": out.touch, "dangling link": lambda: os.symlink("nowhere", out)}[kind]()
    before = out.lstat()
    with pytest.raises(OutputExistsError):
        export(load_head(base), base, out)
    after = out.lstat()  # its time of access may move: links are read
    assert (after.st_ino, after.st_mode, after.st_mtime_ns) == (before.st_ino, before.st_mode, before.st_mtime_ns)
    assert sorted(path.name for path in out.parent.iterdir()) == ["base", "out"]


def test_base_that_is_not_whole_is_refused(base: Path, out: Path) -> None:
    """https://github.com/sgl-project/sglang/pull/32279"""
    head = load_head(base)
    (base / ONE).unlink()
    with pytest.raises(BrokenCheckpointError, match=f"{ONE}: not on disk"):
        export(head, base, out)
    assert sorted(path.name for path in out.parent.iterdir()) == ["base"]


def test_head_of_another_model_is_refused(base: Path, tmp_path: Path, out: Path) -> None:
    config = tiny_config(hidden=96)
    wide = write_checkpoint(tmp_path / "wide", config, tiny_tensors(config))
    with pytest.raises(ExportError, match=r"eh_proj\.weight: the base needs \[64, 128\], the head has \[96, 192\]"):
        export(load_head(wide), base, out)
    assert not out.exists()


def test_base_whose_head_is_quantised_otherwise_than_as_fp8_is_refused_by_the_name_of_its_scheme(
    tmp_path: Path, out: Path
) -> None:
    head = load_head(write_checkpoint(tmp_path / "float", CONFIG, TENSORS))
    config = {**CONFIG, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    tensors = {name: tensor for name, tensor in TENSORS.items() if name != FC}
    tensors[FC.replace("weight", "qweight")] = torch.zeros(16, 64, dtype=torch.int32)
    base = write_checkpoint(tmp_path / "base", config, tensors)
    with pytest.raises(UnsupportedQuantizationError, match="gptq") as caught:
        export(head, base, out)
    assert "dtype=torch.bfloat16" in caught.value.remedy
    assert [str(problem) for problem in caught.value.problems] == ["mtp.fc.qweight: I32 [16, 64]"]
    assert not out.exists()


def test_dtype_that_is_no_float_is_refused(base: Path, out: Path) -> None:
    with pytest.raises(ExportError, match="float8_e4m3fn"):
        export(load_head(base), base, out, dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize("summary", [{"model": object()}, {"loss": float("nan")}])
def test_training_summary_that_is_not_json_is_refused_before_writing(base: Path, out: Path, summary: Any) -> None:
    with pytest.raises(ExportError, match="not JSON"):
        export(load_head(base), base, out, training=summary)
    assert not out.exists()


def test_folder_that_links_to_its_own_parent_is_told(base: Path, out: Path) -> None:
    os.symlink("..", base / "code" / "loop")
    with pytest.raises(ExportError, match="links to a folder that holds it"):
        export(load_head(base), base, out)
    assert not out.exists()
