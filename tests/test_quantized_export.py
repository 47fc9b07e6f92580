"""Exports into quantised bases: FP8 heads keep their form and their bytes, float heads are described as float."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import mtp_zoo as mz
from mtp_zoo import fp8
from mtp_zoo.checkpoint import CheckpointIndex
from mtp_zoo.errors import ExportError, VerificationError
from mtp_zoo.exporter import check_export
from mtp_zoo.keymap import to_native
from mtp_zoo.registry import get_family
from tests.exporting import same, stored
from tests.quantizing import (
    BLOCKS,
    E4M3,
    ROWS,
    STORAGES,
    WHOLE,
    Storage,
    built_quantized,
    decoded,
    make_fp8,
    quantized_names,
    settings_of,
)
from tests.stored_forms import Form, all_forms, head_of, make, packed, plain_form, site_of
from tests.tiny import write_checkpoint

DENSE = plain_form("qwen3_5")
PACKED = Form("qwen3_5_moe", "packed")
DEEPSEEK = Form("deepseek_v3", "one_by_one", copies=True)
KINDS = [DENSE, PACKED, plain_form("qwen3_5_moe"), DEEPSEEK]
ALL = [form for form in all_forms() if not form.tied and not form.copies]
Q = "mtp.layers.0.self_attn.q_proj.weight"
CANONICAL_Q = "depths.0.block.self_attn.q_proj.weight"


def reread(base: Path, out: Path, **options: Any) -> tuple[Any, Any]:
    """A head, loaded from `base` and exported into it, and the report."""
    head = mz.load_head(base, **options)
    return head, mz.export(head, base=base, out=out)


@pytest.mark.parametrize("shards", [1, 3], ids=["one file", "shards"])
@pytest.mark.parametrize(
    ("form", "storage"),
    [*((form, BLOCKS) for form in ALL), *((form, storage) for form in KINDS for storage in (ROWS, WHOLE))],
    ids=str,
)
def test_an_untouched_fp8_head_leaves_every_byte_as_it_was(
    form: Form, storage: Storage, shards: int, tmp_path: Path
) -> None:
    config, tensors = make_fp8(form, storage)
    base = write_checkpoint(tmp_path / "base", config, tensors, shards=shards)
    _, report = reread(base, tmp_path / "out", dtype=None if shards == 1 else torch.float32)
    out = stored(tmp_path / "out")
    assert out.keys() == tensors.keys()
    assert same(out, tensors, tensors)
    assert (tmp_path / "out" / "config.json").read_bytes() == (base / "config.json").read_bytes()
    count = len(quantized_names(form.family, tensors))
    assert (report.tensors_kept, report.tensors_encoded) == (count, 0)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_every_dtype_of_a_scale_is_kept(storage: Storage, tmp_path: Path) -> None:
    config, tensors = make_fp8(DENSE, storage)
    base = write_checkpoint(tmp_path / "base", config, tensors)
    head = mz.load_head(base)
    with torch.no_grad():
        head.get_parameter(CANONICAL_Q).mul_(1.5)
    mz.export(head, base=base, out=tmp_path / "out")
    out, scale = stored(tmp_path / "out"), f"{Q}{storage.suffix}"
    assert (out[scale].dtype, out[scale].shape) == (tensors[scale].dtype, tensors[scale].shape)
    assert same(out, tensors, tensors.keys() - {Q, scale})


def test_a_head_that_was_loaded_as_bf16_and_trained_in_fp32_keeps_what_it_did_not_change(tmp_path: Path) -> None:
    config, tensors = make_fp8(DENSE, BLOCKS)
    base = write_checkpoint(tmp_path / "base", config, tensors)
    report = mz.export(mz.load_head(base).float(), base=base, out=tmp_path / "out")
    assert same(stored(tmp_path / "out"), tensors, tensors)
    assert report.tensors_encoded == 0


@pytest.mark.parametrize("form", KINDS, ids=str)
def test_a_changed_tensor_is_encoded_within_the_bound_and_the_others_keep_their_bytes(
    form: Form, tmp_path: Path
) -> None:
    config, tensors = make_fp8(form, BLOCKS)
    base = write_checkpoint(tmp_path / "base", config, tensors)
    head = mz.load_head(base, dtype=torch.float32)
    name = quantized_names(form.family, tensors)[-1]
    (part,) = {move.head for binding in head.origin.bindings for move in binding.moves if move.native == name}
    with torch.no_grad():
        head.get_parameter(part).add_(0.01)
    report = mz.export(head, base=base, out=tmp_path / "out")
    out = stored(tmp_path / "out")
    native = to_native(head.origin.bindings, head.state_dict())
    changed = {move.native for binding in head.origin.bindings for move in binding.moves if move.head == part}
    for one in changed:
        weight, scale = out[one], out[f"{one}_scale_inv"]
        ones = BLOCKS.numbers(torch.ones(weight.shape).to(E4M3), scale)
        error = (BLOCKS.numbers(weight, scale) - native[one]).abs()
        assert bool((error <= torch.maximum(native[one].abs() * fp8.STEP, ones * fp8.SMALLEST_STEP)).all())
        assert not same(out, tensors, [one])
    assert same(out, tensors, tensors.keys() - changed - {f"{one}_scale_inv" for one in changed})
    assert report.tensors_encoded == len(changed)


def test_what_was_exported_can_be_the_base_of_the_next_export(tmp_path: Path) -> None:
    config, tensors = make_fp8(DEEPSEEK, BLOCKS)
    base = write_checkpoint(tmp_path / "base", config, tensors)
    head = mz.load_head(base)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(1.25)
    mz.export(head, base=base, out=tmp_path / "one")
    reread(tmp_path / "one", tmp_path / "two")
    assert same(stored(tmp_path / "one"), stored(tmp_path / "two"), tensors)


@pytest.mark.parametrize("storage", [BLOCKS, ROWS], ids=str)
@pytest.mark.parametrize("form", KINDS, ids=str)
def test_a_dtype_writes_floats_drops_the_scales_and_has_both_engines_leave_the_head_alone(
    form: Form, storage: Storage, tmp_path: Path
) -> None:
    """https://github.com/sgl-project/sglang/issues/35797: parts and fused names."""
    config, tensors = make_fp8(form, storage)
    base = write_checkpoint(tmp_path / "base", config, tensors)
    report = mz.export(mz.load_head(base), base=base, out=tmp_path / "out", dtype=torch.bfloat16)
    out, floats = stored(tmp_path / "out"), decoded(tensors, storage)
    assert out.keys() == floats.keys()
    assert same(out, floats, floats)
    assert built_quantized(tmp_path / "out", form.family) == set()
    assert (report.tensors_kept, report.tensors_encoded) == (0, 0)
    again = mz.load_head(tmp_path / "out")
    assert again.report.notices == ()
    before, after = config["quantization_config"], settings_of(tmp_path / "out")
    assert {key: value for key, value in after.items() if not isinstance(value, list)} == {
        key: value for key, value in before.items() if not isinstance(value, list)
    }


