"""What the tests of export share: one base, and how to look at what comes out."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mtp_zoo.checkpoint import INDEX_NAME
from mtp_zoo.head import DraftHead
from tests.tiny import tiny_config, tiny_tensors, write_checkpoint

CONFIG = tiny_config()
TENSORS = tiny_tensors(CONFIG)
HEAD = sorted(name for name in TENSORS if name.startswith("mtp."))
TRUNK = sorted(name for name in TENSORS if not name.startswith("mtp."))
FC = "mtp.fc.weight"
LAST = "model_mtp_head.safetensors"
ONE, TWO, THREE = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
MIXED = {ONE: TRUNK[:10], TWO: [*TRUNK[10:], *HEAD[:5]], THREE: HEAD[5:]}
"""One clean shard, one with some of the head, one with nothing else."""


def make_base(directory: Path) -> Path:
    """The checkpoint that is exported from: three shards, a tokenizer, a folder of code."""
    write_checkpoint(directory, CONFIG, TENSORS, shards=MIXED)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "code").mkdir()
    (directory / "code" / "modeling.py").write_text("print()\n")
    return directory


def stored(root: Path) -> dict[str, torch.Tensor]:
    """Every tensor of every top-level file; fails on a name that is in two files, as no server would."""
    out: dict[str, torch.Tensor] = {}
    for path in sorted(root.glob("*.safetensors")):
        found = load_file(path)
        assert not out.keys() & found.keys()
        out |= found
    return out


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], names: Iterable[str]) -> bool:
    """Equal bytes, so that NaNs and signed zeros count."""
    return all(
        left[name].dtype == right[name].dtype
        and torch.equal(left[name].reshape(-1).view(torch.uint8), right[name].reshape(-1).view(torch.uint8))
        for name in names
    )


def snapshot(root: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(root)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(root.rglob("*"))
    }


def train(head: DraftHead, seed: int = 1) -> DraftHead:
    """Change every weight, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return head


def index_of(root: Path) -> dict[str, Any]:
    return json.loads((root / INDEX_NAME).read_text())
