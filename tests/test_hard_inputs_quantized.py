"""Public failures with quantised checkpoints, as small tests: what a head in one is loaded as, and grafted into one as.

Lists of modules are tested in test_quant_ignore.py, exports in test_quantized_export.py, the arithmetic in test_fp8.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import mtp_zoo as mz
from mtp_zoo import fp8
from mtp_zoo.cli import app
from mtp_zoo.errors import MTPZooError, ScaleMismatchError, UnsupportedQuantizationError
from mtp_zoo.keymap import to_native
from tests.exporting import same, snapshot, stored
from tests.quantizing import (
    BLOCKS,
    E4M3,
    ROWS,
    Storage,
    built_quantized,
    decoded,
    make_fp8,
    quantized_names,
    settings_of,
)
from tests.receivers import RECEIVERS
from tests.stored_forms import Form, head_of, make, plain_form
from tests.tiny import write_checkpoint

DENSE = plain_form("qwen3_5")
EXPERTS = Form("qwen3_5_moe", "packed")
Q = "mtp.layers.0.self_attn.q_proj.weight"
FC = "mtp.fc.weight"


def trunk_of(family: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in set(head_of(family, tensors))}


def test_a_list_that_forgets_the_float_experts_is_noticed_and_completed(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/pull/41994: fc, attention and shared expert listed, experts forgotten."""
    config, tensors = make(EXPERTS)
    modules = [name.removesuffix(".weight") for name in head_of(EXPERTS.family, tensors) if ".experts." not in name]
    config["quantization_config"] = {**BLOCKS.settings, "modules_to_not_convert": modules}
    published = write_checkpoint(tmp_path / "published", config, tensors)
    shown = CliRunner().invoke(app, ["inspect", str(published), "--json"])
    (problem,) = json.loads(shown.stdout)["problems"]
    assert problem.startswith("ignore list incomplete: ")
    assert problem.endswith("mtp.layers.0.mlp.experts")
    mz.graft(published, published, tmp_path / "out")
    assert built_quantized(tmp_path / "out", EXPERTS.family) == set()
    assert set(modules) < set(settings_of(tmp_path / "out")["modules_to_not_convert"])
    assert mz.load_head(tmp_path / "out").report.notices == ()
    assert same(stored(tmp_path / "out"), tensors, tensors)


