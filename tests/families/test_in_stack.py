"""Blocks of every registered family against transformers' own model, and what in-stack heads do otherwise, on purpose."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache

import mtp_zoo as mz
from mtp_zoo.acceptance import speculate
from mtp_zoo.corrections import LATENT_NORMS
from mtp_zoo.errors import ContextLimitError
from mtp_zoo.head import DraftHead
from mtp_zoo.modelconfig import ModelConfig
from mtp_zoo.registry import get_family
from mtp_zoo.shared import SharedTensors
from mtp_zoo.training.target import load_target
from mtp_zoo_conformance.cases import get_case
from mtp_zoo_conformance.tiny import randomised, write_checkpoint
from tests.stored_forms import FAMILIES, IN_STACK

FP32_ROUNDING = 1e-5
"""Two FP32 evaluations of one layer, outputs of order 1 to 10, relative: 1e-6 was measured."""

LATENT = ("deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa")
SPARSE = ("deepseek_v32", "glm_moe_dsa")
VARIANTS = [(case.family, variant) for case in map(get_case, FAMILIES) for variant in case.variants]
PATH = Path("tiny/config.json")


def text_of(family: str, **fields: Any) -> dict[str, Any]:
    return {**copy.deepcopy(dict(get_case(family).variants[0].text_config)), **fields}


def head_of(family: str, **fields: Any) -> DraftHead:
    """A head with random weights, attached."""
    text = text_of(family, **fields)
    head = DraftHead(get_family(family), ModelConfig(text, PATH))
    head.factory.initialise(head)
    with torch.no_grad():
        for value in head.weights().values():
            value.copy_(randomised(value))
    vocab = text["vocab_size"]
    embedding, lm_head = nn.Embedding(vocab, head.hidden_size), nn.Linear(head.hidden_size, vocab, bias=False)
    return head.attach(SharedTensors(embedding.requires_grad_(False), lm_head.requires_grad_(False)))


def auto_config(text: dict[str, Any]) -> Any:
    """The config that transformers makes of a config.json; it writes into what it is given."""
    fields = {key: value for key, value in copy.deepcopy(text).items() if key not in ("model_type", "architectures")}
    return transformers.AutoConfig.for_model(text["model_type"], **fields)


class Layer(NamedTuple):
    """A target's last layer, and what went through it."""

    module: nn.Module
    entering: Tensor
    leaving: Tensor


def target_layer(text: dict[str, Any], ids: Tensor) -> Layer:
    """Run transformers' model of a config with random weights; its last layer has experts, and full attention."""
    config = auto_config(text)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for tensor in (*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("correction_bias"))):
        tensor.copy_(randomised(tensor))
    module = model.model.layers[-1]
    for name in LATENT_NORMS:
        norm = getattr(module.self_attn, name, None) if hasattr(module, "self_attn") else None
        if norm is not None:  # the one difference on purpose, tested by itself below
            norm.variance_epsilon = config.rms_norm_eps
    seen: list[Any] = []
    module.register_forward_hook(lambda _, inputs, out: seen.extend((inputs[0], out)))
    model(ids, use_cache=False)
    return Layer(module, seen[0], seen[1][0] if isinstance(seen[1], tuple) else seen[1])


def run_block(head: DraftHead, module: nn.Module, entering: Tensor) -> Tensor:
    """Our block with that layer's weights."""
    block = head.depths[0].get_submodule("block")
    block.load_state_dict(module.state_dict())
    seq = entering.shape[1]
    positions = torch.arange(seq)[None]
    mask = torch.ones(1, 1, seq, seq, dtype=torch.bool).tril()
    with torch.no_grad():
        return head.factory.run(block, entering, head.rotary(entering, positions), positions, mask=mask)


# The block is transformers' own


@pytest.mark.parametrize(("family", "variant"), VARIANTS, ids=[f"{f}-{v.name}" for f, v in VARIANTS])
def test_a_block_computes_what_the_layer_of_transformers_own_model_does(family: str, variant: Any) -> None:
    """The whole way round: config.json through AutoConfig, RoPE by the model, eager attention, a loop over experts."""
    text = dict(variant.text_config)
    layer = target_layer(text, torch.arange(3, 40)[None])
    head = DraftHead(get_family(family), ModelConfig(text, PATH))
    ours = run_block(head, layer.module, layer.entering)
    scale = layer.leaving.abs().max()
    assert (ours - layer.leaving).abs().max() / scale < FP32_ROUNDING
    assert (layer.entering - layer.leaving).abs().max() / scale > 0.05


