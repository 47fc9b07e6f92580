"""Nothing is published that is not what was meant."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from mtp_zoo.errors import VerificationError
from mtp_zoo.exporter import export
from mtp_zoo.index_file import encode_index
from mtp_zoo.loader import load_head
from mtp_zoo.overlay import Overlay
from tests.exporting import CONFIG, FC, LAST, ONE, TENSORS, TWO, make_base
from tests.tiny import tiny_config, write_checkpoint


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_base(tmp_path / "base")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.mark.parametrize("file", [ONE, TWO, LAST])
def test_bytes_that_change_under_way_are_caught_and_nothing_is_published(
    base: Path, out: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    def flip(root: Path, *args: Any) -> None:
        with (root / file).open("r+b") as stream:
            stream.seek(-1, os.SEEK_END)
            last = stream.read(1)[0]
            stream.seek(-1, os.SEEK_END)
            stream.write(bytes([last ^ 1]))
        check(root, *args)

    from mtp_zoo.export_check import check_output as check

    monkeypatch.setattr("mtp_zoo.exporter.check_output", flip)
    with pytest.raises(VerificationError, match="differs from the"):
        export(load_head(base), base, out, copy=True)
    assert sorted(path.name for path in out.parent.iterdir()) == ["base"]


def test_stale_head_tensor_in_the_output_is_caught(base: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_old(self: Overlay, file: str, pieces: Any) -> None:
        shutil.copy(base / file, self.root / file)

    monkeypatch.setattr(Overlay, "rewrite", keep_old)
    with pytest.raises(VerificationError, match=f"{TWO}.*each of these files holds"):
        export(load_head(base), base, out)
    assert not out.exists()


def test_declaration_that_disagrees_with_the_files_is_caught(
    base: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/unslothai/unsloth-zoo/pull/847"""
    (base / "config.json").write_text(json.dumps(tiny_config(depths=2)))
    monkeypatch.setattr("mtp_zoo.modelconfig.ModelConfig.with_value", lambda self, field, value: dict(self.raw))
    right = write_checkpoint(base.parent / "right", CONFIG, TENSORS)
    with pytest.raises(VerificationError, match="declares 2 depths, the files hold 1, the head has 1"):
        export(load_head(right), base, out)
    assert not out.exists()


def test_shard_that_was_not_written_is_caught(base: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Overlay, "link", lambda *args: None)
    with pytest.raises(VerificationError, match=f"{ONE}: not on disk"):
        export(load_head(base), base, out)
    assert not out.exists()


def test_index_that_leaves_a_tensor_out_is_caught(base: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shorter(weight_map: dict[str, str], metadata: dict[str, object]) -> str:
        return encode_index({name: file for name, file in weight_map.items() if name != FC}, metadata)

    monkeypatch.setattr("mtp_zoo.export_write.encode_index", shorter)
    with pytest.raises(VerificationError, match="the index differs from the plan"):
        export(load_head(base), base, out)
    assert not out.exists()
