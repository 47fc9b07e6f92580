"""How long `doctor` takes for a checkpoint of many tensors, headers only.

python benchmarks/doctor_names.py                  # 60,000 names in 60 shards
python benchmarks/doctor_names.py --names 1000 --shards 2

The trunk is named like a mixture of experts, its shards are sparse files: headers and index are real, nothing else is. The head
is a whole one of the tiny Qwen3.5 shape. Measured are `mtp_zoo.doctor` in a process that has imported torch and the library,
as the best of three, and the whole command in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mtp_zoo.checkpoint import INDEX_NAME
from mtp_zoo.diagnosis.examination import doctor
from mtp_zoo.safetensors_header import encode_header
from tests.tiny import tiny_config, tiny_tensors, write_checkpoint

EXPERT_BYTES = 2 * 64 * 64
COMMAND = "from mtp_zoo.cli import main; main()"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", type=int, default=60_000)
    parser.add_argument("--shards", type=int, default=60)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = make(Path(folder) / "model", arguments.names, arguments.shards)
        doctor(root)
        seconds = min(timed(root) for _ in range(3))
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", COMMAND, "doctor", root, "--json"], check=True, stdout=subprocess.DEVNULL)
        whole = time.perf_counter() - began
    print(
        f"{arguments.names:,} names in {arguments.shards} shards: doctor {seconds:.2f} s, the whole command {whole:.2f} s"
    )


def make(root: Path, names: int, shards: int) -> Path:
    """A checkpoint of `names` tensors beside those of a tiny model."""
    config, tensors = tiny_config(), tiny_tensors(tiny_config())
    write_checkpoint(root, config, tensors, shards=2)
    index = json.loads((root / INDEX_NAME).read_text())
    extra = [
        f"model.layers.{n // 384}.mlp.experts.{n // 3 % 128}.{['gate', 'up', 'down'][n % 3]}_proj.weight"
        for n in range(names)
    ]
    for shard in range(shards):
        file = f"model-1{shard:04d}-of-{shards:05d}.safetensors"
        held = extra[shard::shards]
        header = encode_header(((name, "BF16", (64, 64), EXPERT_BYTES) for name in held), {"format": "pt"})
        with (root / file).open("wb") as stream:
            stream.write(header)
            stream.truncate(len(header) + EXPERT_BYTES * len(held))
        index["weight_map"] |= dict.fromkeys(held, file)
    index["metadata"]["total_size"] += EXPERT_BYTES * len(extra)
    (root / INDEX_NAME).write_text(json.dumps(index))
    return root


def timed(root: Path) -> float:
    began = time.perf_counter()
    found = doctor(root)
    seconds = time.perf_counter() - began
    assert found.findings == (), found
    return seconds


if __name__ == "__main__":
    main()
