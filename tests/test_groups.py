"""Groups of a head's tensors: which tensor is in which, what trains, and what is never rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mtp_zoo as mz
from mtp_zoo.errors import SettingsError
from mtp_zoo.groups import GROUPS, group_of
from mtp_zoo.head import DraftHead
from mtp_zoo.loader import load_head
from mtp_zoo.modelconfig import ModelConfig
from mtp_zoo.registry import get_family
from tests.exporting import same, stored
from tests.stored_forms import FAMILIES, WITH_EXPERTS, Form, config_of, head_of, make, plain_form, write
from tests.tiny import write_checkpoint

TABLE = {
    "depths.0.eh_proj.weight": "fusion",
    "depths.3.eh_proj.weight": "fusion",
    "depths.0.enorm.weight": "norms",
    "depths.0.hnorm.weight": "norms",
    "depths.0.norm.weight": "norms",
    "depths.0.block.input_layernorm.weight": "norms",
    "depths.0.block.post_attention_layernorm.weight": "norms",
    "depths.0.block.self_attn.q_norm.weight": "norms",
    "depths.0.block.self_attn.q_a_layernorm.weight": "norms",
    "depths.0.block.self_attn.kv_a_layernorm.weight": "norms",
    "depths.0.block.self_attn.q_proj.weight": "attention",
    "depths.0.block.self_attn.q_proj.bias": "attention",
    "depths.0.block.self_attn.q_a_proj.weight": "attention",
    "depths.0.block.self_attn.kv_a_proj_with_mqa.weight": "attention",
    "depths.0.block.self_attn.kv_b_proj.weight": "attention",
    "depths.0.block.self_attn.o_proj.weight": "attention",
    "depths.0.block.mlp.gate_proj.weight": "mlp",
    "depths.0.block.mlp.down_proj.weight": "mlp",
    "depths.0.block.mlp.shared_expert.up_proj.weight": "mlp",
    "depths.0.block.mlp.shared_experts.gate_proj.weight": "mlp",
    "depths.0.block.mlp.gate.weight": "router",
    "depths.0.block.mlp.shared_expert_gate.weight": "router",
    "depths.0.block.mlp.experts.gate_up_proj": "experts",
    "depths.0.block.mlp.experts.down_proj": "experts",
    "depths.0.block.mlp.gate.e_score_correction_bias": None,
    "depths.0.block.self_attn.indexer.wq_b.weight": None,
    "depths.0.block.self_attn.indexer.k_norm.weight": None,
    "depths.0.block.self_attn.indexer.k_norm.bias": None,
}

HELD = {
    family: set(GROUPS) - {"lm_head"} if family in WITH_EXPERTS else {"fusion", "attention", "mlp", "norms"}
    for family in FAMILIES
}
"""Groups that a family's head has."""

BIAS = "depths.0.block.mlp.gate.e_score_correction_bias"
WITH_BIAS = [name for name in FAMILIES if any(rule.endswith("correction_bias") for rule in get_family(name).templates)]
WITH_INDEXER = [name for name in FAMILIES if any(".indexer." in rule for rule in get_family(name).templates)]


def meta_head(family: str, **fields: Any) -> DraftHead:
    return DraftHead(get_family(family), ModelConfig(config_of(family, **fields), Path("config.json")), device="meta")


# Which tensor is in which group


@pytest.mark.parametrize("name", TABLE)
def test_a_tensor_is_in_the_group_of_the_table(name: str) -> None:
    assert group_of(name) == TABLE[name]


@pytest.mark.parametrize("name", ["depths.0.block.mamba.in_proj.weight", "rotary.inv_freq", "depths.0.bias"])
def test_a_name_of_no_known_kind_is_not_guessed(name: str) -> None:
    with pytest.raises(LookupError, match=name):
        group_of(name)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_a_family_has_a_group_or_is_never_trained(family: str) -> None:
    groups = {name: group_of(name) for name in meta_head(family).weights()}
    frozen = {name for name, group in groups.items() if group is None}
    assert {group for group in groups.values() if group} == HELD[family]
    assert all(".indexer." in name or name.endswith("e_score_correction_bias") for name in frozen)
    assert any(".indexer." in name for name in frozen) is (family in WITH_INDEXER)
    assert (BIAS in frozen) is (family in WITH_BIAS)


