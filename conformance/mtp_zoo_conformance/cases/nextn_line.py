"""What the cases of DeepSeek-V3 and its relatives have in common: one more decoder layer behind the target's, with experts.

The head is stored as layer `num_hidden_layers`: fusion, norms, attention, a router with a bias that only selects, experts one
by one, shared experts. Names, shapes and dtypes are those of the published inventories of DeepSeek-R1, GLM-4.7-Flash and
GLM-5.1. Paths inside vLLM 0.32.0: models/deepseek_mtp.py, glm4_moe_mtp.py and
glm4_moe_lite_mtp.py; SGLang 0.5.23: models/deepseek_nextn.py, glm4_moe_nextn.py and glm4_moe_lite_nextn.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mtp_zoo_conformance.case import Shapes, in_bf16
from mtp_zoo_conformance.expert_flips import (
    other_router_bias,
    other_router_groups,
    shares_with_bias,
    shares_without_norm,
    unscaled_shares,
    without_shared_experts,
)
from mtp_zoo_conformance.flips import Flip, experts_in_reverse, other_rotary_base, up_before_gate, with_unit_offset

HEAD = "model.layers.2."
"""The head's layer: the tiny targets have two."""

BASE: dict[str, Any] = {
    "dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "use_cache": True,
}

COPIES = {
    f"{HEAD}embed_tokens.weight": "model.embed_tokens.weight",
    f"{HEAD}shared_head.head.weight": "lm_head.weight",
}
"""What some releases store in the head a second time. Both engines take the target's."""


def layer_shapes(text: Mapping[str, Any]) -> Shapes:
    """All of a head but its attention."""
    hidden, inner, experts = text["hidden_size"], text["moe_intermediate_size"], text["n_routed_experts"]
    return {
        f"{HEAD}enorm.weight": (hidden,),
        f"{HEAD}hnorm.weight": (hidden,),
        f"{HEAD}eh_proj.weight": (hidden, 2 * hidden),
        f"{HEAD}shared_head.norm.weight": (hidden,),
        f"{HEAD}input_layernorm.weight": (hidden,),
        f"{HEAD}post_attention_layernorm.weight": (hidden,),
        f"{HEAD}mlp.gate.weight": (experts, hidden),
        f"{HEAD}mlp.gate.e_score_correction_bias": (experts,),
        **_swiglu("mlp.shared_experts", hidden, inner * text["n_shared_experts"]),
        **{k: v for number in range(experts) for k, v in _swiglu(f"mlp.experts.{number}", hidden, inner).items()},
    }


def _swiglu(name: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{HEAD}{name}.gate_proj.weight": (inner, hidden),
        f"{HEAD}{name}.up_proj.weight": (inner, hidden),
        f"{HEAD}{name}.down_proj.weight": (hidden, inner),
    }


def copied_shapes(text: Mapping[str, Any]) -> Shapes:
    """The copies of the target's tensors."""
    return dict.fromkeys(COPIES, (text["vocab_size"], text["hidden_size"]))


BIAS_SPREAD = 1.5
"""The router's bias scatters this many times as far as other vectors: it must turn the choice of experts often, and not
always."""


def finish(name: str, value: Tensor) -> Tensor:
    """Random values as a released checkpoint of the line stores them."""
    if name.endswith("e_score_correction_bias"):
        return BIAS_SPREAD * (value - 1.0)  # drawn about one; FP32, as everywhere
    return in_bf16(name, value)


STAGES = {
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "fusion": "eh_proj",
    "attention": "block.self_attn.o_proj",
    "mlp": "block.mlp",
    "output_norm": "norm",
}
VLLM_STAGES = {
    "embedding_norm": "model.layers.2.enorm",
    "hidden_norm": "model.layers.2.hnorm",
    "fusion": "model.layers.2.eh_proj",
    "attention": "model.layers.2.mtp_block.self_attn.o_proj",
    "mlp": "model.layers.2.mtp_block.mlp",
    "output_norm": "model.layers.2.shared_head.norm",
}

SGLANG_STAGES = {
    "embedding_norm": "model.enorm",
    "hidden_norm": "model.hnorm",
    "fusion": "model.eh_proj",
    "attention": "model.decoder.self_attn.o_proj",
    "mlp": "model.decoder.mlp",
    "output_norm": "model.shared_head.norm",
}

VLLM_EMBEDDING = r"model\.embed_tokens\.weight"
VLLM_HEAD = r"model\.layers\.2\.shared_head\.head\.weight"
"""What vLLM's proposer hands to a draft from the target (`_maybe_share_embeddings`, `_maybe_share_lm_head`)."""
SGLANG_LEFTOVERS = (r"lm_head\.weight", r"model\.embed_tokens\.weight")
"""The same in SGLang (`set_embed_and_head`)."""

FLIPS = (
    Flip("norm_weight", weights=with_unit_offset),
    Flip("rotary_base", weights=other_rotary_base),
    Flip("router_bias", weights=other_router_bias),
    Flip("router_bias_in_shares", weights=shares_with_bias),
    Flip("router_scaling", weights=unscaled_shares),
    Flip("router_normalisation", weights=shares_without_norm),
    Flip("shared_expert", weights=without_shared_experts),
    Flip("packing", weights=up_before_gate),
    Flip("expert_order", weights=experts_in_reverse),
)

GROUP_FLIP = Flip("router_groups", weights=other_router_groups)
"""For configs with more than one group of experts."""

OUTPUTS = (
    "self_attn.o_proj.weight",
    "mlp.down_proj.weight",
    "mlp.experts.down_proj",
    "mlp.shared_experts.down_proj.weight",
)
"""Output projections of the target's layers and of the head's: the target's first layers are dense."""
