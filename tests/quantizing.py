"""Tiny checkpoints whose head is stored as FP8, in every published scheme, and the numbers that they stand for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtp_zoo.quant_ignore import HeadModules, quantized_by
from tests.exporting import stored
from tests.stored_forms import Form, Tensors, head_of, make, site_of

E4M3 = torch.float8_e4m3fn
SCALE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E8M0": torch.float8_e8m0fnu}
COPIES = ("embed_tokens.weight", "shared_head.head.weight")
SCALES = ("_scale", "_scale_inv")
FLOAT_PARTS = ("eh_proj.weight", "mtp.fc.weight", "norm.weight", "mlp.gate.weight", "shared_expert_gate.weight")
"""Ends of the names of what published FP8 heads keep as floats, beside copies of the target's matrices."""


@dataclass(frozen=True)
class Storage:
    """One published way to store FP8."""

    name: str
    block: tuple[int, int] | None
    suffix: str
    settings: Mapping[str, Any]
    scale_dtype: str = "F32"

    def __str__(self) -> str:
        return f"{self.name}-{self.scale_dtype}"

    def grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of a weight."""
        if self.name == "tensor":
            return ()
        if self.block is None:
            return (*shape[:-1], 1)
        return (*shape[:-2], *(math.ceil(size / part) for size, part in zip(shape[-2:], self.block, strict=True)))

    def numbers(self, weight: Tensor, scale: Tensor) -> Tensor:
        """What they stand for, in FP32."""
        factors = scale.float()
        if self.block is not None:
            rows, columns = (
                torch.arange(size) // part for size, part in zip(weight.shape[-2:], self.block, strict=True)
            )
            factors = factors[..., rows, :][..., columns]
        return weight.float() * factors


def _compressed(strategy: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


BLOCK = (24, 40)
"""Divides none of the tiny shapes, so that every matrix has smaller blocks at its ends."""

BLOCKS = Storage("block", BLOCK, "_scale_inv", {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)})
ROWS = Storage("channel", None, "_scale", _compressed("channel"))
WHOLE = Storage("tensor", None, "_scale", _compressed("tensor"))
STORAGES = (
    BLOCKS,
    Storage("block", BLOCK, "_scale_inv", BLOCKS.settings, "BF16"),
    Storage("block", BLOCK, "_scale_inv", BLOCKS.settings, "F8_E8M0"),
    ROWS,
    Storage("channel", None, "_scale", ROWS.settings, "BF16"),
    WHOLE,
)


def quantized_names(family: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """The matrices of a head that published FP8 checkpoints quantise."""
    outside = (*COPIES, *FLOAT_PARTS, *SCALES)
    return [n for n in head_of(family, tensors) if tensors[n].ndim > 1 and not n.endswith(outside)]


def fp8_parts(shape: tuple[int, ...], storage: Storage, seed: int) -> tuple[Tensor, Tensor]:
    """Random e4m3 codes (no NaN) and scales: not what an encoder would make of any float, so only bytes that are kept
    come back."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 127, shape, generator=generator, dtype=torch.uint8)
    signs = torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8) * 128
    scale = torch.rand(storage.grid(shape), generator=generator).add(0.5).mul(2.0**-9)
    dtype = SCALE_DTYPES[storage.scale_dtype]
    scale = scale.log2().round().exp2().to(dtype) if storage.scale_dtype == "F8_E8M0" else scale.to(dtype)
    return (codes + signs).view(E4M3), scale


def ignore_list(family: str, tensors: Mapping[str, Tensor], storage: Storage) -> dict[str, Any]:
    """The quantisation config of a published checkpoint: what is float is listed, module by module."""
    inside = set(head_of(family, tensors))
    stored = {name: value for name, value in tensors.items() if name in inside and not name.endswith(SCALES)}
    floats = [(name, tuple(value.shape)) for name, value in stored.items() if value.dtype != E4M3]
    names = list(HeadModules.of(site_of(family), floats, whole=False).names)
    key = "ignore" if storage.settings["quant_method"] == "compressed-tensors" else "modules_to_not_convert"
    return {**storage.settings, key: ["lm_head", *names]}


def make_fp8(form: Form, storage: Storage, **fields: Any) -> tuple[dict[str, Any], Tensors]:
    """Config and tensors of a checkpoint whose trunk is float and whose head is FP8."""
    config, tensors = make(form, **fields)
    stored = dict(tensors)
    for seed, name in enumerate(quantized_names(form.family, tensors)):
        weight, scale = fp8_parts(tuple(tensors[name].shape), storage, seed)
        stored |= {name: weight, f"{name}{storage.suffix}": scale}
    return {**config, "quantization_config": ignore_list(form.family, stored, storage)}, stored


def decoded(tensors: Mapping[str, Tensor], storage: Storage, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """The same checkpoint with floats in the place of FP8 tensors and scales."""
    scales = {f"{name}{storage.suffix}" for name, value in tensors.items() if value.dtype == E4M3}
    return {
        name: storage.numbers(value, tensors[f"{name}{storage.suffix}"]).to(dtype) if value.dtype == E4M3 else value
        for name, value in tensors.items()
        if name not in scales
    }


def settings_of(root: Path) -> dict[str, Any]:
    return json.loads((root / "config.json").read_text())["quantization_config"]


def built_quantized(root: Path, family: str) -> set[str]:
    """What some engine would build quantised of the head's float modules, by every name of it."""
    scope = site_of(family).in_scope
    tensors = {name: value for name, value in stored(root).items() if scope(name) and not name.endswith(COPIES)}
    scales = {f"{name}{end}" for name in tensors for end in ("_scale", "_scale_inv")}
    floats = [(n, tuple(t.shape)) for n, t in tensors.items() if t.dtype != E4M3 and n not in scales]
    modules = HeadModules.of(site_of(family), floats, whole=len(floats) == len(tensors))
    found = quantized_by(settings_of(root), modules, strict=True)
    return {name for names in found.values() for name in names}
