"""What an export costs: this library against `stitch` of speculators 0.9.0 and against a plain copy of the base.

    python benchmarks/step_vs_speculators.py --install   # once: an environment for speculators, below the user's cache
    python benchmarks/export.py                          # the comparison; also --json, --folder, --small

The base has 6 GiB in 8 shards, and a Qwen3.5-shaped head of 0.23 GiB at the end of the last; it is written once, and is in the
page cache when the sides run. Every side runs in a process of its own, imports what it needs and loads its head, and is
measured from there: seconds until all of its files are on the disk, bytes that the process wrote, disk that its output takes
beside the base (shared files count once), and the growth of its resident set. Ours also opens what it wrote and compares it
with the base; the others do not. "Goal": at most 1/7 of stitch's seconds, and 1.05 times the bytes of the head and of the
shard that held it. Ends with 1 where one is missed. Linux only.

`stitch` copies the base, then reads and writes anew the shards that hold head tensors. It starts from a head in speculators'
own layout on the disk, ours from one in memory: reading 0.23 GiB is part of its time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mtp_zoo.checkpoint import INDEX_NAME
from mtp_zoo.head import DraftHead
from mtp_zoo.index_file import encode_index
from mtp_zoo.loader import key_map
from mtp_zoo.modelconfig import ModelConfig
from mtp_zoo.registry import get_family
from mtp_zoo.safetensors_header import encode_header
from mtp_zoo.tables import render_table
from mtp_zoo_conformance.engines.environment import cache_root

HERE = Path(__file__).parent
GIB, MIB = 2**30, 2**20
SHARDS = 8
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "vocab_size": 1024,
    "hidden_size": 2048,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000000, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": True,
    "mtp_num_hidden_layers": 1,
}
SIDES = ("mtp_zoo", "mtp_zoo, in place", "speculators", "copy")
WALL, BYTES, MEMORY = 1 / 7, 1.05, 150 * MIB
"""The goals: of stitch's seconds, of the bytes of head and mixed shard, and beside the largest tensor."""

Entry = tuple[str, str, tuple[int, ...], int]


def make(base: Path, scale: float) -> dict[str, int]:
    """Write the base; returns the bytes of the head, of its shard and of its largest tensor."""
    base.mkdir(parents=True)
    (base / "config.json").write_text(json.dumps(CONFIG))
    head = DraftHead(get_family("qwen3_5"), ModelConfig(CONFIG, base / "config.json"), device="meta")
    natives = {name: shape for binding in key_map(head).layout() for name, shape in binding.natives.items()}
    sized = [(name, "BF16", shape, 2 * torch.Size(shape).numel()) for name, shape in natives.items()]
    head_bytes = sum(entry[3] for entry in sized)
    rows = int((scale * 6 * GIB - head_bytes) / SHARDS / 4 / (2 * 2048))
    weight_map: dict[str, str] = {}
    for number in range(SHARDS):
        file = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        parts = [
            (f"model.layers.{4 * number + n}.mlp.up_proj.weight", "BF16", (rows, 2048), 4096 * rows) for n in range(4)
        ]
        entries = [*parts, *(sized if number == SHARDS - 1 else [])]
        with (base / file).open("wb") as stream:
            stream.write(encode_header(entries, {"format": "pt"}))
            for piece in random_bytes(entries):
                stream.write(piece)
            os.fsync(stream.fileno())
        weight_map |= dict.fromkeys((entry[0] for entry in entries), file)
    (base / INDEX_NAME).write_text(encode_index(weight_map, {"total_size": 4096 * rows * 4 * SHARDS + head_bytes}))
    last = (base / f"model-{SHARDS:05d}-of-{SHARDS:05d}.safetensors").stat().st_size
    return {"head": head_bytes, "shard": last, "largest": max(entry[3] for entry in sized)}


def random_bytes(entries: list[Entry]) -> Iterator[memoryview]:
    """Numbers that no file system can compress, as small BF16."""
    noise = (torch.rand(32 * MIB // 2) - 0.5).to(torch.bfloat16).view(torch.uint8).numpy().data
    for _, _, _, nbytes in entries:
        for start in range(0, nbytes, len(noise)):
            yield noise[: min(len(noise), nbytes - start)]


def run(side: str, base: Path, out: Path) -> dict[str, Any]:
    """One side in a process of its own."""
    theirs = side == "speculators"
    python = cache_root() / "speculators-0.9.0" / "bin" / "python" if theirs else sys.executable
    done = subprocess.run(
        [str(python), "-c", "import export_sides; export_sides.main()", side, str(base), str(out)],
        cwd=HERE,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        stdout=subprocess.PIPE,
        check=True,
    )
    found = json.loads(done.stdout.decode().splitlines()[-1])
    return {"side": side, **found, "disk": new_blocks(base, out)}


def new_blocks(base: Path, out: Path) -> int:
    """Bytes on the disk of the files of `out` that are not the base's own."""
    known = {path.stat().st_ino for path in base.rglob("*") if not path.is_relative_to(out)}
    files = {path.stat().st_ino: path.stat() for path in out.rglob("*") if path.is_file()} if out.exists() else {}
    return sum(512 * found.st_blocks for number, found in files.items() if number not in known)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to make the 20 GB of files; they are removed")
    parser.add_argument("--small", action="store_true", help="a base of 0.6 GiB, for a try")
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        sizes = make(folder / "base", 0.1 if arguments.small else 1.0)
        rows = []
        for side in sorted(arguments.sides, key=lambda s: "in place" in s):  # the one that changes the base comes last
            print(side, file=sys.stderr, flush=True)
            out = folder / "base" / ".mtp-zoo-undo" if "in place" in side else folder / "out"
            rows.append(run(side, folder / "base", out))
            for made in ("out", "finetuned"):
                shutil.rmtree(folder / made, ignore_errors=True)
    report(rows, sizes, as_json=arguments.json)
    return 0 if all(judge(rows, sizes).values()) else 1


def judge(rows: list[dict[str, Any]], sizes: dict[str, int]) -> dict[str, bool]:
    """Whether our export to a new directory meets each goal."""
    found = {row["side"]: row for row in rows}
    ours, theirs = found.get("mtp_zoo"), found.get("speculators")
    goals: dict[str, bool] = {}
    if ours:
        goals["bytes"] = ours["written"] <= BYTES * sizes["shard"]  # the shard held the head, and both are written anew
        goals["memory"] = ours["growth"] <= sizes["largest"] + MEMORY
    if ours and theirs:
        goals["wall"] = ours["seconds"] <= WALL * theirs["seconds"]
    return goals


def report(rows: list[dict[str, Any]], sizes: dict[str, int], *, as_json: bool) -> None:
    goals = judge(rows, sizes)
    if as_json:
        print(json.dumps({"sizes": sizes, "sides": rows, "goals": goals}, indent=2))
        return
    cells = [
        (
            row["side"],
            f"{row['seconds']:.2f}",
            *(f"{row[field] / GIB:.2f}" for field in ("written", "disk", "growth", "peak")),
        )
        for row in rows
    ]
    headers = ("side", "seconds", "GiB written", "GiB of disk", "GiB growth", "GiB peak RSS")
    print(render_table("Export", headers, cells, right=(1, 2, 3, 4, 5)))
    print(", ".join(f"{goal}: {'met' if met else 'MISSED'}" for goal, met in goals.items()))


if __name__ == "__main__":
    sys.exit(main())
