"""Public failures with experts and fused tensors, as small tests over every registered family.

The mechanism itself (parts in order, expert i in slice i, unequal parts of a fused projection) is tested in test_keymap.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import mtp_zoo as mz
from mtp_zoo.errors import HeadMismatchError
from mtp_zoo.head import DraftHead
from mtp_zoo.keymap import to_head, to_native
from mtp_zoo.loader import key_map, load_head
from mtp_zoo.modelconfig import ModelConfig
from mtp_zoo.registry import Family, get_family
from mtp_zoo.rules import Rename, Rule, Skip, Split
from mtp_zoo_conformance.cases import get_case
from tests.exporting import same, stored
from tests.stored_forms import FAMILIES, WITH_EXPERTS, Experts, Form, all_forms, config_of, make, plain_form, site_of
from tests.tiny import write_checkpoint

OTHER: dict[Experts, Experts] = {"one_by_one": "packed", "packed": "one_by_one"}

NO_QUERY_LATENT = {"q_lora_rank": None}
BIASES = {"attention_bias": True}
MORE_CONFIGS: dict[str, tuple[dict[str, Any], ...]] = {
    "deepseek_v3": (NO_QUERY_LATENT, BIASES),
    "deepseek_v32": (BIASES,),
    "glm4_moe_lite": (NO_QUERY_LATENT, BIASES),
    "glm_moe_dsa": (BIASES,),
}
"""Configs with optional tensors that no conformance case has."""

NEVER_BUILT = {
    "deepseek_v32": {"self_attn.q_proj.weight"},
    "glm_moe_dsa": {"self_attn.q_proj.weight"},
}
"""Rules that a family lists with its relatives and whose tensor transformers' layer can't have: indexers read query latents."""


@pytest.mark.parametrize("experts", OTHER)
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_a_head_is_written_in_the_form_of_the_base_and_not_of_its_origin(
    family: str, experts: Experts, tmp_path: Path
) -> None:
    """https://github.com/ISEEKYAN/mbridge/pull/145, https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/4329"""
    origin = write_checkpoint(tmp_path / "origin", *make(Form(family, experts)))
    config, expected = make(Form(family, OTHER[experts]))
    zeroed = {name: value if ".experts." not in name else torch.zeros_like(value) for name, value in expected.items()}
    base = write_checkpoint(tmp_path / "base", config, zeroed)
    mz.export(load_head(origin), base=base, out=tmp_path / "out")
    out = stored(tmp_path / "out")
    assert out.keys() == expected.keys()
    head = load_head(tmp_path / "out").weights()
    assert all(torch.equal(head[name], value) for name, value in load_head(origin).weights().items())
    packed = [name for name in load_head(tmp_path / "out").report.tensors if ".experts." in name.name]
    assert same(out, expected, [tensor.name for tensor in packed])


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_one_packed_tensor_that_lies_the_other_way_is_refused_with_both_shapes(family: str, tmp_path: Path) -> None:
    """https://github.com/huggingface/transformers/pull/43201: nothing is made up in its place."""
    config, tensors = make(Form(family, "packed"))
    (name,) = (name for name in tensors if name.endswith(".mlp.experts.down_proj"))
    right = list(tensors[name].shape)
    tensors[name] = tensors[name].transpose(1, 2).contiguous()
    with pytest.raises(HeadMismatchError) as caught:
        load_head(write_checkpoint(tmp_path, config, tensors))
    wrong = [right[0], right[2], right[1]]
    assert [*map(str, caught.value.problems)] == [f"shape: {name}: expected {right}, found {wrong}"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_form_that_a_family_lists_has_a_fixture_and_comes_back_bit_for_bit(family: str) -> None:
    """https://github.com/ggml-org/llama.cpp/pull/19435: a branch that no model had used was wrong and nobody saw it."""
    used: set[Rule] = set()
    texts = [dict(variant.text_config) for variant in get_case(family).variants]
    texts += [config_of(family, **more) for more in MORE_CONFIGS.get(family, ())]
    for text in texts:
        head = DraftHead(get_family(family), ModelConfig(text, Path("config.json")))
        for form in (form for form in all_forms() if form.family == family):
            for binding in key_map(head, site_of(family)).layout(make(form)[1]):
                used.add(binding.rule)
                weights = {name: torch.randn(shape) for name, shape in binding.heads.items()}
                back = to_head([binding], to_native([binding], weights))
                assert all(torch.equal(back[name], value) for name, value in weights.items())
    listed = {rule for rule in get_family(family).rules if not isinstance(rule, Skip)}
    unused = {rule.head.partition(".block.")[2] for rule in listed - used if not isinstance(rule, Split)}
    assert unused == NEVER_BUILT.get(family, set())


@pytest.mark.parametrize("part", ["mlp.e_score_correction_bias", "mlp.moe_statics.e_score_correction_bias"])
def test_a_routers_bias_is_found_wherever_a_family_stores_it(part: str, tmp_path: Path) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/8358: beside the router, or in a module of statistics."""
    usual = "mlp.gate.e_score_correction_bias"
    family = moved_bias(get_family("glm4_moe"), usual, part)
    config, tensors = make(plain_form("glm4_moe"))
    tensors = {name.replace(f"layers.2.{usual}", f"layers.2.{part}"): value for name, value in tensors.items()}
    base = write_checkpoint(tmp_path / "base", config, tensors)
    head = load_head(base, family=family, dtype=torch.bfloat16)
    name = f"model.layers.2.{part}"
    assert torch.equal(head.state_dict()[f"depths.0.block.{usual}"], tensors[name])
    mz.export(head, base=base, out=tmp_path / "out")
    assert same(stored(tmp_path / "out"), tensors, tensors)
    del tensors[name]
    with pytest.raises(HeadMismatchError, match=f"missing: {name}"):
        load_head(write_checkpoint(tmp_path / "lost", config, tensors), family=family)


def moved_bias(family: Family, usual: str, part: str) -> Family:
    """The family, its router's bias under another native name."""
    rules = [
        Rename(rule.native.replace(usual, part), rule.head) if isinstance(rule, Rename) else rule
        for rule in family.rules
    ]
    assert rules != list(family.rules)
    return dataclasses.replace(family, rules=tuple(rules))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_an_export_in_another_dtype_keeps_what_must_not_be_rounded_and_repeats(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """https://github.com/ISEEKYAN/Megatron-LM/pull/81: a cast of everything made export and load no round trip."""
    base = write_checkpoint(tmp_path / "base", *make(plain_form(family)))
    mz.export(load_head(base), base=base, out=tmp_path / "one", dtype=dtype)
    mz.export(load_head(tmp_path / "one"), base=tmp_path / "one", out=tmp_path / "two", dtype=dtype)
    before, one, two = stored(base), stored(tmp_path / "one"), stored(tmp_path / "two")
    head = load_head(base)
    exact = {n for b in head.origin.bindings for n in b.natives if not all(map(head.rounds, b.heads))}
    assert same(one, before, exact)
    assert same(two, one, one)
    cast = {tensor.name for tensor in head.report.tensors} - exact
    assert {one[name].dtype for name in cast} == {dtype}
