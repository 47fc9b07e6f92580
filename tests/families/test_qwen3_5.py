"""Qwen3.5 dense: published tables, the block, and what each stored tensor means.

The whole layer is compared with plain torch, and with its conventions flipped, by the conformance tier forward.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Attention, Qwen3_5DecoderLayer, Qwen3_5RMSNorm

from mtp_zoo.blocks import ATTENTION
from mtp_zoo.errors import HeadMismatchError, ModelConfigError
from mtp_zoo.families.qwen3_5 import BLOCK, FAMILY
from mtp_zoo.head import DraftHead
from mtp_zoo.keymap import LoadPlan
from mtp_zoo.loader import key_map, load_head
from mtp_zoo.modelconfig import ModelConfig
from mtp_zoo.quantization import refuse_quantized
from mtp_zoo.registry import resolve
from tests.heads import tiny_head
from tests.key_maps import Info
from tests.tiny import LAYER_TENSORS, tiny_config, tiny_tensors, write_checkpoint

FP32_ROUNDING = 1e-5
"""Two FP32 evaluations of one layer, outputs of order 1, sums in different orders: 1e-6 was measured."""

PATH = Path("org/model/config.json")


# Published checkpoints


@dataclasses.dataclass(frozen=True)
class Published:
    """A released checkpoint: the dimensions in its config, and how it places them."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    tied: bool
    nested: bool

    @property
    def config(self) -> ModelConfig:
        text = {
            "model_type": "qwen3_5_text",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": 256,
            "num_hidden_layers": 24,
            "full_attention_interval": 4,
            "attn_output_gate": True,
            "output_gate_type": "swish",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "partial_rotary_factor": 0.25,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
            "tie_word_embeddings": self.tied,
            "vocab_size": 248320,
        }
        raw = {"model_type": "qwen3_5", "tie_word_embeddings": self.tied, "text_config": text} if self.nested else text
        return ModelConfig(raw, PATH)


BASE_0_8B = Published(hidden=1024, inner=3584, heads=8, kv_heads=2, tied=True, nested=True)
BIG_27B = Published(hidden=5120, inner=17408, heads=24, kv_heads=4, tied=False, nested=True)

TABLES: dict[str, tuple[Published, dict[str, tuple[int, ...]]]] = {
    "Qwen3.5-0.8B-Base": (
        BASE_0_8B,
        {
            "mtp.fc.weight": (1024, 2048),
            "mtp.norm.weight": (1024,),
            "mtp.pre_fc_norm_embedding.weight": (1024,),
            "mtp.pre_fc_norm_hidden.weight": (1024,),
            "mtp.layers.0.input_layernorm.weight": (1024,),
            "mtp.layers.0.post_attention_layernorm.weight": (1024,),
            "mtp.layers.0.self_attn.q_proj.weight": (4096, 1024),
            "mtp.layers.0.self_attn.k_proj.weight": (512, 1024),
            "mtp.layers.0.self_attn.v_proj.weight": (512, 1024),
            "mtp.layers.0.self_attn.o_proj.weight": (1024, 2048),
            "mtp.layers.0.self_attn.q_norm.weight": (256,),
            "mtp.layers.0.self_attn.k_norm.weight": (256,),
            "mtp.layers.0.mlp.gate_proj.weight": (3584, 1024),
            "mtp.layers.0.mlp.up_proj.weight": (3584, 1024),
            "mtp.layers.0.mlp.down_proj.weight": (1024, 3584),
        },
    ),
    "Qwen3.6-27B": (
        BIG_27B,
        {
            "mtp.fc.weight": (5120, 10240),
            "mtp.norm.weight": (5120,),
            "mtp.pre_fc_norm_embedding.weight": (5120,),
            "mtp.pre_fc_norm_hidden.weight": (5120,),
            "mtp.layers.0.input_layernorm.weight": (5120,),
            "mtp.layers.0.post_attention_layernorm.weight": (5120,),
            "mtp.layers.0.self_attn.q_proj.weight": (12288, 5120),
            "mtp.layers.0.self_attn.k_proj.weight": (1024, 5120),
            "mtp.layers.0.self_attn.v_proj.weight": (1024, 5120),
            "mtp.layers.0.self_attn.o_proj.weight": (5120, 6144),
            "mtp.layers.0.self_attn.q_norm.weight": (256,),
            "mtp.layers.0.self_attn.k_norm.weight": (256,),
            "mtp.layers.0.mlp.gate_proj.weight": (17408, 5120),
            "mtp.layers.0.mlp.up_proj.weight": (17408, 5120),
            "mtp.layers.0.mlp.down_proj.weight": (5120, 17408),
        },
    ),
}


