"""Qwen3.5, dense.

Names and shapes of the head are those of the published inventories of Qwen3.5-0.8B-Base and Qwen3.6-27B. Paths inside the
engines: vLLM 0.32.0 models/qwen3_5_mtp.py, SGLang 0.5.23 models/qwen3_5_mtp.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtp_zoo_conformance.case import ConformanceCase, EngineView, Shapes, Variant
from mtp_zoo_conformance.cases import register_case
from mtp_zoo_conformance.flips import (
    Flip,
    gate_in_halves,
    neighbouring_rotary_pairs,
    other_rotary_base,
    tiled_kv_heads,
    without_qk_norm,
    without_unit_offset,
)
from mtp_zoo_conformance.reference.qwen3_5 import reference

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


def flat(**changes: Any) -> dict[str, Any]:
    """A config.json of the language model alone."""
    return {"architectures": ["Qwen3_5ForCausalLM"], **TEXT, **changes}


def nested(**changes: Any) -> dict[str, Any]:
    """A config.json that holds the language model beside a vision tower."""
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": TEXT["dtype"],
        "tie_word_embeddings": False,
        "image_token_id": 508,
        "video_token_id": 509,
        "vision_start_token_id": 510,
        "vision_end_token_id": 511,
        "text_config": {**TEXT, **changes},
        "vision_config": VISION,
    }


def head_shapes(text: Mapping[str, Any]) -> Shapes:
    """The 15 tensors of a dense head."""
    hidden, inner, size = text["hidden_size"], text["intermediate_size"], text["head_dim"]
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
        "mtp.layers.0.mlp.gate_proj.weight": (inner, hidden),
        "mtp.layers.0.mlp.up_proj.weight": (inner, hidden),
        "mtp.layers.0.mlp.down_proj.weight": (hidden, inner),
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

CASE = register_case(
    ConformanceCase(
        family="qwen3_5",
        variants=(
            Variant(name="untied", config=flat()),
            Variant(name="tied", config=flat(tie_word_embeddings=True)),
            Variant(
                name="nested",
                config=nested(rope_parameters={**ROPE, **MROPE}),
                prefix="model.language_model.",
            ),
            Variant(
                name="text_only",
                config=flat(rope_parameters={**ROPE, **MROPE}),
                prefix="model.language_model.",
                drop={"vllm": ("rope_parameters.mrope_section", "rope_parameters.mrope_interleaved")},
                not_run={
                    "sglang": "SGLang 0.5.23 fills no parameter of a flat config's target, and not the draft's embedding, from "
                    "names with the prefix `model.language_model.`, and says nothing: every one was still NaN behind its loader"
                },
            ),
            Variant(
                name="wide",
                config=flat(
                    head_dim=64,
                    num_attention_heads=8,
                    num_key_value_heads=2,
                    rope_parameters=WIDE,
                    partial_rotary_factor=WIDE["partial_rotary_factor"],
                ),
            ),
            Variant(
                name="hybrid",
                config=flat(layer_types=["linear_attention", "full_attention"], full_attention_interval=2),
                no_target={"vllm": "vLLM's gated delta net runs on a CPU in BF16 only; the head itself is judged"},
            ),
            Variant(name="bf16", config=flat(), dtype="bfloat16"),
        ),
        target_class="Qwen3_5ForCausalLM",
        head_shapes=head_shapes,
        norm_centre=0.0,
        reference=reference,
        engines={
            "vllm": EngineView(draft_class="Qwen3_5MTP", stages=VLLM_STAGES),
            "sglang": EngineView(draft_class="Qwen3_5ForCausalLMMTP", stages=SGLANG_STAGES, leftovers=SGLANG_LEFTOVERS),
        },
        stages={
            "embedding_norm": "enorm",
            "hidden_norm": "hnorm",
            "fusion": "eh_proj",
            "attention": "block.self_attn.o_proj",
            "mlp": "block.mlp",
            "output_norm": "norm",
        },
        flips=(
            Flip("norm_weight", weights=without_unit_offset),
            Flip("rotary_pairs", weights=neighbouring_rotary_pairs),
            Flip("rotary_base", weights=other_rotary_base),
            Flip("qk_norm", weights=without_qk_norm),
            Flip("kv_heads", weights=tiled_kv_heads),
            Flip("attention_gate", weights=gate_in_halves),
        ),
        output_projections=("self_attn.o_proj.weight", "mlp.down_proj.weight"),
        inventories=("qwen3_6_27b",),
        mtp_model={"num_mtp_layers": 1, "mtp_layer_types": ["full_attention"]},
    )
)