def test_always_float_is_never_encoded(tmp_path: Path) -> None:
    """https://github.com/intel/auto-round/pull/1731: a fusion that is stored quantised breaks engines."""
    config, tensors = make_fp8(DENSE, BLOCKS)
    quantized, scale = fp8.encode(tensors["mtp.fc.weight"].float(), fp8.Scheme("block", (24, 40)))
    tensors |= {"mtp.fc.weight": quantized, "mtp.fc.weight_scale_inv": scale}
    config["quantization_config"]["modules_to_not_convert"].remove("mtp.fc")
    base = write_checkpoint(tmp_path / "base", config, tensors)
    reread(base, tmp_path / "out")
    out = stored(tmp_path / "out")
    assert out["mtp.fc.weight"].dtype == torch.bfloat16
    assert "mtp.fc.weight_scale_inv" not in out
    assert "mtp.fc" in settings_of(tmp_path / "out")["modules_to_not_convert"]


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "deepseek_v3", "glm4_moe"])
def test_every_family_holds_its_fusion_and_norms_for_always_float(family: str) -> None:
    """https://github.com/intel/auto-round/pull/1731"""
    always = get_family(family).spec.always_float
    for part in ("eh_proj.weight", "enorm.weight", "norm.weight", "block.input_layernorm.weight"):
        assert f"depths.0.{part}".endswith(always)


OTHER_SCHEMES: dict[str, dict[str, Any]] = {
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {}},
    "awq": {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["visual"]},
    "quark": {"quant_method": "quark", "exclude": ["lm_head"]},
    "w4a16": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group"}}},
        "ignore": ["lm_head"],
    },
    "fp8": dict(BLOCKS.settings),
}