@pytest.mark.parametrize("storage", [BLOCKS, ROWS], ids=str)
@pytest.mark.parametrize("form", [DENSE, EXPERTS], ids=str)
def test_an_fp8_head_becomes_bf16_on_a_trunk_that_lost_its_own(form: Form, storage: Storage, tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/issues/43304: in an FP8 model and in a BF16 one, listed where there is a list."""
    config, tensors = make_fp8(form, storage)
    donor, floats = write_checkpoint(tmp_path / "donor", config, tensors), decoded(tensors, storage)
    head = {name: floats[name] for name in head_of(form.family, floats)}
    for name, receiving in (("fp8", config), ("bf16", {k: v for k, v in config.items() if k != "quantization_config"})):
        trunk = write_checkpoint(tmp_path / name, receiving, trunk_of(form.family, tensors))
        mz.graft(donor, trunk, tmp_path / f"{name}-out")
        out = stored(tmp_path / f"{name}-out")
        assert {n for n in out if n.startswith("mtp.")} == head.keys()
        assert same(out, head, head)
    assert built_quantized(tmp_path / "fp8-out", form.family) == set()
    assert "quantization_config" not in json.loads((tmp_path / "bf16-out" / "config.json").read_text())


def test_a_fusion_stays_float_where_the_receivers_own_was_quantised(tmp_path: Path) -> None:
    """https://github.com/intel/auto-round/pull/1731"""
    plain, floats = make(DENSE)
    donor = write_checkpoint(tmp_path / "donor", plain, floats)
    config, tensors = make_fp8(DENSE, BLOCKS)
    weight, scale = fp8.encode(floats[FC].float(), fp8.Scheme("block", BLOCKS.block))
    config["quantization_config"]["modules_to_not_convert"].remove("mtp.fc")
    base = write_checkpoint(tmp_path / "base", config, {**tensors, FC: weight, f"{FC}_scale_inv": scale})
    report = mz.graft(donor, base, tmp_path / "out")
    out = stored(tmp_path / "out")
    assert same(out, floats, [FC])
    assert f"{FC}_scale_inv" not in out
    assert "mtp.fc" in settings_of(tmp_path / "out")["modules_to_not_convert"]
    assert report.tensors_encoded == len(quantized_names("qwen3_5", tensors))


def packed_words(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The head's linears as 4-bit words, as in the published W4A16 checkpoints with a packed head."""
    out = dict(tensors)
    for name in [name for name in tensors if name.startswith("mtp.layers.") and name.endswith("proj.weight")]:
        weight = out.pop(name)
        module = name.removesuffix("weight")
        out[f"{module}weight_packed"] = torch.zeros(weight.shape[0], weight.shape[1] // 8, dtype=torch.int32)
        out[f"{module}weight_scale"] = torch.ones(weight.shape[0], weight.shape[1] // 32, dtype=torch.bfloat16)
        out[f"{module}weight_shape"] = torch.tensor(weight.shape)
    return out


def test_a_head_in_a_scheme_that_is_not_read_is_refused_by_its_name_with_every_tensor(tmp_path: Path) -> None:
    """https://github.com/sgl-project/sglang/issues/38574: an error that names the head's modules."""
    config, tensors = make(DENSE)
    groups = {"group_mtp": {"targets": [r"re:.*mtp\..*proj$"], "weights": {"num_bits": 4, "type": "int"}}}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    packed = packed_words(tensors)
    donor = write_checkpoint(tmp_path / "donor", {**config, "quantization_config": settings}, packed)
    trunk = write_checkpoint(tmp_path / "trunk", config, trunk_of("qwen3_5", tensors))
    before = snapshot(tmp_path)
    with pytest.raises(UnsupportedQuantizationError, match="compressed-tensors pack-quantized") as caught:
        mz.graft(donor, trunk, tmp_path / "out")
    words = [name for name in packed if name.endswith(("weight_packed", "weight_shape"))]
    assert sorted(str(problem).partition(":")[0] for problem in caught.value.problems) == sorted(words)
    assert snapshot(tmp_path) == before


Damage = Callable[[dict[str, Tensor]], None]
DAMAGES: dict[str, tuple[Damage, str]] = {
    "no scale": (lambda tensors: tensors.__delitem__(f"{Q}_scale_inv"), Q),
    "no weight": (lambda tensors: tensors.__delitem__(Q), f"{Q}_scale_inv"),
    "other words": (lambda tensors: tensors.__setitem__(Q, tensors[Q].view(torch.uint8)), Q),
    "a scale too many": (lambda tensors: tensors.__setitem__(f"{FC}_scale_inv", torch.ones(1)), f"{FC}_scale_inv"),
    "another grid": (lambda tensors: tensors.__setitem__(f"{Q}_scale_inv", torch.ones(2, 11)), f"{Q}_scale_inv"),
    "a scale that is none": (lambda tensors: tensors[f"{Q}_scale_inv"].fill_(torch.nan), Q),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_error_names_family_or_checkpoint_and_the_tensor(damage: str, tmp_path: Path) -> None:
    """https://github.com/sgl-project/sglang/issues/38574, https://github.com/ohdearquant/lattice/issues/418: nothing that is
    asked for a head returns without one."""
    config, tensors = make_fp8(DENSE, BLOCKS)
    change, culprit = DAMAGES[damage]
    change(tensors)
    source = write_checkpoint(tmp_path / "source", config, tensors)
    trunk = write_checkpoint(tmp_path / "trunk", config, trunk_of("qwen3_5", tensors))
    ways: list[Callable[[], object]] = [
        lambda: mz.load_head(source),
        lambda: mz.load_head(source, family="qwen3_5", dtype=torch.float32),
        lambda: mz.graft(source, trunk, tmp_path / "out"),
        lambda: mz.graft(source, source, tmp_path / "out", dtype=torch.bfloat16),
    ]
    for way in ways:
        with pytest.raises(MTPZooError) as caught:
            way()
        assert culprit in str(caught.value)
        assert any(place in str(caught.value) for place in ("qwen3_5 head", str(source), "model.safetensors"))
        assert not (tmp_path / "out").exists()
    exported = CliRunner().invoke(app, ["export", str(source), str(tmp_path / "out")])
    assert isinstance(exported.exception, MTPZooError)


def test_only_a_scale_that_is_not_read_from_headers_may_pass_an_inspection(tmp_path: Path) -> None:
    """https://github.com/ohdearquant/lattice/issues/418"""
    config, tensors = make_fp8(DENSE, BLOCKS)
    for name, (change, _) in DAMAGES.items():
        damaged = {key: value.clone() for key, value in tensors.items()}
        change(damaged)
        source = write_checkpoint(tmp_path / name, config, damaged)
        loads = json.loads(CliRunner().invoke(app, ["inspect", str(source), "--json"]).stdout)["loads"]
        assert loads is (name == "a scale that is none")


def test_a_description_of_every_tensor_gets_the_grafted_head(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm-ascend/pull/502: W8A8, described tensor by tensor; the head was never seen."""
    config, tensors = make(DENSE)
    donor = write_checkpoint(tmp_path / "donor", config, tensors)
    trunk = write_checkpoint(tmp_path / "trunk", config, trunk_of("qwen3_5", tensors))
    told = {name: "W8A8_DYNAMIC" if "proj" in name else "FLOAT" for name in trunk_of("qwen3_5", tensors)}
    (trunk / "quant_model_description.json").write_text(json.dumps({"model_quant_type": "W8A8_DYNAMIC", **told}))
    mz.graft(donor, trunk, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "quant_model_description.json").read_text())
    head = dict.fromkeys(head_of("qwen3_5", tensors), "FLOAT")
    assert written == {"model_quant_type": "W8A8_DYNAMIC", **told, **head}


def test_an_eight_bit_head_is_read_on_the_grid_that_the_config_states_and_no_other(tmp_path: Path) -> None:
    """https://github.com/axolotl-ai-cloud/axolotl/pull/3486, https://github.com/unslothai/unsloth/pull/8953: rows and columns
    that blocks do not divide, and a grid that lies the other way."""
    config, tensors = make_fp8(DENSE, BLOCKS)
    head = mz.load_head(write_checkpoint(tmp_path / "right", config, tensors))
    assert torch.equal(to_native(head.origin.bindings, head.state_dict())[Q], decoded(tensors, BLOCKS)[Q])
    rows, columns = tensors[f"{Q}_scale_inv"].shape
    assert rows != columns
    assert (tensors[Q].shape[0] % 24, tensors[Q].dtype) != (0, E4M3)
    tensors[f"{Q}_scale_inv"] = tensors[f"{Q}_scale_inv"].T.contiguous()
    with pytest.raises(ScaleMismatchError, match=rf"\[{rows}, {columns}\], found \[{columns}, {rows}\]"):
        mz.load_head(write_checkpoint(tmp_path / "transposed", config, tensors))


@pytest.mark.parametrize("receiver", RECEIVERS, ids=str)
def test_a_head_is_plain_modules_whatever_the_target_is_quantised_with(receiver: Any, tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/issues/43304: from a config with each method, a head that trains."""
    config, tensors = make(DENSE)
    root = receiver.write(tmp_path / "m", config, trunk_of("qwen3_5", tensors))
    head = mz.load_head(root, init="random", dtype=torch.float32)
    linear = [module for module in head.modules() if "proj" in type(module).__name__ or hasattr(module, "in_features")]
    assert {type(module) for module in linear} == {torch.nn.Linear}
    assert len(linear) == 8
    assert all(parameter.requires_grad for parameter in head.parameters())