def test_families_with_a_frozen_part_are_those_that_publish_one() -> None:
    assert WITH_BIAS == ["deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"]
    assert WITH_INDEXER == ["deepseek_v32", "glm_moe_dsa"]


# What trains


def trained(head: DraftHead) -> set[str]:
    return {name for name, parameter in head.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("family", FAMILIES)
def test_by_default_all_groups_train_and_nothing_outside_them(family: str) -> None:
    head = meta_head(family)
    assert trained(head) == {name for name, _ in head.named_parameters() if group_of(name)}


@pytest.mark.parametrize(
    ("family", "group"), [(family, group) for family in FAMILIES for group in GROUPS if group in HELD[family]]
)
def test_one_group_trains_alone_and_all_come_back(family: str, group: Any) -> None:
    head = meta_head(family)
    everything = trained(head)
    head.train_only([group])
    assert trained(head) == {name for name in everything if group_of(name) == group}
    assert {id(p) for p in head.trainable_parameters()} == {id(dict(head.named_parameters())[n]) for n in trained(head)}
    head.train_only(GROUPS)
    assert trained(head) == everything


@pytest.mark.parametrize("groups", [["fusion"], ["experts", "router"], ["norms", "attention", "mlp"]])
def test_the_groups_asked_for_are_all_that_an_optimiser_moves(groups: list[Any], tmp_path: Path) -> None:
    """https://github.com/vllm-project/speculators/pull/593: also weight decay leaves the rest alone."""
    base = write(tmp_path / "base", plain_form("glm4_moe_lite"))
    head = load_head(base, target=mz.load_shared(base), dtype=torch.float32, trainable=groups)
    before = {name: value.detach().clone() for name, value in head.weights().items()}
    step(head, decay=0.1)
    moved = {name for name, value in head.weights().items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if group_of(name) in groups}


def step(head: DraftHead, *, decay: float = 0.0, steps: int = 2) -> None:
    """A few AdamW steps through the chain."""
    optimizer = torch.optim.AdamW(head.trainable_parameters(), lr=1e-2, weight_decay=decay)
    objective = mz.MTPObjective(head, depths=2, loss="ce")
    tokens = mz.TokenBatch.all_tokens(torch.randint(512, (2, 9)))
    hidden = torch.randn(2, 9, head.hidden_size)
    for _ in range(steps):
        objective(tokens, hidden).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("family", "groups"),
    [
        ("qwen3_5", ["experts"]),
        ("qwen3_5", ["experts", "router"]),
        ("qwen3_5", []),
        ("qwen3_5", ["fusions"]),
        ("deepseek_v3", ["fusion", "indexer"]),
    ],
)
def test_a_group_that_is_none_or_a_choice_of_nothing_is_refused(family: str, groups: list[Any], tmp_path: Path) -> None:
    held = [group for group in GROUPS if group in HELD[family]]
    head = meta_head(family)
    before = trained(head)
    with pytest.raises(SettingsError) as caught:
        head.train_only(groups)
    assert f"expected groups of {held}, got {groups}" in str(caught.value)
    assert trained(head) == before
    with pytest.raises(SettingsError):
        load_head(write(tmp_path, plain_form(family)), trainable=groups)


def test_a_group_that_a_head_lacks_may_be_named_beside_one_that_it_has() -> None:
    head = meta_head("qwen3_5")
    head.train_only(["fusion", "experts"])
    assert trained(head) == {"depths.0.eh_proj.weight"}


# What is never rounded


def bits(value: Tensor) -> bytes:
    return value.detach().contiguous().view(torch.uint8).numpy().tobytes()


