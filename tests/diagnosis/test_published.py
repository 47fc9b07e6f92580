"""Published checkpoints are sound, by the lists that there are of their tensors: names, shapes and dtypes, no numbers."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from mtp_zoo.diagnosis.examination import doctor
from mtp_zoo.safetensors_header import DTYPES, encode_header
from mtp_zoo_conformance.inventories import SOURCES, Inventory, read_inventory

ROOT = os.environ.get("MTP_ZOO_INVENTORIES")

SOUND = ("deepseek_r1", "glm_4_7_flash", "glm_5_1", "qwen3_6_27b", "qwen3_next_80b")
"""Those whose list holds what the head borrows, and whose config is not cut short where it lists modules."""

PARTIAL = {
    "qwen3_5_0_8b_base": {"MZ107"},
    "qwen3_6_27b_nvfp4": {"MZ107"},
    "qwen3_6_27b_w4a16_mtp": {"MZ107", "MZ306"},
}
"""Lists of the head alone, so that what it borrows is missing."""

pytestmark = pytest.mark.skipif(ROOT is None, reason="MTP_ZOO_INVENTORIES names no folder of inventories")


def write(inventory: Inventory, root: Path) -> Path:
    """A checkpoint with these headers; its numbers are a hole in the file."""
    root.mkdir()
    (root / "config.json").write_text(json.dumps(inventory.config.raw))
    rows = [(e.name, e.dtype, e.shape, DTYPES[e.dtype][0] * math.prod(e.shape) // 8) for e in inventory.entries]
    header = encode_header(rows, {})
    with (root / "model.safetensors").open("wb") as stream:
        stream.write(header)
        stream.truncate(len(header) + sum(row[3] for row in rows))
    return root


@pytest.mark.parametrize("name", [*SOUND, *PARTIAL])
def test_nothing_is_found_that_is_not_there(name: str, tmp_path: Path) -> None:
    root = write(read_inventory(Path(str(ROOT)) / name, SOURCES[name]), tmp_path / "model")
    assert {finding.id for finding in doctor(root).findings} == PARTIAL.get(name, set())
