"""`mtp-zoo export --dry-run` on a checkpoint of 60,000 tensors and 640 GB: what it prints and how long it takes.

    python benchmarks/dry_run.py                  # output, and seconds of three runs
    python benchmarks/dry_run.py --tensors 6000   # smaller
    python benchmarks/dry_run.py --keep DIR       # make the checkpoint there, and leave it

The checkpoint is of DeepSeek-V3's shapes, 256 experts a layer in blocks of FP8, and its head is in the last shards. Its files
have true headers and no bytes behind them (sparse files), so it takes some megabytes of disk. Seconds are those of the whole
command, the start of Python included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
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

SHARD = 4_300_000_000
BLOCK = 128
Tensor = tuple[str, str, tuple[int, ...], int]

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 129280,
    "hidden_act": "silu",
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 0,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_theta": 10000,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
}


def tensors(layers: int) -> Iterator[Tensor]:
    """Embedding, trunk layers like the head's block, norm, lm_head, head."""
    family = get_family("deepseek_v3")
    model = ModelConfig({**CONFIG, "num_hidden_layers": layers}, Path("config.json"))
    head = DraftHead(family, model, first_layer=layers, device="meta")
    block = [
        (name, shape)
        for binding in key_map(head).layout()
        for name, shape in binding.natives.items()
        if "shared_head" not in name
    ]
    prefix = f"model.layers.{layers}."
    yield "model.embed_tokens.weight", "BF16", (129280, 7168), 2 * 129280 * 7168
    for layer in range(layers + 1):
        for name, shape in block:
            own = any(part in name for part in ("eh_proj", "enorm", "hnorm"))
            if layer == layers or not own:
                yield from stored(name.replace(prefix, f"model.layers.{layer}."), shape)
    yield f"{prefix}shared_head.norm.weight", "BF16", (7168,), 2 * 7168
    yield "model.norm.weight", "BF16", (7168,), 2 * 7168
    yield "lm_head.weight", "BF16", (129280, 7168), 2 * 129280 * 7168


def stored(name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """A projection as FP8 with its scale, the router's bias as FP32, the rest as BF16."""
    count = torch.Size(shape).numel()
    if name.endswith("correction_bias"):
        yield name, "F32", shape, 4 * count
    elif len(shape) == 2 and not name.endswith(("eh_proj.weight", "mlp.gate.weight")):
        grid = tuple(-(-length // BLOCK) for length in shape)
        yield name, "F8_E4M3", shape, count
        yield f"{name}_scale_inv", "F32", grid, 4 * torch.Size(grid).numel()
    else:
        yield name, "BF16", shape, 2 * count


def make(folder: Path, count: int) -> tuple[int, int]:
    """Write the checkpoint; returns tensors and bytes."""
    layers = max(1, count // sum(1 for _ in tensors(0)) - 1)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    shards: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors(layers):
        if size > SHARD:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor[3]
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header = encode_header(shard, {"format": "pt"})
        with (folder / file).open("wb") as stream:
            stream.write(header)
            stream.truncate(len(header) + sum(t[3] for t in shard))
        weight_map |= dict.fromkeys((t[0] for t in shard), file)
    total = sum(t[3] for shard in shards for t in shard)
    (folder / INDEX_NAME).write_text(encode_index(weight_map, {"total_size": total}))
    return len(weight_map), total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=60_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        count, total = make(folder, arguments.tensors)
        print(f"{count:,} tensors, {total:,} bytes, {len(list(folder.glob('*.safetensors')))} shards")
        command = [
            str(Path(sys.executable).with_name("mtp-zoo")),
            "export",
            str(folder),
            str(folder) + "-out",
            "--dry-run",
        ]
        for turn in range(arguments.repeats):
            began = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            seconds = time.perf_counter() - began
            print((done.stdout if turn == 0 else "") + f"{seconds:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