def plan(published: Published, stored: list[Info], config: ModelConfig | None = None) -> LoadPlan:
    """What `load_head` decides before it reads, without files."""
    config = config or published.config
    resolution = resolve([info.name for info in stored], config)
    refuse_quantized(stored, config, "head")
    return key_map(DraftHead(resolution.family, config, depths=resolution.depths, device="meta")).plan(stored)


@pytest.mark.parametrize("model", TABLES)
def test_the_published_tables_are_claimed_exactly(model: str) -> None:
    published, shapes = TABLES[model]
    found = plan(published, [Info(name, "BF16", shape) for name, shape in shapes.items()])
    assert found.natives == tuple(sorted(shapes))
    assert found.skipped == {}
    assert set(found.dtypes.values()) == {"BF16"}


def test_the_head_of_one_size_is_refused_under_the_config_of_another() -> None:
    _, shapes = TABLES["Qwen3.5-0.8B-Base"]
    with pytest.raises(HeadMismatchError) as caught:
        plan(BIG_27B, [Info(name, "BF16", shape) for name, shape in shapes.items()])
    kinds = [str(problem).split(":")[0] for problem in caught.value.problems]
    assert kinds == ["shape"] * 13  # the norms of one attention head are 256 wide in both


# The block


def test_the_block_is_transformers_own_full_attention_layer_though_the_trunk_starts_with_linear_ones() -> None:
    head = tiny_head(layer_types=["linear_attention", "full_attention"])
    block = head.depths[0].get_submodule("block")
    assert type(block) is Qwen3_5DecoderLayer
    assert type(block.self_attn) is Qwen3_5Attention
    assert not hasattr(block, "linear_attn")
    assert block.self_attn.config._attn_implementation == ATTENTION
    assert sorted(name for name, _ in block.named_parameters()) == sorted(LAYER_TENSORS)


def test_what_is_never_quantised_names_real_tensors_and_every_norm() -> None:
    names = list(tiny_head().weights())
    floats = [name for name in names if name.endswith(FAMILY.spec.always_float)]
    assert all(any(name.endswith(suffix) for name in names) for suffix in FAMILY.spec.always_float)
    assert sorted(set(names) - set(floats)) == sorted(
        f"depths.0.block.{name}" for name in LAYER_TENSORS if name.endswith("_proj.weight")
    )


# Conventions


def run(head: DraftHead, embeddings: Tensor, hidden: Tensor) -> Tensor:
    positions = torch.arange(hidden.shape[1])[None]
    mask = torch.ones(1, 1, hidden.shape[1], hidden.shape[1], dtype=torch.bool).tril()
    with torch.no_grad():
        return head.run_depth(1, embeddings, hidden, positions, mask=mask).normed


@pytest.mark.parametrize("order", ["embed_hidden", "hidden_embed"])
def test_the_left_half_of_fc_takes_the_embedding_and_the_right_half_the_hidden_state(order: str) -> None:
    """https://github.com/sgl-project/sglang/issues/6423; under the other order the same weights do the opposite."""
    embeddings, hidden, other = torch.randn(3, 1, 4, 64)
    for silenced in (slice(0, 64), slice(64, 128)):
        head = tiny_head(spec={"fuse_order": order})
        with torch.no_grad():
            head.depths[0].get_submodule("eh_proj").weight[:, silenced] = 0
        out = run(head, embeddings, hidden)
        hears_embedding = not torch.equal(out, run(head, other, hidden))
        hears_hidden = not torch.equal(out, run(head, embeddings, other))
        left_silenced = silenced.start == 0
        assert (hears_embedding, hears_hidden) == (
            (not left_silenced, left_silenced) if order == "embed_hidden" else (left_silenced, not left_silenced)
        )


