"""Qwen3.5 with experts, stored one by one or packed.

Names and shapes of the head are those of the published inventory of Qwen3.6-35B-A3B-NVFP4 (packed) and of the FP8 releases
(one by one).
"""

from __future__ import annotations

from typing import Any

from mtp_zoo_conformance.case import ConformanceCase, EngineView, Variant
from mtp_zoo_conformance.cases import register_case
from mtp_zoo_conformance.cases.qwen_line import (
    EXPERT_FLIPS,
    EXPERT_OUTPUTS,
    EXPERTS,
    FLIPS,
    MROPE,
    ROPE,
    SGLANG_LEFTOVERS,
    SGLANG_STAGES,
    STAGES,
    TEXT,
    VLLM_STAGES,
    nested,
    packed_experts,
    single_experts,
)
from mtp_zoo_conformance.reference.qwen3_5 import reference

MOE: dict[str, Any] = {**TEXT, **EXPERTS, "model_type": "qwen3_5_moe_text"}


def flat(**changes: Any) -> dict[str, Any]:
    """A config.json of the language model alone."""
    return {"architectures": ["Qwen3_5MoeForCausalLM"], **MOE, **changes}


CASE = register_case(
    ConformanceCase(
        family="qwen3_5_moe",
        variants=(
            Variant(name="single", config=flat()),
            Variant(name="packed", config=flat(), head_shapes=packed_experts),
            Variant(name="tied", config=flat(tie_word_embeddings=True), head_shapes=packed_experts),
            Variant(
                name="nested",
                config=nested(
                    "Qwen3_5MoeForConditionalGeneration",
                    "qwen3_5_moe",
                    {**MOE, "rope_parameters": {**ROPE, **MROPE}},
                ),
                prefix="model.language_model.",
                head_shapes=packed_experts,
            ),
        ),
        target_class="Qwen3_5MoeForCausalLM",
        head_shapes=single_experts,
        norm_centre=0.0,
        reference=reference,
        engines={
            "vllm": EngineView(draft_class="Qwen3_5MoeMTP", stages=VLLM_STAGES),
            "sglang": EngineView(draft_class="Qwen3_5ForCausalLMMTP", stages=SGLANG_STAGES, leftovers=SGLANG_LEFTOVERS),
        },
        stages=STAGES,
        flips=(*FLIPS, *EXPERT_FLIPS),
        output_projections=EXPERT_OUTPUTS,
    )
)