@pytest.mark.parametrize("has_head", [True, False], ids=["float head", "no head"])
@pytest.mark.parametrize("scheme", OTHER_SCHEMES)
def test_a_float_head_goes_into_a_base_of_any_scheme_and_the_ignore_list_is_completed(
    scheme: str, has_head: bool, tmp_path: Path
) -> None:
    """https://github.com/sgl-project/sglang/issues/35797, https://github.com/vllm-project/vllm/issues/43304"""
    config, tensors = make(DENSE)
    donor = write_checkpoint(tmp_path / "donor", config, tensors)
    head = set(head_of("qwen3_5", tensors))
    kept = {name: tensor for name, tensor in tensors.items() if has_head or name not in head}
    config = {**config, "quantization_config": copy.deepcopy(OTHER_SCHEMES[scheme])}
    base = write_checkpoint(tmp_path / "base", config, kept)
    before = (base / "config.json").read_bytes()
    report = mz.export(mz.load_head(base if has_head else donor), base=base, out=tmp_path / "out")
    out = stored(tmp_path / "out")
    assert same(out, tensors, tensors)
    assert built_quantized(tmp_path / "out", "qwen3_5") == set()
    assert [notice.startswith("the head was loaded from") for notice in report.notices] == [True] * (not has_head)
    assert (base / "config.json").read_bytes() == before
    assert mz.load_head(tmp_path / "out").report.notices == ()


