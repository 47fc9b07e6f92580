"""Heads that are quantised otherwise than as FP8 are refused by the name of their scheme; a float head inside a quantised
checkpoint is none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mtp_zoo.loader
from mtp_zoo.errors import ScaleMismatchError, UnsupportedQuantizationError
from mtp_zoo.loader import load_head
from mtp_zoo.modelconfig import ModelConfig
from mtp_zoo.quantization import scheme_name
from tests.tiny import tiny_config, tiny_tensors, write_checkpoint

TENSORS = tiny_tensors(tiny_config())
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
INT4 = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
QUANTISED = [name for name in TENSORS if name.startswith("mtp.layers.") and name.endswith("_proj.weight")]


def fp8_head() -> dict[str, Tensor]:
    """As Qwen3.8-27B-FP8 stores it: 7 projections in blocks, fc and norms in BF16."""
    tensors = dict(TENSORS)
    for name in QUANTISED:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(1, 1, dtype=torch.bfloat16)
    return tensors


def int4_head() -> dict[str, Tensor]:
    """As a W4A16 derivative of Qwen3.6-27B stores it: packed words, scales, zero points and shapes."""
    tensors = dict(TENSORS)
    for name in QUANTISED:
        rows, columns = tensors.pop(name).shape
        tensors[f"{name}_packed"] = torch.zeros(rows, columns // 8, dtype=torch.int32)
        tensors[f"{name}_scale"] = torch.ones(rows, columns // 32, dtype=torch.bfloat16)
        tensors[f"{name}_zero_point"] = torch.zeros(rows // 8, columns // 32, dtype=torch.int32)
        tensors[f"{name}_shape"] = torch.tensor([rows, columns])
    return tensors


@pytest.mark.parametrize(
    ("tensors", "settings", "scheme", "count"),
    [
        (fp8_head(), {"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt FP8", 7),
        (int4_head(), INT4, "compressed-tensors pack-quantized", 21),
        (fp8_head(), None, "a scheme that config.json does not name", 7),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_quantised_head_is_refused_by_name_with_every_tensor_before_anything_is_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tensors: dict[str, Tensor],
    settings: dict[str, Any] | None,
    scheme: str,
    count: int,
    nested: bool,
) -> None:
    monkeypatch.delattr(mtp_zoo.loader.TensorReader, "read_into")
    config = {**tiny_config(nested=nested), **({"quantization_config": settings} if settings else {})}
    write_checkpoint(tmp_path, config, tensors)
    with pytest.raises(UnsupportedQuantizationError) as caught:
        load_head(tmp_path)
    assert caught.value.message == (f"Loading the qwen3_5 head of {tmp_path}: {count} tensors are stored as {scheme}.")
    assert len(caught.value.problems) == count
    assert all(any(str(problem).startswith(name) for problem in caught.value.problems) for name in QUANTISED)


def test_a_float_head_inside_a_quantised_checkpoint_loads(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/issues/43304"""
    tensors = dict(TENSORS)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(128, 64, dtype=torch.float8_e4m3fn)
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(1, 1)
    head = load_head(write_checkpoint(tmp_path, {**tiny_config(), "quantization_config": FP8}, tensors))
    assert torch.equal(head.weights()["depths.0.eh_proj.weight"], TENSORS["mtp.fc.weight"])


def test_scales_that_were_left_beside_float_weights_are_not_overlooked(tmp_path: Path) -> None:
    tensors = {**TENSORS, "mtp.fc.weight_scale_inv": torch.ones(1, 1, dtype=torch.bfloat16)}
    with pytest.raises(ScaleMismatchError, match=r"mtp\.fc\.weight_scale_inv in model\.safetensors: a scale beside"):
        load_head(write_checkpoint(tmp_path, tiny_config(), tensors))


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "modelopt NVFP4"),
        ({"quantization_config": {"quant_algo": "FP8"}}, "FP8"),
        ({"text_config": {"quantization_config": FP8}}, "fp8 e4m3"),
        (
            {"quantization_config": None, "text_config": {"quantization_config": INT4}},
            "compressed-tensors pack-quantized",
        ),
        ({"quantization_config": {}}, "a scheme that config.json does not name"),
        ({"quantization_config": "fp8"}, "a scheme that config.json does not name"),
        ({}, "a scheme that config.json does not name"),
    ],
)
def test_the_scheme_is_called_what_the_config_calls_it(raw: dict[str, Any], expected: str) -> None:
    assert scheme_name(ModelConfig(raw, Path("config.json"))) == expected
