"""What the cases of the Qwen3.5 line have in common: configs, the shapes of attention and fusion, places in the engines.

Paths inside the engines: vLLM 0.32.0 models/qwen3_5_mtp.py and models/qwen3_next_mtp.py, SGLang 0.5.23 models/qwen3_5_mtp.py
and models/qwen3_next_mtp.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtp_zoo_conformance.case import Shapes
from mtp_zoo_conformance.flips import (
    Flip,
    experts_in_reverse,
    gate_in_halves,
    neighbouring_rotary_pairs,
    other_rotary_base,
    tiled_kv_heads,
    up_before_gate,
    without_qk_norm,
    without_shared_expert,
    without_unit_offset,
)

TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "full_attention"],
    "full_attention_interval": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 512,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "use_cache": True,
}

VISION: dict[str, Any] = {
    "model_type": "qwen3_5",
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 64,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "deepstack_visual_indexes": [],
}


def nested(architecture: str, model_type: str, text: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json that holds a language model beside a vision tower."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": TEXT["dtype"],
        "tie_word_embeddings": False,
        "image_token_id": 508,
        "video_token_id": 509,
        "vision_start_token_id": 510,
        "vision_end_token_id": 511,
        "text_config": dict(text),
        "vision_config": {**VISION, "model_type": model_type},
    }


def attention_shapes(text: Mapping[str, Any]) -> Shapes:
    """Fusion, norms and gated attention: all of a head but its MLP, 12 tensors."""
    hidden, size = text["hidden_size"], text["head_dim"]
    queries, keys = text["num_attention_heads"] * size, text["num_key_value_heads"] * size
    return {
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.norm.weight": (hidden,),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
        "mtp.layers.0.input_layernorm.weight": (hidden,),
        "mtp.layers.0.post_attention_layernorm.weight": (hidden,),
        "mtp.layers.0.self_attn.q_proj.weight": (2 * queries, hidden),
        "mtp.layers.0.self_attn.k_proj.weight": (keys, hidden),
        "mtp.layers.0.self_attn.v_proj.weight": (keys, hidden),
        "mtp.layers.0.self_attn.o_proj.weight": (hidden, queries),
        "mtp.layers.0.self_attn.q_norm.weight": (size,),
        "mtp.layers.0.self_attn.k_norm.weight": (size,),
    }


def expert_shapes(text: Mapping[str, Any]) -> Shapes:
    """Router and shared expert, 5 tensors."""
    hidden, inner = text["hidden_size"], text["shared_expert_intermediate_size"]
    return {
        "mtp.layers.0.mlp.gate.weight": (text["num_experts"], hidden),
        "mtp.layers.0.mlp.shared_expert_gate.weight": (1, hidden),
        "mtp.layers.0.mlp.shared_expert.gate_proj.weight": (inner, hidden),
        "mtp.layers.0.mlp.shared_expert.up_proj.weight": (inner, hidden),
        "mtp.layers.0.mlp.shared_expert.down_proj.weight": (hidden, inner),
    }


def single_experts(text: Mapping[str, Any]) -> Shapes:
    """A head whose experts are stored one by one."""
    hidden, inner = text["hidden_size"], text["moe_intermediate_size"]
    one = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    each = {
        f"mtp.layers.0.mlp.experts.{number}.{name}.weight": shape
        for number in range(text["num_experts"])
        for name, shape in one.items()
    }
    return {**attention_shapes(text), **expert_shapes(text), **each}


def packed_experts(text: Mapping[str, Any]) -> Shapes:
    """A head whose experts are stored in two tensors."""
    number, hidden, inner = text["num_experts"], text["hidden_size"], text["moe_intermediate_size"]
    packed = {
        "mtp.layers.0.mlp.experts.gate_up_proj": (number, 2 * inner, hidden),
        "mtp.layers.0.mlp.experts.down_proj": (number, hidden, inner),
    }
    return {**attention_shapes(text), **expert_shapes(text), **packed}


EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
}

SGLANG_LEFTOVERS = (r"lm_head\.weight", r"visual\..*")
"""SGLang's draft loads no output matrix, it is handed the target's (`set_embed_and_head`); and it builds the vision tower of
a nested config, for which these checkpoints have no tensors."""

MROPE = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
"""Of published configs, also of text-only checkpoints cut from a vision-language model. vLLM 0.32.0 drops `mrope_section` from
a flat target's config and not from its draft's, and then hands three rows of positions to a rotary embedding of one."""
ROPE: dict[str, Any] = TEXT["rope_parameters"]
WIDE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}
"""SGLang 0.5.23 reads `partial_rotary_factor` beside `rope_parameters` only (models/qwen3_5.py), and takes 0.25 where it is
not there. Published configs have 0.25, so nobody sees it; this config states 0.5 in both places, for all readers."""

VLLM_STAGES = {
    "embedding_norm": "model.pre_fc_norm_embedding",
    "hidden_norm": "model.pre_fc_norm_hidden",
    "fusion": "model.fc",
    "attention": "model.layers.0.self_attn.o_proj",
    "mlp": "model.layers.0.mlp",
    "output_norm": "model.norm",
}
SGLANG_STAGES = {
    "embedding_norm": "pre_fc_norm_embedding",
    "hidden_norm": "pre_fc_norm_hidden",
    "fusion": "fc",
    "attention": "model.layers.0.o_proj",
    "mlp": "model.layers.0.mlp",
    "output_norm": "model.norm",
}

STAGES = {
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "fusion": "eh_proj",
    "attention": "block.self_attn.o_proj",
    "mlp": "block.mlp",
    "output_norm": "norm",
}

FLIPS = (
    Flip("norm_weight", weights=without_unit_offset),
    Flip("rotary_pairs", weights=neighbouring_rotary_pairs),
    Flip("rotary_base", weights=other_rotary_base),
    Flip("qk_norm", weights=without_qk_norm),
    Flip("kv_heads", weights=tiled_kv_heads),
    Flip("attention_gate", weights=gate_in_halves),
)

EXPERT_FLIPS = (
    Flip("shared_expert", weights=without_shared_expert),
    Flip("packing", weights=up_before_gate),
    Flip("expert_order", weights=experts_in_reverse),
)

EXPERT_OUTPUTS = ("self_attn.o_proj.weight", "mlp.experts.down_proj", "mlp.shared_expert.down_proj.weight")
"""Output projections of a layer with experts."""
