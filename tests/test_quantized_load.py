"""Heads that are stored as FP8 load as the numbers they stand for, or not at all, with every reason at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mtp_zoo as mz
from mtp_zoo.checkpoint import TensorReader
from mtp_zoo.errors import HeadMismatchError, MTPZooError, ScaleMismatchError, UnsupportedQuantizationError
from mtp_zoo.inspection import inspect
from mtp_zoo.keymap import to_native
from tests.allocations import PeakBytes
from tests.quantizing import BLOCKS, E4M3, ROWS, STORAGES, WHOLE, Storage, decoded, make_fp8
from tests.stored_forms import Form, all_forms, head_of, plain_form
from tests.tiny import write_checkpoint

FORMS = [(form, BLOCKS) for form in all_forms() if not form.tied and not form.copies]
KINDS = [plain_form("qwen3_5"), Form("qwen3_5_moe", "packed"), Form("deepseek_v3", "one_by_one", copies=True)]
DENSE = plain_form("qwen3_5")
Q = "mtp.layers.0.self_attn.q_proj.weight"
K = "mtp.layers.0.self_attn.k_proj.weight"
FC = "mtp.fc.weight"


@pytest.mark.parametrize(
    ("form", "storage"), [*FORMS, *((form, storage) for form in KINDS for storage in (ROWS, WHOLE))], ids=str
)
def test_an_fp8_head_loads_as_the_numbers_it_stands_for(form: Form, storage: Storage, tmp_path: Path) -> None:
    """In BF16, and in FP32 where experts are packed."""
    config, tensors = make_fp8(form, storage)
    dtype = torch.float32 if form.experts == "packed" else None
    head = mz.load_head(write_checkpoint(tmp_path, config, tensors, shards=2), dtype=dtype)
    floats = decoded(tensors, storage, dtype or torch.bfloat16)
    native = to_native(head.origin.bindings, head.state_dict())
    assert native.keys() == set(head_of(form.family, floats)) - head.report.skipped.keys()
    for name, value in native.items():
        assert torch.equal(value, floats[name].to(value.dtype)), name


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_every_dtype_of_a_scale_is_read(storage: Storage, tmp_path: Path) -> None:
    config, tensors = make_fp8(DENSE, storage)
    head = mz.load_head(write_checkpoint(tmp_path, config, tensors))
    assert torch.equal(head.weights()["depths.0.block.self_attn.q_proj.weight"], decoded(tensors, storage)[Q])


def test_the_report_counts_what_is_stored_scales_included(tmp_path: Path) -> None:
    config, tensors = make_fp8(DENSE, BLOCKS)
    report = mz.load_head(write_checkpoint(tmp_path, config, tensors)).report
    rows = {tensor.name: tensor for tensor in report.tensors}
    assert rows.keys() == set(head_of("qwen3_5", tensors))
    assert (rows[Q].dtype, rows[Q].shape, rows[Q].nbytes) == ("F8_E4M3", tuple(tensors[Q].shape), tensors[Q].numel())
    assert rows[f"{Q}_scale_inv"].dtype == "F32"
    assert report.head_bytes == sum(tensors[name].nbytes for name in rows)
    assert report.notices == ()


@pytest.mark.parametrize("form", KINDS, ids=str)
def test_every_tensor_of_an_fp8_head_is_allocated_once(form: Form, tmp_path: Path) -> None:
    config, tensors = make_fp8(form, BLOCKS)
    base = write_checkpoint(tmp_path, config, tensors)
    with PeakBytes() as memory:
        head = mz.load_head(base, dtype=torch.float32)
    held = sum(value.nbytes for value in head.weights().values())
    largest = max(value.nbytes for name, value in tensors.items() if value.dtype == E4M3)
    rotary = sum(value.nbytes for value in head.rotary.buffers())
    # The FP8 tensor in hand, one part of it in FP32, and index vectors; tiny tensors are one part.
    assert memory.peak <= held + rotary + 16 * largest


def test_inspect_shows_an_fp8_head(tmp_path: Path) -> None:
    config, tensors = make_fp8(DENSE, BLOCKS)
    found = inspect(write_checkpoint(tmp_path, config, tensors))
    assert (found.family, found.loads, found.problems) == ("qwen3_5", True, ())
    assert found.head_bytes == sum(tensors[name].nbytes for name in head_of("qwen3_5", tensors))


def test_the_family_is_told_by_the_tensors_although_scales_are_among_them(tmp_path: Path) -> None:
    config, tensors = make_fp8(plain_form("deepseek_v3"), BLOCKS, model_type="unheard_of")
    del config["model_type"]
    assert mz.load_head(write_checkpoint(tmp_path, config, tensors), family="deepseek_v3").family.name == "deepseek_v3"
    assert mz.get_family("qwen3_5").claims(f"{Q}_scale_inv")
    assert not mz.get_family("qwen3_5").claims("mtp.layers.0.self_attn.x_proj.weight_scale_inv")


def drop(name: str) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda config, tensors: tensors.__delitem__(name)


def put(name: str, value: Tensor) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda config, tensors: tensors.__setitem__(name, value)


def say(key: str, value: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda config, tensors: config["quantization_config"].__setitem__(key, value)


FILE = r" in model\.safetensors: "


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (drop(f"{Q}_scale_inv"), f"{Q}{FILE}stored as F8_E4M3, and there is no {Q}_scale_inv or {Q}_scale"),
        (drop(Q), f"{Q}_scale_inv{FILE}a scale without its tensor {Q}"),
        (put(f"{FC}_scale_inv", torch.ones(3, 4)), f"{FC}_scale_inv{FILE}a scale beside {FC}, which is stored as BF16"),
        (
            put(f"{Q}_scale", torch.ones(())),
            f"{Q}_scale{FILE}a second scale of {Q}|{Q}_scale_inv{FILE}a second scale of {Q}",
        ),
        (
            put(f"{Q}_scale_inv", torch.ones(2, 11)),
            rf"{Q}_scale_inv{FILE}a weight \[256, 64\] .* \[11, 2\], found \[2, 11\]",
        ),
        (put(f"{Q}_scale_inv", torch.ones(11, 2).half()), rf"{Q}_scale_inv{FILE}expected a scale out of .* found F16"),
        (say("weight_block_size", None), rf"{Q}_scale_inv{FILE}.*\(config\.json gives no block size\)"),
        (
            put(Q.replace("weight", "input_scale"), torch.ones(())),
            Q.replace("weight", "input_scale") + f"{FILE}a fixed scale of activations",
        ),
    ],
)
def test_parts_that_do_not_belong_together_are_told_by_name_and_file(
    damage: Callable[[dict[str, Any], dict[str, Tensor]], None], problem: str, tmp_path: Path
) -> None:
    """https://github.com/unslothai/unsloth/pull/8953, https://github.com/sgl-project/sglang/issues/38574"""
    config, tensors = make_fp8(DENSE, BLOCKS)
    damage(config, tensors)
    base = write_checkpoint(tmp_path, config, tensors)
    with pytest.raises(ScaleMismatchError, match=problem.replace(".weight", r"\.weight")) as caught:
        mz.load_head(base)
    assert caught.value.message.startswith(f"Loading the qwen3_5 head of {tmp_path}: ")
    assert not inspect(base).loads


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    config, tensors = make_fp8(DENSE, BLOCKS)
    del tensors[f"{Q}_scale_inv"], tensors[K]
    tensors[f"{FC}_scale_inv"] = torch.ones(1)
    with pytest.raises(ScaleMismatchError) as caught:
        mz.load_head(write_checkpoint(tmp_path, config, tensors))
    assert len(caught.value.problems) == 3


