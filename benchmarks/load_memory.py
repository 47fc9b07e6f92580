"""Memory and bytes that `load_head` takes for a head of 256 experts and more than 1 GiB, against the head's own size.

    python benchmarks/load_memory.py              # all forms
    python benchmarks/load_memory.py --experts 32 # smaller, for a try

Every load runs in a process of its own, and its growth is counted from the moment when all libraries are loaded. The bound
is: what the head holds, its largest stacked tensor once more, and 200 MiB. Linux only: the kernel keeps the peak.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mtp_zoo.head import DraftHead
from mtp_zoo.loader import key_map, load_head
from mtp_zoo.modelconfig import ModelConfig
from mtp_zoo.registry import get_family
from mtp_zoo.safetensors_header import encode_header
from mtp_zoo.site import find_site

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.measure import measure

GIB, MIB = 2**30, 2**20
SLACK = 200 * MIB
BLOCK = 128

SHAPE: dict[str, Any] = {
    "hidden_size": 1280,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "rms_norm_eps": 1e-6,
    "vocab_size": 512,
    "hidden_act": "silu",
    "moe_intermediate_size": 640,
    "num_experts_per_tok": 8,
    "tie_word_embeddings": False,
}
DEEPSEEK = {
    **SHAPE,
    "model_type": "deepseek_v3",
    "num_nextn_predict_layers": 1,
    "num_key_value_heads": 8,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_theta": 10000,
}
QWEN = {
    **SHAPE,
    "model_type": "qwen3_5_moe_text",
    "mtp_num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "shared_expert_intermediate_size": 640,
    "rope_parameters": {"rope_theta": 10000000, "partial_rotary_factor": 0.25},
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


@dataclass(frozen=True)
class Run:
    """A stored form, and the dtype it is loaded in."""

    family: str
    stored: str
    loaded: str
    packed: bool = False


RUNS = (
    Run("deepseek_v3", "BF16", "as stored"),
    Run("deepseek_v3", "BF16", "float32"),
    Run("deepseek_v3", "FP8", "bfloat16"),
    Run("qwen3_5_moe", "BF16", "as stored", packed=True),
    Run("qwen3_5_moe", "BF16", "float32", packed=True),
)


def config_of(run: Run, experts: int) -> dict[str, Any]:
    if run.family == "deepseek_v3":
        quantized = {"quantization_config": FP8} if run.stored == "FP8" else {}
        return {**DEEPSEEK, "n_routed_experts": experts, **quantized}
    return {**QWEN, "num_experts": experts}


def write(folder: Path, run: Run, experts: int) -> None:
    """The checkpoint, tensor by tensor: no more than one is held."""
    config = config_of(run, experts)
    (folder / "config.json").write_text(json.dumps(config))
    family = get_family(run.family)
    model = ModelConfig(config, folder / "config.json")
    trunk = config["num_hidden_layers"]
    head = DraftHead(family, model, first_layer=trunk if family.in_stack else 0, device="meta")
    layers = ("mtp.layers.0.mlp.experts.gate_up_proj", "mtp.layers.0.mlp.experts.down_proj")
    bindings = key_map(head).layout(layers if run.packed else ())
    shapes = {name: shape for binding in bindings for name, shape in binding.natives.items()}
    entries = list(_entries(shapes, run))
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(encode_header([(n, d, s, b) for n, d, s, b in entries], {"format": "pt"}))
        for _, dtype, shape, _ in entries:
            stream.write(_values(dtype, shape).view(torch.uint8).numpy().data)


def _entries(shapes: Mapping[str, tuple[int, ...]], run: Run) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        if run.stored == "FP8" and name.endswith("_proj.weight") and not name.endswith("eh_proj.weight"):
            grid = tuple(-(-length // BLOCK) for length in shape)
            yield name, "F8_E4M3", shape, count
            yield f"{name}_scale_inv", "F32", grid, 4 * torch.Size(grid).numel()
        elif name.endswith("correction_bias"):
            yield name, "F32", shape, 4 * count
        else:
            yield name, "BF16", shape, 2 * count


def _values(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.Size(shape).numel()
    if dtype == "F8_E4M3":
        return torch.randint(256, (count,), dtype=torch.uint8) & 0xFE  # all but the two codes of NaN
    return torch.rand(count).to(torch.bfloat16 if dtype == "BF16" else torch.float32)


def prepare(folder: Path, run: Run) -> tuple[Path, Run]:
    """Import what a load imports, and build a head without weights."""
    model = ModelConfig.read(folder)
    site = find_site(get_family(run.family), (), model)
    DraftHead(site.family, model, first_layer=site.first_layer, device="meta")
    return folder, run


def load(state: tuple[Path, Run]) -> None:
    """Load, and leave what the load says of itself beside the checkpoint."""
    folder, run = state
    head = load_head(folder, dtype=None if run.loaded == "as stored" else getattr(torch, run.loaded))
    held = [value.nbytes for value in head.weights().values()]
    facts = {
        "stored_bytes": head.report.head_bytes,
        "held_bytes": sum(held),
        "largest": max(held),
        "bytes_read": head.report.bytes_read,
    }
    (folder / "facts.json").write_text(json.dumps(facts))


def bench(run: Run, experts: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, run, experts)
        seconds, peak = measure(partial(prepare, folder, run), load, repeats=1)
        facts = json.loads((folder / "facts.json").read_text())
    bound = facts["held_bytes"] + facts["largest"] + SLACK
    return {
        **asdict(run),
        **facts,
        "seconds": seconds,
        "peak_growth": int(peak * GIB),
        "bound": bound,
        "within": peak * GIB <= bound,
        "read_ratio": facts["bytes_read"] / facts["stored_bytes"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--json", action="store_true", help="one JSON object a run")
    arguments = parser.parse_args()
    ok = True
    for run in RUNS:
        r = bench(run, arguments.experts)
        ok &= r["within"]
        if arguments.json:
            print(json.dumps(r))
            continue
        form = "packed" if run.packed else "one by one"
        print(
            f"{run.family}, {arguments.experts} experts {form}, stored {run.stored}, loaded {run.loaded}: "
            f"stored {r['stored_bytes'] / GIB:.3f} GiB, held {r['held_bytes'] / GIB:.3f} GiB, "
            f"largest tensor {r['largest'] / GIB:.3f} GiB\n"
            f"  peak growth {r['peak_growth'] / GIB:.3f} GiB, bound {r['bound'] / GIB:.3f} GiB: "
            f"{'within' if r['within'] else 'OVER'}; read {r['read_ratio']:.5f} of the stored head in {r['seconds']:.1f} s"
        )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
