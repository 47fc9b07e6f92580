"""Tiny checkpoints: a target by transformers' own class, a head by the case's hand-written names, random weights in both.

Weights are far from trivial: a norm weight of exactly one, or a bias of zero, would hide a convention.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtp_zoo_conformance.case import ConformanceCase, Variant

SPREAD = 0.2
"""Standard deviation of vectors (norm weights, biases) about their centre."""


def write_checkpoint(case: ConformanceCase, variant: Variant, folder: Path, *, seed: int = 0) -> Path:
    """Write config.json and model.safetensors of a variant, stored as published checkpoints are."""
    target = target_tensors(case, variant, folder, seed=seed)
    copies = {name: target[original].clone() for name, original in variant.copies.items()}
    tensors = {**target, **head_tensors(case, variant, seed=seed + 1), **copies}
    (folder / "config.json").write_text(json.dumps(dict(variant.config), indent=2), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def target_tensors(case: ConformanceCase, variant: Variant, folder: Path, *, seed: int) -> dict[str, Tensor]:
    """The target's tensors under the names that transformers publishes them, behind the variant's prefix."""
    model = target_model(case.target_class, variant.text_config, seed=seed)
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    return {
        re.sub(r"^model\.", variant.prefix, name): value if is_buffer(name) else value.to(torch.bfloat16)
        for name, value in stored.items()
    }


def target_model(name: str, text_config: Mapping[str, Any], *, seed: int) -> Any:
    """A transformers causal language model with random weights, FP32."""
    cls = getattr(transformers, name)
    fields = copy.deepcopy({key: value for key, value in text_config.items() if key != "architectures"})
    config = cls.config_class(**fields)  # writes into the RoPE settings that it is given
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls._from_config(config, dtype=torch.float32).eval().requires_grad_(False)
        for parameter in model.parameters():
            parameter.copy_(randomised(parameter))
        for name, buffer in model.named_buffers():
            if is_buffer(name):
                buffer.copy_(randomised(buffer))
    return model


def is_buffer(name: str) -> bool:
    """Whether a tensor is a stored buffer: a router's bias, which is kept in FP32 everywhere."""
    return name.endswith("e_score_correction_bias")


def randomised(tensor: Tensor) -> Tensor:
    """Random values of the same shape: matrices keep the scale of their input, vectors scatter about what they are.

    Embeddings are matrices too: their rows are normed before anything reads them.
    """
    if tensor.ndim > 1:
        return torch.randn(tensor.shape) * tensor.shape[-1] ** -0.5
    return tensor + SPREAD * torch.randn(tensor.shape)


def head_tensors(case: ConformanceCase, variant: Variant, *, seed: int) -> dict[str, Tensor]:
    """The head's tensors under their native names."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shapes = case.shapes_of(variant)
        values = {name: randomised(torch.full(shape, case.norm_centre)) for name, shape in shapes.items()}
        return {name: case.finish(name, value) for name, value in values.items()}