def test_a_scale_that_is_no_number_is_told_with_its_tensor_and_file(tmp_path: Path) -> None:
    config, tensors = make_fp8(DENSE, BLOCKS)
    tensors[f"{Q}_scale_inv"][1, 0] = torch.nan
    with pytest.raises(ScaleMismatchError, match=rf"'{Q}' of model\.safetensors: .* finite"):
        mz.load_head(write_checkpoint(tmp_path, config, tensors))


@pytest.mark.parametrize("value", ["128x128", [128], [128, 0], [128, True]])
def test_a_block_size_that_is_none_is_told(value: Any, tmp_path: Path) -> None:
    config, tensors = make_fp8(DENSE, BLOCKS)
    config["quantization_config"]["weight_block_size"] = value
    with pytest.raises(MTPZooError, match=r"'weight_block_size' to be two positive integers"):
        mz.load_head(write_checkpoint(tmp_path, config, tensors))


def test_a_block_size_is_never_guessed_from_shapes(tmp_path: Path) -> None:
    """Every shape here would fit blocks of 24 x 40; the config says 32 x 32."""
    config, tensors = make_fp8(DENSE, BLOCKS)
    config["quantization_config"]["weight_block_size"] = [32, 32]
    with pytest.raises(ScaleMismatchError, match="blocks of 32 x 32"):
        mz.load_head(write_checkpoint(tmp_path, config, tensors))


