"""How long `doctor` takes for a checkpoint of many tensors, headers only.

python benchmarks/doctor_names.py                  # 60,000 names in 60 shards
python benchmarks/doctor_names.py --names 1000 --shards 2

Two trunks, named like mixtures of experts: BF16 matrices, beside a Qwen3.5 head under names of its own, and FP8 matrices with
a scale each, beside a DeepSeek-V3 head that lies in the trunk's stack. Shards are sparse files: headers and index are real,
nothing else is. Both heads are whole ones of tiny shapes. Measured are `mtp_zoo.doctor` in a process that has imported torch
and the library, as the best of five, and the whole command in a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mtp_zoo.checkpoint import INDEX_NAME
from mtp_zoo.diagnosis.examination import doctor
from mtp_zoo.safetensors_header import encode_header
from tests.quantizing import BLOCKS, make_fp8
from tests.stored_forms import plain_form
from tests.tiny import tiny_config, tiny_tensors, write_checkpoint

COMMAND = "from mtp_zoo.cli import main; main()"
TENSORS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
SIDE = 64
"""Rows and columns of an expert's matrix."""

FIRST_EXPERT = 100
"""Number of the first expert; the tiny model has those of lower numbers."""

Row = tuple[str, str, tuple[int, ...], int]
"""Name, dtype, shape and bytes of a tensor."""


def experts() -> Iterator[str]:
    """Names of a trunk's matrices, in its first two layers: those behind may be the head's."""
    for number in itertools.count(FIRST_EXPERT):
        for layer in range(2):
            yield from (f"model.layers.{layer}.mlp.experts.{number}.{name}" for name in TENSORS)


def in_bf16() -> Iterator[Row]:
    for name in experts():
        yield name, "BF16", (SIDE, SIDE), 2 * SIDE * SIDE


def in_fp8() -> Iterator[Row]:
    grid = BLOCKS.grid((SIDE, SIDE))
    for name in experts():
        yield name, "F8_E4M3", (SIDE, SIDE), SIDE * SIDE
        yield f"{name}{BLOCKS.suffix}", "F32", grid, 4 * grid[0] * grid[1]


def qwen() -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
    config = tiny_config()
    return config, tiny_tensors(config)


def deepseek() -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
    return make_fp8(plain_form("deepseek_v3"), BLOCKS)


KINDS: Mapping[
    str, tuple[Callable[[], tuple[Mapping[str, Any], Mapping[str, Tensor]]], Callable[[], Iterator[Row]]]
] = {
    "Qwen3.5, BF16": (qwen, in_bf16),
    "DeepSeek-V3, FP8": (deepseek, in_fp8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", type=int, default=60_000)
    parser.add_argument("--shards", type=int, default=60)
    arguments = parser.parse_args()
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            root = make(kind, Path(folder) / "model", arguments.names, arguments.shards)
            doctor(root)
            seconds = min(timed(lambda root=root: diagnose(root)) for _ in range(5))
            command = [sys.executable, "-c", COMMAND, "doctor", root, "--json"]
            whole = timed(lambda command=command: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))
        print(f"{kind}, {arguments.names:,} names: doctor {seconds:.2f} s, the whole command {whole:.2f} s")


def make(kind: str, root: Path, names: int, shards: int) -> Path:
    """A checkpoint of `names` tensors beside those of a tiny model."""
    small, rows = KINDS[kind]
    config, tensors = small()
    write_checkpoint(root, config, tensors, shards=2)
    index = json.loads((root / INDEX_NAME).read_text())
    trunk = [row for row, _ in zip(rows(), range(names), strict=False)]
    for shard in range(shards):
        file = f"model-1{shard:04d}-of-{shards:05d}.safetensors"
        held = trunk[shard * names // shards : (shard + 1) * names // shards]
        header = encode_header(held, {"format": "pt"})
        with (root / file).open("wb") as stream:
            stream.write(header)
            stream.truncate(len(header) + sum(row[3] for row in held))
        index["weight_map"] |= dict.fromkeys((row[0] for row in held), file)
    index["metadata"]["total_size"] += sum(row[3] for row in trunk)
    (root / INDEX_NAME).write_text(json.dumps(index))
    return root


def diagnose(root: Path) -> None:
    found = doctor(root)
    assert found.findings == (), found


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
