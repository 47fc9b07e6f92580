"""Qwen3.5 with experts, and Qwen3-Next: published tables, and how experts run.

The forward pass, its flips and the engines are the conformance tiers'.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mtp_zoo as mz
from mtp_zoo.errors import HeadMismatchError, HeadNotFoundError
from mtp_zoo.head import DraftHead
from mtp_zoo.keymap import LoadPlan
from mtp_zoo.loader import key_map
from mtp_zoo.modelconfig import ModelConfig
from mtp_zoo.registry import get_family, resolve
from mtp_zoo_conformance.cases import get_case
from mtp_zoo_conformance.prepared import Prepared, prepare
from tests.key_maps import Info

FAMILIES = ("qwen3_5_moe", "qwen3_next")
GROUPED_ROUNDING = 1e-5
"""One grouped product against a loop over experts, FP32, outputs of order 1."""

PATH = Path("org/model/config.json")

TEXT: dict[str, Any] = {
    "hidden_size": 2048,
    "head_dim": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "num_hidden_layers": 40,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "vocab_size": 248320,
}
ROPE = {"partial_rotary_factor": 0.25, "rope_theta": 1e7}
QWEN3_6_35B = {**TEXT, "model_type": "qwen3_5_moe_text", "mtp_num_hidden_layers": 1, "rope_parameters": ROPE}
QWEN3_NEXT_80B = {**TEXT, **ROPE, "model_type": "qwen3_next", "num_experts": 512, "num_experts_per_tok": 10}

OUTSIDE_EXPERTS: dict[str, tuple[int, ...]] = {
    "mtp.fc.weight": (2048, 4096),
    "mtp.norm.weight": (2048,),
    "mtp.pre_fc_norm_embedding.weight": (2048,),
    "mtp.pre_fc_norm_hidden.weight": (2048,),
    "mtp.layers.0.input_layernorm.weight": (2048,),
    "mtp.layers.0.post_attention_layernorm.weight": (2048,),
    "mtp.layers.0.self_attn.q_proj.weight": (8192, 2048),
    "mtp.layers.0.self_attn.k_proj.weight": (512, 2048),
    "mtp.layers.0.self_attn.v_proj.weight": (512, 2048),
    "mtp.layers.0.self_attn.o_proj.weight": (2048, 4096),
    "mtp.layers.0.self_attn.q_norm.weight": (256,),
    "mtp.layers.0.self_attn.k_norm.weight": (256,),
    "mtp.layers.0.mlp.shared_expert.gate_proj.weight": (512, 2048),
    "mtp.layers.0.mlp.shared_expert.up_proj.weight": (512, 2048),
    "mtp.layers.0.mlp.shared_expert.down_proj.weight": (2048, 512),
    "mtp.layers.0.mlp.shared_expert_gate.weight": (1, 2048),
}
PACKED = {
    "mtp.layers.0.mlp.gate.weight": (256, 2048),
    "mtp.layers.0.mlp.experts.gate_up_proj": (256, 1024, 2048),
    "mtp.layers.0.mlp.experts.down_proj": (256, 2048, 512),
}
ONE_BY_ONE = {
    "mtp.layers.0.mlp.gate.weight": (512, 2048),
    **{
        f"mtp.layers.0.mlp.experts.{number}.{name}.weight": shape
        for number in range(512)
        for name, shape in (("gate_proj", (512, 2048)), ("up_proj", (512, 2048)), ("down_proj", (2048, 512)))
    },
}
TABLES = {
    "Qwen3.6-35B-A3B": (QWEN3_6_35B, {**OUTSIDE_EXPERTS, **PACKED}, 19),
    "Qwen3-Next-80B-A3B": (QWEN3_NEXT_80B, {**OUTSIDE_EXPERTS, **ONE_BY_ONE}, 1553),
}


def plan(text: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> LoadPlan:
    config = ModelConfig(dict(text), PATH)
    stored = [Info(name, "BF16", shape) for name, shape in shapes.items()]
    resolution = resolve([info.name for info in stored], config)
    return key_map(DraftHead(resolution.family, config, depths=resolution.depths, device="meta")).plan(stored)


@pytest.mark.parametrize("model", TABLES)
def test_the_published_tables_are_claimed_exactly(model: str) -> None:
    text, shapes, count = TABLES[model]
    found = plan(text, shapes)
    assert found.natives == tuple(sorted(shapes))
    assert (len(found.natives), found.skipped) == (count, {})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"mtp.layers.0.mlp.experts.7.up_proj.weight": None}, "missing: mtp.layers.0.mlp.experts.7.up_proj.weight"),
        (
            {"mtp.layers.0.mlp.experts.512.up_proj.weight": (512, 2048)},
            "unexpected: mtp.layers.0.mlp.experts.512.up_proj",
        ),
        ({"mtp.layers.0.mlp.experts.0.down_proj.weight": (512, 2048)}, "shape: mtp.layers.0.mlp.experts.0.down_proj"),
        ({"mtp.layers.0.mlp.experts.down_proj": (512, 2048, 512)}, "ambiguous: depths.0.block.mlp.experts.down_proj"),
    ],
    ids=["one expert is gone", "one too many", "one lies the other way", "both forms"],
)
def test_damaged_experts_are_named(change: dict[str, tuple[int, ...] | None], problem: str) -> None:
    text, shapes, _ = TABLES["Qwen3-Next-80B-A3B"]
    damaged = {name: shape for name, shape in {**shapes, **change}.items() if shape is not None}
    with pytest.raises(HeadMismatchError) as caught:
        plan(text, damaged)
    assert any(str(found).startswith(problem) for found in caught.value.problems)


def test_a_config_that_declares_a_head_without_tensors_is_refused() -> None:
    """As checkpoints that transformers or a pruning tool saved: one layer declared, none stored."""
    with pytest.raises(HeadNotFoundError, match="'mtp_num_hidden_layers' declares 1, and none of its"):
        resolve(["model.embed_tokens.weight", "lm_head.weight"], ModelConfig(dict(QWEN3_6_35B), PATH))


@pytest.fixture(scope="module", params=[("qwen3_5_moe", "single"), ("qwen3_5_moe", "packed"), ("qwen3_next", "untied")])
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    family, name = request.param
    case = get_case(family)
    (variant,) = (variant for variant in case.variants if variant.name == name)
    return prepare(case, variant, tmp_path_factory.mktemp(f"{family}-{name}"))


def test_experts_run_in_one_grouped_product(prepared: Prepared) -> None:
    head = mz.load_head(prepared.checkpoint, dtype=torch.float32)
    experts: Any = head.get_submodule("depths.0.block.mlp.experts")
    assert experts.config._experts_implementation == "grouped_mm"
    states, hidden = torch.randn(2, 1, 9, head.hidden_size)
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()

    def out() -> Tensor:
        with torch.no_grad():
            return head.run_depth(1, states, hidden, torch.arange(9)[None], mask=mask).normed

    grouped = out()
    head.factory.config._experts_implementation = "eager"
    assert (grouped - out()).abs().max() < GROUPED_ROUNDING


def test_what_is_never_quantised_names_real_tensors() -> None:
    for family in FAMILIES:
        config = ModelConfig(dict(get_case(family).variants[0].config), PATH)
        names = list(DraftHead(get_family(family), config, device="meta").weights())
        suffixes = get_family(family).spec.always_float
        assert all(any(name.endswith(suffix) for name in names) for suffix in suffixes)
        quantised = [name for name in names if not name.endswith(suffixes)]
        assert [name for name in quantised if "norm" in name or "gate.weight" in name] == []


def test_the_two_families_are_told_apart_by_their_model_type() -> None:
    names = list(TABLES["Qwen3-Next-80B-A3B"][1])
    for text, family in ((QWEN3_NEXT_80B, "qwen3_next"), ({**QWEN3_6_35B, "num_experts": 512}, "qwen3_5_moe")):
        assert resolve(names, ModelConfig(dict(text), PATH)).family.name == family
    assert json.dumps(QWEN3_NEXT_80B).count("mtp") == 0
