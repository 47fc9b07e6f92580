"""Qwen3.5, dense.

Names and shapes of the head are those of the published inventories of Qwen3.5-0.8B-Base and Qwen3.6-27B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtp_zoo_conformance.case import ConformanceCase, EngineView, Shapes, Variant
from mtp_zoo_conformance.cases import register_case
from mtp_zoo_conformance.cases.qwen_line import (
    FLIPS,
    MROPE,
    ROPE,
    SGLANG_LEFTOVERS,
    SGLANG_STAGES,
    STAGES,
    TEXT,
    VLLM_STAGES,
    WIDE,
    attention_shapes,
    nested,
)
from mtp_zoo_conformance.reference.qwen3_5 import reference


def flat(**changes: Any) -> dict[str, Any]:
    """A config.json of the language model alone."""
    return {"architectures": ["Qwen3_5ForCausalLM"], **TEXT, **changes}


def head_shapes(text: Mapping[str, Any]) -> Shapes:
    """The 15 tensors of a dense head."""
    hidden, inner = text["hidden_size"], text["intermediate_size"]
    return {
        **attention_shapes(text),
        "mtp.layers.0.mlp.gate_proj.weight": (inner, hidden),
        "mtp.layers.0.mlp.up_proj.weight": (inner, hidden),
        "mtp.layers.0.mlp.down_proj.weight": (hidden, inner),
    }


CASE = register_case(
    ConformanceCase(
        family="qwen3_5",
        variants=(
            Variant(name="untied", config=flat()),
            Variant(name="tied", config=flat(tie_word_embeddings=True)),
            Variant(
                name="nested",
                config=nested(
                    "Qwen3_5ForConditionalGeneration", "qwen3_5", {**TEXT, "rope_parameters": {**ROPE, **MROPE}}
                ),
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
        stages=STAGES,
        flips=FLIPS,
        output_projections=("self_attn.o_proj.weight", "mlp.down_proj.weight"),
        inventories=("qwen3_6_27b",),
        mtp_model={"num_mtp_layers": 1, "mtp_layer_types": ["full_attention"]},
    )
)