def odd_bias(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Bias entries that BF16 can't hold."""
    (name,) = (n for n in tensors if n.startswith("model.layers.2.") and n.endswith("correction_bias"))
    return {**tensors, name: torch.arange(8.0) / 3 + 1e-4}


@pytest.mark.parametrize("family", WITH_BIAS)
def test_the_routers_bias_keeps_every_bit_through_casts_training_and_export(family: str, tmp_path: Path) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/8358, https://github.com/ISEEKYAN/Megatron-LM/pull/81"""
    config, tensors = make(plain_form(family))
    tensors = odd_bias(tensors)
    base = write_checkpoint(tmp_path / "base", config, tensors)
    expected = bits(torch.arange(8.0) / 3 + 1e-4)
    head = load_head(base, target=mz.load_shared(base), dtype=torch.bfloat16)
    assert head.weights()["depths.0.eh_proj.weight"].dtype == torch.bfloat16
    for cast in (lambda h: h, lambda h: h.to(torch.bfloat16), lambda h: h.half(), lambda h: h.to(torch.bfloat16)):
        assert bits(cast(head).weights()[BIAS]) == expected
    step(head, decay=0.1)
    assert bits(head.weights()[BIAS]) == expected
    assert BIAS in head.state_dict()
    mz.export(head, base=base, out=tmp_path / "one", dtype=torch.bfloat16)
    mz.export(load_head(tmp_path / "one"), base=tmp_path / "one", out=tmp_path / "two")
    first, second = stored(tmp_path / "one"), stored(tmp_path / "two")
    assert bits(first["model.layers.2.mlp.gate.e_score_correction_bias"]) == expected
    assert same(first, second, first)
    changed = {name for name in tensors if not same(first, tensors, [name])}
    assert changed <= set(head_of(family, tensors))
    assert "model.layers.2.eh_proj.weight" in changed


def test_what_is_stored_in_less_than_fp32_is_cast_up_and_not_down(tmp_path: Path) -> None:
    """A converted checkpoint may hold the bias in BF16: FP32 is exact, FP16 would not be."""
    config, tensors = make(plain_form("glm4_moe"))
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    tensors[name] = (torch.arange(8.0) * 1e5).bfloat16()
    base = write_checkpoint(tmp_path, config, tensors)
    assert load_head(base).weights()[BIAS].dtype == torch.bfloat16
    up = load_head(base, dtype=torch.float32).weights()[BIAS]
    assert torch.equal(up, tensors[name].float())
    half = load_head(base).to(torch.float16)
    assert half.weights()["depths.0.eh_proj.weight"].dtype == torch.float16
    assert torch.equal(half.weights()[BIAS].float(), tensors[name].float())


@pytest.mark.parametrize("family", WITH_INDEXER)
def test_the_indexer_takes_no_gradient_and_comes_out_as_it_went_in(family: str, tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/pull/46600: known, not used here, written back untouched."""
    base = write(tmp_path / "base", plain_form(family))
    head = load_head(base, target=mz.load_shared(base), dtype=torch.float32)
    step(head, decay=0.1)
    mz.export(head, base=base, out=tmp_path / "out")
    before, after = stored(base), stored(tmp_path / "out")
    names = [name for name in head_of(family, before) if ".indexer." in name]
    assert len(names) == 5
    assert same(after, before, names)
    assert all(p.grad is None for n, p in head.named_parameters() if ".indexer." in n)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cast_head_casts_what_trains(family: str, tmp_path: Path) -> None:
    """Save for the router of sigmoid scores, which transformers computes in FP32."""
    head = load_head(write(tmp_path, Form(family, plain_form(family).experts)), dtype=torch.float32).to(torch.bfloat16)
    kept = {name for name, value in head.weights().items() if value.dtype == torch.float32}
    assert all(group_of(name) in (None, "router") for name in kept)
    assert {group_of(name) for name in head.weights().keys() - kept} >= HELD[family] - {"router"}