@pytest.mark.parametrize(
    ("settings", "scheme"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt FP8"),
        ({"quant_method": "fbgemm_fp8"}, "fbgemm_fp8"),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            "compressed-tensors nvfp4-pack-quantized",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, "strategy": "group"}}
                },
            },
            "compressed-tensors",
        ),
        ({}, "a scheme that config.json does not name"),
    ],
)
def test_fp8_in_a_form_that_is_not_read_is_refused_by_its_name(
    settings: dict[str, Any], scheme: str, tmp_path: Path
) -> None:
    config, tensors = make_fp8(DENSE, BLOCKS)
    config["quantization_config"] = settings
    with pytest.raises(UnsupportedQuantizationError, match=f"tensors are stored as {scheme}"):
        mz.load_head(write_checkpoint(tmp_path, config, tensors))


def test_a_group_that_names_the_module_is_meant_before_one_that_names_all_linears(tmp_path: Path) -> None:
    config, tensors = make_fp8(DENSE, ROWS)
    groups = config["quantization_config"]["config_groups"]
    trunk = {"targets": ["Linear"], "weights": {"type": "int", "num_bits": 4, "strategy": "group"}}
    config["quantization_config"]["config_groups"] = {
        "group_0": trunk,
        "group_mtp": {**groups["group_0"], "targets": [r"re:^mtp\..*"]},
    }
    head = mz.load_head(write_checkpoint(tmp_path, config, tensors))
    assert torch.equal(head.weights()["depths.0.block.self_attn.q_proj.weight"], decoded(tensors, ROWS)[Q])


def test_a_missing_tensor_of_an_fp8_head_is_told_as_of_any_other(tmp_path: Path) -> None:
    """https://github.com/ROCm/ATOM/pull/755: one tensor that is dropped is an error, not a lower acceptance."""
    config, tensors = make_fp8(plain_form("qwen3_5_moe"), BLOCKS)
    del tensors["mtp.layers.0.mlp.shared_expert_gate.weight"]
    with pytest.raises(HeadMismatchError, match=r"missing: mtp\.layers\.0\.mlp\.shared_expert_gate\.weight"):
        mz.load_head(write_checkpoint(tmp_path, config, tensors))


def test_one_tensor_in_another_format_is_an_exception_and_never_a_head_that_is_off(tmp_path: Path) -> None:
    """https://github.com/ohdearquant/lattice/issues/418"""
    config, tensors = make_fp8(DENSE, BLOCKS)
    tensors[K] = tensors[K].view(torch.uint8)
    with pytest.raises(UnsupportedQuantizationError, match="fp8 e4m3") as caught:
        mz.load_head(write_checkpoint(tmp_path, config, tensors))
    assert any(str(problem).startswith(f"{K}: U8") for problem in caught.value.problems)


def test_an_ignore_list_that_forgets_the_experts_is_noticed_and_the_head_loads(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/pull/41994: fc, attention and shared expert listed, float experts forgotten."""
    form = Form("qwen3_5_moe", "packed")
    config, tensors = make_fp8(form, BLOCKS)
    tensors = decoded(tensors, BLOCKS)
    modules = [name.removesuffix(".weight") for name in head_of(form.family, tensors) if ".experts." not in name]
    config["quantization_config"]["modules_to_not_convert"] = modules
    base = write_checkpoint(tmp_path, config, tensors)
    (notice,) = mz.load_head(base).report.notices
    assert notice.startswith("ignore list incomplete: ")
    assert notice.endswith("mtp.layers.0.mlp.experts")
    assert inspect(base).problems == (notice,)


def test_loading_reads_each_tensor_and_scale_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors = make_fp8(DENSE, BLOCKS)
    base = write_checkpoint(tmp_path, config, tensors)
    seen: list[str] = []
    read_into = TensorReader.read_into

    def noted(self: TensorReader, entry: Any, out: Tensor) -> None:
        seen.append(entry.name)
        read_into(self, entry, out)

    monkeypatch.setattr(TensorReader, "read_into", noted)
    mz.load_head(base)
    assert sorted(seen) == sorted(head_of("qwen3_5", tensors))