@pytest.mark.parametrize(("family", "variant"), VARIANTS, ids=[f"{f}-{v.name}" for f, v in VARIANTS])
def test_rope_settings_are_those_that_autoconfig_reads(family: str, variant: Any) -> None:
    """https://github.com/sgl-project/sglang/pull/14745: yarn, partial rotary, base frequency, wherever config.json has them."""
    text = dict(variant.text_config)
    theirs = auto_config(text)
    head = DraftHead(get_family(family), ModelConfig(text, PATH), device="meta")
    ours = head.factory.config
    types = get_family(family).block.layer_type
    assert settings(ours.rope_parameters, types) == settings(theirs.rope_parameters, types)
    rotary = get_family(family).block.load_class(get_family(family).block.rotary)(theirs)
    positions = torch.tensor([[0, 1, 5, 100, 2000]])
    for mine, expected in zip(head.rotary(torch.zeros(1), positions), rotary(torch.zeros(1), positions), strict=True):
        assert torch.equal(mine, expected)


def settings(rope: Any, layer_type: str | None) -> dict[str, Any]:
    """RoPE parameters of one layer type, defaults left out."""
    plain = dict(rope.get(layer_type, rope)) if layer_type else dict(rope)
    plain.pop("type", None)
    return {key: value for key, value in plain.items() if (key, value) != ("partial_rotary_factor", 1.0)}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("deepseek_v3", {"rope_theta": 5e4}),
        ("deepseek_v3", {"rope_scaling": None}),
        ("deepseek_v3", {"rope_interleave": False}),
        ("deepseek_v32", {"rope_scaling": None}),
        ("glm4_moe", {"partial_rotary_factor": 1.0}),
        ("glm4_moe_lite", {"rope_theta": 5e4}),
        ("glm_moe_dsa", {"rope_parameters": {"rope_theta": 5e4, "rope_type": "default"}}),
    ],
)
def test_a_block_under_another_rope_setting_is_another_block(family: str, fields: dict[str, Any]) -> None:
    """So that the agreement above means something."""
    layer = target_layer(text_of(family), torch.arange(3, 40)[None])
    head = DraftHead(get_family(family), ModelConfig(text_of(family, **fields), PATH))
    difference = (run_block(head, layer.module, layer.entering) - layer.leaving).abs().max() / layer.leaving.abs().max()
    assert difference > 100 * FP32_ROUNDING


