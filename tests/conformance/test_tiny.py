"""Tiny checkpoints: real names, no trivial weight, the same bytes from the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mtp_zoo_conformance.case import ConformanceCase, Variant
from mtp_zoo_conformance.cases import get_case, list_cases
from mtp_zoo_conformance.prepared import prepare
from mtp_zoo_conformance.tiny import target_model

TRIVIAL = 0.002
"""Standard deviation below which a tensor might as well be constant; half of that of the smallest, drawn small on purpose."""

VARIANTS = [
    pytest.param(case, variant, id=f"{case.family}-{variant.name}")
    for case in list_cases()
    for variant in case.variants
]


@pytest.mark.parametrize(("case", "variant"), VARIANTS)
def test_no_tensor_of_a_checkpoint_is_trivial(case: ConformanceCase, variant: Variant, tmp_path: Path) -> None:
    made = prepare(case, variant, tmp_path)
    tensors = load_file(made.checkpoint / "model.safetensors")
    assert {name: value.numel() for name, value in tensors.items() if value.float().std() < TRIVIAL} == {}
    assert json.loads((made.checkpoint / "config.json").read_text()) == dict(variant.config)
    assert set(case.shapes_of(variant)) <= set(tensors)
    assert any(name.startswith(variant.prefix) for name in tensors)


def test_the_same_seed_makes_the_same_file(tmp_path: Path) -> None:
    (case,) = (case for case in list_cases() if case.family == "qwen3_5")
    first, again = (prepare(case, case.variants[0], tmp_path / name) for name in "ab")
    a, b = (load_file(made.checkpoint / "model.safetensors") for made in (first, again))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_making_a_target_leaves_the_cases_config_as_it_was() -> None:
    """transformers writes a base frequency into the RoPE settings that it is given; config.json would hold it twice."""
    config = {**get_case("deepseek_v3").variants[0].text_config}
    before = json.dumps(config)
    target_model("DeepseekV3ForCausalLM", config, seed=0)
    assert json.dumps(config) == before
    assert "rope_theta" not in config["rope_scaling"]
