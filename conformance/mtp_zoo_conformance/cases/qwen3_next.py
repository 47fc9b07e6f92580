"""Qwen3-Next, experts stored one by one.

Names and shapes of the head are those of the published inventory of Qwen3-Next-80B.
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
    SGLANG_LEFTOVERS,
    SGLANG_STAGES,
    STAGES,
    TEXT,
    VLLM_STAGES,
    single_experts,
)
from mtp_zoo_conformance.reference.qwen3_5 import reference

NOT_IN_THE_CONFIG = ("rope_parameters", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "attn_output_gate")


def flat(**changes: Any) -> dict[str, Any]:
    """A config.json; no field counts the depths, and RoPE stands beside the rest."""
    text = {name: value for name, value in TEXT.items() if name not in NOT_IN_THE_CONFIG}
    rope = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "rope_scaling": None}
    return {"architectures": ["Qwen3NextForCausalLM"], **text, **EXPERTS, **rope, "model_type": "qwen3_next", **changes}


CASE = register_case(
    ConformanceCase(
        family="qwen3_next",
        variants=(
            Variant(name="untied", config=flat()),
            Variant(
                name="wide", config=flat(head_dim=64, num_attention_heads=8, partial_rotary_factor=0.5, rope_theta=1e7)
            ),
        ),
        target_class="Qwen3NextForCausalLM",
        head_shapes=single_experts,
        norm_centre=0.0,
        reference=reference,
        engines={
            "vllm": EngineView(draft_class="Qwen3NextMTP", stages=VLLM_STAGES),
            "sglang": EngineView(
                draft_class="Qwen3NextForCausalLMMTP",
                stages=SGLANG_STAGES,
                leftovers=(*SGLANG_LEFTOVERS, r"model\.embed_tokens\.weight"),
            ),
        },
        stages=STAGES,
        flips=(*FLIPS, *EXPERT_FLIPS),
        output_projections=EXPERT_OUTPUTS,
        inventories=("qwen3_next_80b",),
    )
)