def test_norm_weights_are_offsets_from_one_in_all_seven_norms() -> None:
    """https://github.com/waybarrios/vllm-mlx/pull/400: a stored -0.44 is a gain of 0.56."""
    head = tiny_head()
    norms = [module for module in head.modules() if isinstance(module, Qwen3_5RMSNorm)]
    assert len(norms) == 7
    for norm in norms:
        nn.init.constant_(norm.weight, -0.44)
        x = torch.randn(5, norm.weight.numel(), dtype=torch.float64)
        expected = x * 0.56 / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        torch.testing.assert_close(norm(x.float()).double(), expected, rtol=FP32_ROUNDING, atol=FP32_ROUNDING)


def test_a_new_heads_norms_start_at_a_gain_of_one(tmp_path: Path) -> None:
    config = tiny_config()
    write_checkpoint(tmp_path, config, tiny_tensors(config, head_depths=0))
    head = load_head(tmp_path, init="random", dtype=torch.float32)
    norms = {name: value for name, value in head.weights().items() if name.endswith("norm.weight")}
    assert len(norms) == 7
    assert all((value == 0).all() for value in norms.values())


def attention_mix(head: DraftHead, embeddings: Tensor, hidden: Tensor) -> Tensor:
    """What enters the output projection, [seq, heads, head_dim]."""
    seen: list[Tensor] = []
    attention = head.depths[0].get_submodule("block.self_attn")
    handle = attention.o_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    run(head, embeddings, hidden)
    handle.remove()
    return seen[0][0].unflatten(-1, (-1, attention.head_dim))


@pytest.mark.parametrize(("rows", "attention_head"), [((0, 32), 0), ((32, 64), 0), ((64, 96), 1), ((96, 128), 1)])
def test_query_and_gate_rows_alternate_head_by_head(rows: tuple[int, int], attention_head: int) -> None:
    """https://github.com/THUDM/slime/pull/1575: rows 32..63 are the gate of head 0, not the query of head 1."""
    head = tiny_head()
    weight = head.depths[0].get_submodule("block.self_attn.q_proj").weight
    assert weight.shape == (2 * 2 * 32, 64)
    embeddings, hidden = torch.randn(2, 1, 4, 64)
    before = attention_mix(head, embeddings, hidden)
    with torch.no_grad():
        weight[slice(*rows)] *= -1
    changed = (attention_mix(head, embeddings, hidden) != before).any(dim=-1).any(dim=0)
    assert changed.tolist() == [attention_head == 0, attention_head == 1]


def test_a_gate_row_scales_the_attention_output_by_its_sigmoid() -> None:
    head = tiny_head()
    weight = head.depths[0].get_submodule("block.self_attn.q_proj").weight
    embeddings, hidden = torch.randn(2, 1, 4, 64)
    with torch.no_grad():
        weight[32:64] = 0
        half = attention_mix(head, embeddings, hidden)[:, 0]
        entering: list[Tensor] = []
        norm = head.depths[0].get_submodule("block.input_layernorm")
        handle = norm.register_forward_hook(lambda _, __, out: entering.append(out))
        weight[32:64] = torch.randn(32, 64)
        gated = attention_mix(head, embeddings, hidden)[:, 0]
        handle.remove()
        gate = (entering[0][0] @ weight[32:64].T).sigmoid()
    torch.testing.assert_close(gated, 2 * half * gate, rtol=FP32_ROUNDING, atol=FP32_ROUNDING)


def test_the_recycled_state_is_the_one_behind_the_output_norm() -> None:
    embeddings, hidden = torch.randn(2, 1, 4, 64)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    states = tiny_head().run_depth(1, embeddings, hidden, torch.arange(4)[None], mask=mask)
    assert states.recycled is states.normed


# Positions

THETA = {"rope_theta": 1e6}
PLACES: dict[str, dict[str, Any]] = {
    "top level": {"rope_parameters": None, **THETA},
    "rope_parameters": {"rope_parameters": THETA},
    "by layer type": {"rope_parameters": {"full_attention": THETA, "linear_attention": {"rope_theta": 5.0}}},
    "rope_scaling": {"rope_parameters": None, "rope_scaling": {"type": "default", **THETA}},
    "both": {"rope_parameters": {"rope_type": "default"}, **THETA},
}


