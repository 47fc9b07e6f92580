"""The cases of DeepSeek-V3 and the GLM line: our head against plain torch under every reader's conventions, flip by flip."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mtp_zoo.spec import Engine
from mtp_zoo_conformance import compare, ours
from mtp_zoo_conformance.cases import get_case
from mtp_zoo_conformance.flips import CONVENTIONS
from mtp_zoo_conformance.prepared import Prepared, prepare
from mtp_zoo_conformance.tiers.judged import Judge, our_outputs

PLAIN = Judge("reference", "0", "forward")
BOUNDS = compare.fp32_tolerances("reference")

RECYCLED = {
    "deepseek_v3": {None: "post_norm", "vllm": "post_norm", "sglang": "post_norm"},
    "deepseek_v32": {None: "post_norm", "vllm": "post_norm", "sglang": "post_norm"},
    "glm4_moe": {None: "post_norm", "vllm": "pre_norm", "sglang": "post_norm"},
    "glm4_moe_lite": {None: "post_norm", "vllm": "pre_norm", "sglang": "post_norm"},
    "glm_moe_dsa": {None: "post_norm", "vllm": "post_norm", "sglang": "post_norm"},
}
ZEROED = {None: False, "vllm": True, "sglang": False}

FIRST = {
    "fuse_order": "fusion",
    "recycle": "recycle",
    "position_rule": "attention",
    "zero_first_embedding": "embedding_norm",
    "norm_weight": "embedding_norm",
    "rotary_base": "attention",
    "rotary_pairs": "attention",
    "yarn_mscale": "attention",
    "latent_norm_eps": "attention",
    "qk_norm": "attention",
    "qkv_bias": "attention",
    "kv_heads": "attention",
    "router_bias": "mlp",
    "router_bias_in_shares": "mlp",
    "router_scaling": "mlp",
    "router_normalisation": "mlp",
    "router_groups": "mlp",
    "shared_expert": "mlp",
    "packing": "mlp",
    "expert_order": "mlp",
}
"""Flip -> the stage that must be the first to show it."""
FLIPS = [
    pytest.param(family, name, id=f"{family}-{name}")
    for family in RECYCLED
    for name in (*list(FIRST)[:4], *(flip.name for flip in get_case(family).flips))
]


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Prepared, dict[str, Tensor]]]:
    """Family -> its first variant, and its tensors."""
    found: dict[str, tuple[Prepared, dict[str, Tensor]]] = {}
    for family in RECYCLED:
        case = get_case(family)
        made = prepare(case, case.variants[0], tmp_path_factory.mktemp(family))
        found[family] = (made, load_file(made.checkpoint / "model.safetensors"))
    return found


@pytest.fixture(scope="module")
def plain(variants: Mapping[str, tuple[Prepared, dict[str, Tensor]]]) -> Mapping[str, Mapping[str, Tensor]]:
    """Family -> what plain torch gives, under the conventions of training."""
    return {
        family: made.case.reference(tensors, made.variant.text_config, made.requests)
        for family, (made, tensors) in variants.items()
    }


@pytest.mark.parametrize("engine", [None, "vllm", "sglang"])
@pytest.mark.parametrize("family", RECYCLED)
def test_our_head_is_plain_torch_under_each_readers_conventions(
    family: str, engine: Engine | None, variants: Mapping[str, tuple[Prepared, dict[str, Tensor]]]
) -> None:
    made, tensors = variants[family]
    reference: Any = partial(made.case.reference, tensors, made.variant.text_config, made.requests)
    theirs = reference(recycle=RECYCLED[family][engine], zero_first_embedding=ZEROED[engine])
    head = ours.load(made.case, made.checkpoint, engine=engine)
    mine = ours.run(head, made.requests, theirs["drafts"], made.case.stages)
    found = compare.differences(mine, theirs, made.requests, BOUNDS)
    assert {difference.stage for difference in found} == {*made.case.stages, "recycle", "logits", "rollout"}
    assert compare.first_miss(found) is None


@pytest.mark.parametrize(("family", "name"), FLIPS)
def test_a_flip_is_caught_at_its_own_stage(
    family: str,
    name: str,
    variants: Mapping[str, tuple[Prepared, dict[str, Tensor]]],
    plain: Mapping[str, Mapping[str, Tensor]],
) -> None:
    made, _ = variants[family]
    (flip,) = (flip for flip in (*CONVENTIONS, *made.case.flips) if flip.name == name)
    mine = our_outputs(made, PLAIN, plain[family], dtype=torch.float32, flip=flip)
    miss = compare.first_miss(compare.differences(mine, plain[family], made.requests, BOUNDS))
    assert miss is not None
    step = "step2" if name == "position_rule" else "prefill"
    assert re.fullmatch(rf"{FIRST[name]} by .* \({step}, .*\)", str(miss))


@pytest.mark.parametrize("family", RECYCLED)
def test_a_flip_named_here_is_in_the_case(family: str) -> None:
    """What each family's attention and router can get wrong, by hand: a case that forgets one would test less, in silence."""
    latent = family != "glm4_moe"
    own = {"rotary_pairs", "rotary_base", "router_bias", "router_scaling", "router_normalisation", "shared_expert"}
    own |= {"norm_weight", "packing", "expert_order", "router_bias_in_shares"}
    own |= {"router_groups", "yarn_mscale"} if family.startswith("deepseek") else set()
    own |= {"latent_norm_eps"} if latent and family.startswith("glm") else set()
    own |= set() if latent else {"qk_norm", "qkv_bias", "kv_heads"}
    assert {flip.name for flip in get_case(family).flips} == own


@pytest.mark.parametrize("family", RECYCLED)
def test_the_routers_bias_turns_some_choices_and_not_all(
    family: str, variants: Mapping[str, tuple[Prepared, dict[str, Tensor]]]
) -> None:
    made, tensors = variants[family]
    bias = tensors["model.layers.2.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    scores = (x @ tensors["model.layers.2.mlp.gate.weight"].float().T).sigmoid()
    top = made.variant.text_config["num_experts_per_tok"]
    alone, biased = (s.topk(top).indices.sort().values for s in (scores, scores + bias))
    turned = (alone != biased).any(1).float().mean()
    assert 0.2 < turned < 0.99


@pytest.mark.parametrize("family", RECYCLED)
def test_copies_are_the_targets_own_tensors(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    case = get_case(family)
    (variant,) = (variant for variant in case.variants if variant.name == "copies")
    tensors = load_file(prepare(case, variant, tmp_path_factory.mktemp("copies")).checkpoint / "model.safetensors")
    assert torch.equal(tensors["model.layers.2.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    assert torch.equal(tensors["model.layers.2.shared_head.head.weight"], tensors["lm_head.weight"])
