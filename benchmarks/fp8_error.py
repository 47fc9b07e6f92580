"""What FP8 costs a head: the error of decode(encode(w)) block by block, and the bytes of what an export left alone.

    python benchmarks/fp8_error.py [--json]

The first table takes a random matrix of 1,000 x 1,500, whose last blocks are smaller, with magnitudes over several powers of
two. Errors are relative to the largest number under the same scale; `of bound` is the largest part of what e4m3 rounding may
cost a number. The second exports an FP8 head of each kind of family after one tensor of it was changed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mtp_zoo as mz
from mtp_zoo.fp8 import SMALLEST_STEP, STEP, decode, encode
from mtp_zoo.scaling import SCALE_DTYPES, Scheme
from mtp_zoo.tables import render_table

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.exporting import same, stored
from tests.quantizing import BLOCKS, make_fp8, quantized_names
from tests.stored_forms import Form, plain_form
from tests.tiny import write_checkpoint

SHAPE = (1000, 1500)
SCHEMES = (Scheme("block", (128, 128)), Scheme("channel"), Scheme("tensor"))
FORMS = (plain_form("qwen3_5"), Form("qwen3_5_moe", "packed"), plain_form("qwen3_5_moe"), plain_form("deepseek_v3"))


def matrix() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SHAPE, generator=generator) * torch.randn(SHAPE, generator=generator).exp2() * 0.02


def spread(numbers: Tensor, scheme: Scheme) -> Tensor:
    """The largest of what shares a scale, at every number that shares it."""
    height, width = scheme.covered(SHAPE)
    out = torch.empty(SHAPE)
    for top in range(0, SHAPE[0], height):
        for left in range(0, SHAPE[1], width):
            part = (slice(top, top + height), slice(left, left + width))
            out[part] = numbers[part].max()
    return out


def rounding(scheme: Scheme, dtype: str) -> dict[str, Any]:
    weight = matrix()
    quantized, scale = encode(weight, scheme, scale_dtype=dtype)
    error = (decode(quantized, scale, scheme) - weight).abs()
    each = decode(torch.ones(SHAPE).to(torch.float8_e4m3fn), scale, scheme)
    bound = torch.maximum(weight.abs() * STEP, each * SMALLEST_STEP)
    blocks = error / spread(weight.abs(), scheme)
    return {
        "scheme": scheme.kind,
        "scale": dtype,
        "scales": scale.numel(),
        "worst": float(blocks.max()),
        "mean": float(blocks.mean()),
        "of_bound": float((error / bound).max()),
    }


def untouched(form: Form) -> dict[str, Any]:
    config, tensors = make_fp8(form, BLOCKS)
    with tempfile.TemporaryDirectory() as folder:
        base = write_checkpoint(Path(folder) / "base", config, tensors)
        head = mz.load_head(base, dtype=torch.float32)
        part = next(name for name, value in head.named_parameters() if "o_proj" in name and value.ndim > 1)
        with torch.no_grad():
            head.get_parameter(part).mul_(1.01)
        report = mz.export(head, base=base, out=Path(folder) / "out")
        out = stored(Path(folder) / "out")
    names = quantized_names(form.family, tensors)
    kept = [name for name in names if same(out, tensors, [name, f"{name}{BLOCKS.suffix}"])]
    others = [name for name in tensors if name.removesuffix(BLOCKS.suffix) not in names]
    return {
        "head": str(form),
        "fp8": len(names),
        "changed": report.tensors_encoded,
        "identical": len(kept),
        "others": len(others),
        "others_identical": sum(same(out, tensors, [name]) for name in others),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    errors = [rounding(scheme, dtype) for scheme in SCHEMES for dtype in SCALE_DTYPES]
    exports = [untouched(form) for form in FORMS]
    if as_json:
        print(json.dumps({"errors": errors, "exports": exports}))
    else:
        rows = [
            (
                e["scheme"],
                e["scale"],
                f"{e['scales']:,}",
                f"{e['worst']:.4f}",
                f"{e['mean']:.5f}",
                f"{e['of_bound']:.3f}",
            )
            for e in errors
        ]
        columns = ("one scale a", "stored as", "scales", "worst error", "mean error", "of bound")
        print(
            render_table(
                "decode(encode(w)) against w, relative to the scale's largest number", columns, rows, right=(2, 3, 4, 5)
            )
        )
        counted = [tuple(str(value) for value in e.values()) for e in exports]
        columns = ("head", "FP8 tensors", "changed", "identical, scale too", "other tensors", "identical")
        print(render_table("an export after one tensor was changed", columns, counted, right=(1, 2, 3, 4, 5)))
    failed = any(e["of_bound"] > 1 for e in errors) or any(
        e["identical"] != e["fp8"] - e["changed"] or e["others"] != e["others_identical"] for e in exports
    )
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