def cos_sin(**fields: Any) -> tuple[Tensor, Tensor]:
    nested = fields.pop("nested", False)
    config = ModelConfig(tiny_config(nested=nested, head_dim=64, **fields), PATH)
    return BLOCK.build(config).rotary()(torch.zeros(1), torch.tensor([[0, 1, 7, 4096]]))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_the_base_frequency_is_found_wherever_it_stands(place: str, nested: bool) -> None:
    """https://github.com/sgl-project/sglang/pull/14745, https://github.com/kvcache-ai/sglang/pull/90"""
    cos, sin = cos_sin(nested=nested, **PLACES[place])
    # A quarter of a head of 64 is turned, in 8 pairs that lie half a turned part apart.
    angles = torch.tensor([0.0, 1.0, 7.0, 4096.0])[:, None] * 1e6 ** (-torch.arange(8) / 8)
    torch.testing.assert_close(cos[0], torch.cat([angles, angles], -1).cos(), rtol=0, atol=1e-3)
    torch.testing.assert_close(sin[0], torch.cat([angles, angles], -1).sin(), rtol=0, atol=1e-3)
    first = cos_sin(**PLACES["top level"])
    assert torch.equal(cos, first[0])
    assert torch.equal(sin, first[1])
    assert not torch.equal(cos, cos_sin(rope_parameters={"rope_theta": 1e4})[0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_parameters": None}, "expected rope_theta > 0 in rope_parameters or beside it, got None"),
        ({"rope_parameters": {"rope_type": "default"}}, "expected rope_theta > 0 .*, got None"),
        ({"rope_parameters": {"linear_attention": THETA}}, "expected rope_theta > 0 .*, got None"),
        ({"rope_parameters": {"rope_theta": "1e6"}}, "expected rope_theta > 0 .*, got '1e6'"),
        ({"rope_parameters": {"rope_theta": True}}, "expected rope_theta > 0 .*, got True"),
        ({"rope_parameters": {"rope_theta": 0}}, "expected rope_theta > 0 .*, got 0"),
        ({"rope_parameters": [1e6]}, r"expected rope_parameters to be an object, got \[1000000.0\]"),
        ({"rope_parameters": {"full_attention": 3}}, "expected rope_parameters to be an object, got 3"),
        ({"rope_parameters": THETA, "rope_theta": 1e4}, "rope_theta is 1000000.0 in one place and 10000.0 in the conf"),
        (
            {"rope_parameters": {"rope_type": "default", **THETA}, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rope_type is 'default' in one place and 'yarn' in rope_scaling",
        ),
    ],
)
def test_rope_settings_that_are_missing_or_contradict_each_other_are_refused(
    fields: dict[str, Any], message: str
) -> None:
    """https://github.com/sgl-project/sglang/pull/14745: no reader may fall back to 10,000 in silence."""
    with pytest.raises(ModelConfigError, match=message) as caught:
        cos_sin(**fields)
    assert str(PATH) in caught.value.message


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", "64", "hidden_size"),
        ("rms_norm_eps", None, "rms_norm_eps"),
        ("hidden_act", "nonesuch", "nonesuch"),
        ("rope_parameters", {"rope_type": "nonesuch", "rope_theta": 1e4}, "nonesuch"),
    ],
)
def test_a_config_that_transformers_refuses_is_a_config_error(field: str, value: object, message: str) -> None:
    with pytest.raises(ModelConfigError, match=f"transformers refuses the config .*(?s:.*){message}") as caught:
        BLOCK.build(ModelConfig(tiny_config(**{field: value}), PATH))
    assert str(PATH) in caught.value.message


@pytest.mark.parametrize(("field", "value"), [("num_key_value_heads", 0), ("num_attention_heads", -1)])
def test_sizes_that_no_model_has_never_reach_transformers(field: str, value: int) -> None:
    with pytest.raises(
        ModelConfigError, match=f"no model has such sizes.(?s:.*)'{field}': expected 1 to .*, got {value}"
    ):
        BLOCK.build(ModelConfig(tiny_config(**{field: value}), PATH))
