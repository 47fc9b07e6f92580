"""Bytes that `load_head` takes from disk and from the Hub, against the size of the head, on a sharded checkpoint.

    python benchmarks/bytes_read.py

The trunk is 50 times the head. From disk, bytes are counted by the library's own report and by the kernel (/proc/self/io,
Linux). The Hub is a server on this machine, which counts the bodies that it sends: listing, config, index, headers, tensors.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

os.environ["HF_HUB_OFFLINE"] = "0"  # huggingface_hub reads it once, when it is imported; the server is on this machine
sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest

from mtp_zoo.loader import load_head
from tests.hub.loopback import LoopbackHub, served
from tests.tiny import tiny_config, tiny_tensors, write_index

TRUNK_TO_HEAD = 50
SHARDS = 8
REPO = "acme/sharded"


def kernel_bytes() -> int | None:
    """Bytes that this process has read, as the kernel counts them."""
    path = Path("/proc/self/io")
    if not path.exists():
        return None
    return int(next(line for line in path.read_text().splitlines() if line.startswith("rchar")).split()[1])


def make(directory: Path) -> int:
    """Write the checkpoint and return the size of its head."""
    config = tiny_config(hidden=512, vocab=4096, num_attention_heads=16, num_key_value_heads=4)
    tensors = tiny_tensors(config)
    head = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
    head_bytes = sum(tensor.nbytes for tensor in head.values())
    weight_map: dict[str, str] = {}
    for number in range(1, SHARDS + 1):
        file = f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        filler = torch.zeros(TRUNK_TO_HEAD * head_bytes // SHARDS // 2, dtype=torch.bfloat16)
        part = {f"model.layers.{number + 10}.filler.weight": filler}
        if number == SHARDS:
            part |= tensors
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(directory, weight_map)
    (directory / "config.json").write_text(json.dumps(config))
    return head_bytes


def from_disk(directory: Path, head_bytes: int) -> None:
    load_head(directory)  # imports what loading imports, so that the kernel's count is of data alone
    before = kernel_bytes()
    head = load_head(directory)
    after = kernel_bytes()
    assert head.report is not None
    print(f"disk, reported   {head.report.bytes_read:,} bytes, ratio {head.report.bytes_read / head_bytes:.4f}")
    if before is not None and after is not None:
        print(f"disk, kernel     {after - before:,} bytes, ratio {(after - before) / head_bytes:.4f}")


def from_hub(hub: LoopbackHub, directory: Path, head_bytes: int) -> None:
    hub.publish(REPO, hub.files_of(directory))
    for run in ("first", "second"):
        hub.forget()
        head = load_head(REPO)
        assert head.report is not None
        print(
            f"Hub, {run:6}      {hub.sent():,} bytes, ratio {hub.sent() / head_bytes:.4f}, {len(hub.requests)} requests, "
            f"reported {head.report.bytes_moved:,}"
        )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "checkpoint"
        directory.mkdir()
        head_bytes = make(directory)
        total = sum(path.stat().st_size for path in directory.iterdir())
        print(f"checkpoint {total:,} bytes, head {head_bytes:,} bytes, {total / head_bytes:.1f} times the head")
        from_disk(directory, head_bytes)
        with pytest.MonkeyPatch.context() as patch, served(patch, Path(folder) / "home") as hub:
            from_hub(hub, directory, head_bytes)


if __name__ == "__main__":
    main()