# Latent norms


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-3])
@pytest.mark.parametrize("family", LATENT)
def test_latent_norms_use_the_epsilon_of_the_config(family: str, eps: float) -> None:
    """vLLM 0.32.0 and SGLang 0.5.23 build them with `rms_norm_eps`, transformers with 1e-6."""
    head = head_of(family, rms_norm_eps=eps)
    attention = head.get_submodule("depths.0.block.self_attn")
    for name in LATENT_NORMS:
        norm = attention.get_submodule(name)
        assert norm.variance_epsilon == eps
        x = 1e-3 * torch.randn(4, norm.weight.numel(), dtype=torch.float64)
        expected = x * norm.weight.double() / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        with torch.no_grad():
            torch.testing.assert_close(norm(x.float()).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", LATENT)
def test_a_target_that_is_loaded_to_train_with_norms_its_latents_alike(family: str, tmp_path: Path) -> None:
    """Else a head would be trained on other states than it is served."""
    case = get_case(family)
    variant = dataclasses.replace(case.variants[0], config={**case.variants[0].config, "rms_norm_eps": 1e-4})
    target = load_target(write_checkpoint(case, variant, tmp_path), dtype=torch.float32)
    found = {name: module.variance_epsilon for name, module in target.named_modules() if name.endswith(LATENT_NORMS)}
    assert len(found) == 2 * target.config.num_hidden_layers
    assert set(found.values()) == {1e-4}


@pytest.mark.parametrize("family", IN_STACK)
def test_other_norms_use_it_too(family: str) -> None:
    head = head_of(family, rms_norm_eps=1e-3)
    found = {
        name: module.variance_epsilon for name, module in head.named_modules() if hasattr(module, "variance_epsilon")
    }
    assert set(found.values()) == {1e-3}
    outer = {"depths.0.enorm", "depths.0.hnorm", "depths.0.norm", "depths.0.block.input_layernorm"}
    assert outer <= found.keys()


# Sparse attention: dense, and exact up to index_topk


@pytest.mark.parametrize("family", SPARSE)
def test_dense_attention_is_the_sparse_one_up_to_index_topk_and_not_beyond(family: str) -> None:
    """transformers' own layer runs the indexer; on the same states ours does not."""
    ids = torch.arange(3, 43)[None]
    text = text_of(family, index_topk=ids.shape[1])
    layer = target_layer(text, ids)
    ours = run_block(DraftHead(get_family(family), ModelConfig(text, PATH)), layer.module, layer.entering)
    scale = layer.leaving.abs().max()
    assert (ours - layer.leaving).abs().max() / scale < FP32_ROUNDING
    few = text_of(family, index_topk=8)
    layer = target_layer(few, ids)
    ours = run_block(DraftHead(get_family(family), ModelConfig(few, PATH)), layer.module, layer.entering)
    difference = (ours - layer.leaving).abs().amax(-1)[0] / scale
    assert difference[:8].max() < FP32_ROUNDING
    assert difference[8:].max() > 1000 * FP32_ROUNDING


@pytest.mark.parametrize(("length", "depths", "fits"), [(16, 1, True), (17, 1, False), (14, 3, True), (15, 3, False)])
@pytest.mark.parametrize("family", SPARSE)
def test_a_rollout_beyond_index_topk_is_refused(family: str, length: int, depths: int, fits: bool) -> None:
    """The slots of depth 3 stand two positions further."""
    head = head_of(family, index_topk=16)
    tokens = mz.TokenBatch.all_tokens(torch.randint(512, (1, length)))
    hidden = torch.randn(1, length, head.hidden_size)
    if fits:
        assert len(head(tokens, hidden, depths=depths)) == depths
        return
    with pytest.raises(ContextLimitError, match=r"at most 16 tokens \('index_topk'\), got 17"):
        head(tokens, hidden, depths=depths)


@pytest.mark.parametrize("family", SPARSE)
def test_packed_documents_each_have_the_limit_for_themselves(family: str) -> None:
    head = head_of(family, index_topk=16)
    rows = [{"input_ids": list(range(5, 19)), "labels": list(range(5, 19))} for _ in range(2)]
    ids = torch.tensor([rows[0]["input_ids"] + rows[1]["input_ids"]])
    tokens = mz.TokenBatch.from_labels(input_ids=ids, labels=ids, position_ids=torch.arange(14).repeat(2)[None])
    assert len(head(tokens, torch.randn(1, 28, head.hidden_size), depths=3)) == 3


@pytest.mark.parametrize("family", SPARSE)
def test_drafting_beyond_index_topk_is_refused(family: str) -> None:
    head = head_of(family, index_topk=16)
    cache = DynamicCache(config=head.factory.config)
    hidden = torch.randn(1, 16, head.hidden_size)
    state = head.draft_step(torch.randint(512, (1, 16)), hidden, torch.arange(16)[None], cache=cache)
    with pytest.raises(ContextLimitError, match="got 17"):
        head.draft_step(torch.tensor([[3]]), state.recycled[:, -1:], torch.tensor([[16]]), cache=cache, depth=2)


@pytest.mark.parametrize("family", SPARSE)
def test_a_draft_loop_beyond_index_topk_is_refused(family: str) -> None:
    config = auto_config(text_of(family, index_topk=16))
    target = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    head = head_of(family, index_topk=16).attach(target)
    with pytest.raises(ContextLimitError):
        speculate(target, head, [list(range(3, 15))], k=2, max_new_tokens=12)


@pytest.mark.parametrize("family", [family for family in IN_STACK if family not in SPARSE])
def test_other_families_have_no_limit(family: str) -> None:
    head = head_of(family, index_topk=4)
    tokens = mz.TokenBatch.all_tokens(torch.randint(512, (1, 40)))
    assert len(head(tokens, torch.randn(1, 40, head.hidden_size), depths=2)) == 2