def test_a_complete_list_leaves_the_config_as_it_is_byte_for_byte(tmp_path: Path) -> None:
    config, tensors = make(DENSE)
    config = {**config, "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["mtp*"]}}
    base = write_checkpoint(tmp_path / "base", config, tensors)
    reread(base, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_bytes() == (base / "config.json").read_bytes()


def test_a_quantised_head_of_another_scheme_gives_way_to_floats_where_a_dtype_is_given(tmp_path: Path) -> None:
    config, tensors = make(DENSE)
    donor = write_checkpoint(tmp_path / "donor", config, tensors)
    packed_words = dict(tensors)
    packed_words[Q.replace("weight", "qweight")] = packed_words.pop(Q).view(torch.int32)
    config = {**config, "quantization_config": copy.deepcopy(OTHER_SCHEMES["gptq"])}
    base = write_checkpoint(tmp_path / "base", config, packed_words)
    mz.export(mz.load_head(donor), base=base, out=tmp_path / "out", dtype=torch.bfloat16)
    assert stored(tmp_path / "out").keys() == tensors.keys()
    assert built_quantized(tmp_path / "out", "qwen3_5") == set()


def test_the_list_under_text_config_is_completed_where_it_stands(tmp_path: Path) -> None:
    config, tensors = make(DENSE)
    outer = {"architectures": config.pop("architectures"), "model_type": "qwen3_5", "tie_word_embeddings": False}
    config["quantization_config"] = {"quant_method": "quark", "exclude": []}
    base = write_checkpoint(tmp_path / "base", {**outer, "text_config": config}, tensors)
    reread(base, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["text_config"]["quantization_config"]["exclude"] == [r"re:^mtp(\.|$)"]
    assert "quantization_config" not in written


@pytest.mark.parametrize("donor", ["packed", "one_by_one"])
def test_an_fp8_head_takes_the_layout_of_the_base(donor: str, tmp_path: Path) -> None:
    """https://github.com/ISEEKYAN/mbridge/pull/145: experts one by one or packed; FP8 into FP8 of the other layout."""
    config, single = make(plain_form("qwen3_5_moe"))
    experts = packed(single, site_of("qwen3_5_moe"))
    source, goal = (experts, single) if donor == "packed" else (single, experts)
    quantized = dict(goal)
    for name in quantized_names("qwen3_5_moe", goal):
        quantized |= dict(zip((name, f"{name}_scale_inv"), fp8.encode(goal[name].float(), BLOCK_SCHEME), strict=True))
    fp8_config = {**config, "quantization_config": {**BLOCKS.settings, "modules_to_not_convert": ["mtp.fc"]}}
    base = write_checkpoint(tmp_path / "base", fp8_config, quantized)
    head = mz.load_head(write_checkpoint(tmp_path / "donor", config, source))
    report = mz.export(head, base=base, out=tmp_path / "out")
    assert same(stored(tmp_path / "out"), quantized, quantized)
    assert report.tensors_encoded == len(quantized_names("qwen3_5_moe", goal))


BLOCK_SCHEME = fp8.Scheme("block", (24, 40))


def test_an_fp8_head_becomes_bf16_in_a_base_that_is_not_quantised(tmp_path: Path) -> None:
    config, tensors = make_fp8(DENSE, BLOCKS)
    head = mz.load_head(write_checkpoint(tmp_path / "fp8", config, tensors))
    plain, floats = make(DENSE)
    for name, kept in (("with", floats), ("without", {n: t for n, t in floats.items() if not n.startswith("mtp.")})):
        base = write_checkpoint(tmp_path / name, plain, kept)
        mz.export(head, base=base, out=tmp_path / f"out-{name}")
        out = stored(tmp_path / f"out-{name}")
        assert same(out, decoded(tensors, BLOCKS), [n for n in out if n.startswith("mtp.")])
        assert (tmp_path / f"out-{name}" / "config.json").read_bytes() == (base / "config.json").read_bytes()


def test_numbers_that_are_not_finite_are_told_by_tensor_and_nothing_is_left(tmp_path: Path) -> None:
    """https://github.com/sgl-project/sglang/issues/38574"""
    config, tensors = make_fp8(DENSE, BLOCKS)
    base = write_checkpoint(tmp_path / "base", config, tensors)
    head = mz.load_head(base)
    with torch.no_grad():
        head.get_parameter(CANONICAL_Q)[3, 5] = torch.nan
    with pytest.raises(ExportError, match=rf"'{Q}' of model\.safetensors as FP8: .* NaN"):
        mz.export(head, base=base, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_base_whose_fp8_tensor_has_another_shape_is_told(tmp_path: Path) -> None:
    config, tensors = make_fp8(DENSE, BLOCKS)
    head = mz.load_head(write_checkpoint(tmp_path / "good", config, tensors))
    tensors[Q], tensors[f"{Q}_scale_inv"] = torch.ones(48, 80).to(E4M3), torch.ones(2, 2)
    base = write_checkpoint(tmp_path / "base", config, tensors)
    with pytest.raises(ExportError, match=rf"{Q} in model\.safetensors: the head has .* the base \[48, 80\]"):
        mz.export(head, base=base, out=tmp_path / "out")


def test_the_check_before_training_accepts_an_fp8_base(tmp_path: Path) -> None:
    config, tensors = make_fp8(DENSE, BLOCKS)
    base = write_checkpoint(tmp_path / "base", config, tensors)
    check_export(CheckpointIndex.open(base), tmp_path / "out", get_family("qwen3_5"))


def test_the_provenance_names_scales_and_their_digests(tmp_path: Path) -> None:
    config, tensors = make_fp8(DENSE, BLOCKS)
    base = write_checkpoint(tmp_path / "base", config, tensors)
    reread(base, tmp_path / "out")
    told = json.loads((tmp_path / "out" / "mtp_zoo.json").read_text())["tensors"]
    assert told.keys() == set(head_of("qwen3_5", tensors))
    assert told[Q]["dtype"] == "F8_E4M3"
    assert told[f"{Q}_scale_inv"]["dtype"] == "F32"


@pytest.mark.parametrize("victim", [Q, f"{Q}_scale_inv"])
def test_bytes_that_change_on_their_way_to_the_disk_are_found(
    victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mtp_zoo.exporter as exporter

    config, tensors = make_fp8(DENSE, BLOCKS)
    base = write_checkpoint(tmp_path / "base", config, tensors)
    written = exporter.write_texts

    def damaged(overlay: Any, *rest: Any) -> None:
        written(overlay, *rest)
        index = CheckpointIndex.open(overlay.root)
        entry = index.entries[victim]
        with (overlay.root / entry.file).open("r+b") as stream:
            stream.seek(entry.start)
            stream.write(b"\x7b")

    monkeypatch.setattr(exporter, "write_texts", damaged)
    with pytest.raises(VerificationError, match=rf"'{victim}' differs from the head's"):
        reread(base, tmp_path / "out")


def test_a_config_that_does_not_say_what_was_meant_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mtp_zoo.exporter as exporter

    config, tensors = make_fp8(DENSE, BLOCKS)
    base = write_checkpoint(tmp_path / "base", config, tensors)
    written = exporter.write_texts

    def damaged(overlay: Any, *rest: Any) -> None:
        written(overlay, *rest)
        (overlay.root / "config.json").write_bytes((base / "config.json").read_bytes())

    monkeypatch.setattr(exporter, "write_texts", damaged)
    with pytest.raises(VerificationError, match=r"has vllm build 'mtp\.layers\.0\.self_attn\.qkv_proj' quantised"):
        mz.export(mz.load_head(base), base=base, out=tmp_path / "out", dtype=torch.bfloat16)
