"""GLM-4.5, 4.6 and 4.7.

The large ones norm queries and keys, GLM-4.5-Air does not. No inventory of tensors is published here; names are those that both
engines read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtp_zoo_conformance.case import ConformanceCase, EngineView, Shapes, Variant
from mtp_zoo_conformance.cases import register_case
from mtp_zoo_conformance.cases.nextn_line import (
    BASE,
    COPIES,
    FLIPS,
    HEAD,
    OUTPUTS,
    SGLANG_LEFTOVERS,
    SGLANG_STAGES,
    STAGES,
    VLLM_STAGES,
    copied_shapes,
    finish,
    layer_shapes,
)
from mtp_zoo_conformance.flips import (
    Flip,
    neighbouring_rotary_pairs,
    tiled_kv_heads,
    without_qk_norm,
    without_qkv_bias,
)
from mtp_zoo_conformance.reference.nextn import grouped_reference


def flat(**changes: Any) -> dict[str, Any]:
    """A config.json."""
    own = {
        "model_type": "glm4_moe",
        "num_key_value_heads": 2,
        "head_dim": 32,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000,
        "rope_scaling": None,
    }
    return {"architectures": ["Glm4MoeForCausalLM"], **BASE, **own, **changes}


def head_shapes(text: Mapping[str, Any]) -> Shapes:
    """A head with biases on queries, keys and values, and, where the config says so, their norms."""
    hidden, size = text["hidden_size"], text["head_dim"]
    queries, keys = text["num_attention_heads"] * size, text["num_key_value_heads"] * size
    norms = {f"{HEAD}self_attn.{name}.weight": (size,) for name in ("q_norm", "k_norm") if text["use_qk_norm"]}
    return {
        **layer_shapes(text),
        f"{HEAD}self_attn.q_proj.weight": (queries, hidden),
        f"{HEAD}self_attn.q_proj.bias": (queries,),
        f"{HEAD}self_attn.k_proj.weight": (keys, hidden),
        f"{HEAD}self_attn.k_proj.bias": (keys,),
        f"{HEAD}self_attn.v_proj.weight": (keys, hidden),
        f"{HEAD}self_attn.v_proj.bias": (keys,),
        f"{HEAD}self_attn.o_proj.weight": (hidden, queries),
        **norms,
    }


def head_shapes_with_copies(text: Mapping[str, Any]) -> Shapes:
    """The same, with copies of embedding and output matrix."""
    return {**head_shapes(text), **copied_shapes(text)}


CASE = register_case(
    ConformanceCase(
        family="glm4_moe",
        variants=(
            Variant(name="qk_norm", config=flat()),
            Variant(name="plain", config=flat(use_qk_norm=False)),
            Variant(
                name="copies",
                config=flat(use_qk_norm=False),
                head_shapes=head_shapes_with_copies,
                copies=COPIES,
            ),
        ),
        target_class="Glm4MoeForCausalLM",
        head_shapes=head_shapes,
        norm_centre=1.0,
        reference=grouped_reference,
        engines={
            "vllm": EngineView(draft_class="Glm4MoeMTP", stages=VLLM_STAGES),
            "sglang": EngineView(
                draft_class="Glm4MoeForCausalLMNextN", stages=SGLANG_STAGES, leftovers=SGLANG_LEFTOVERS
            ),
        },
        stages=STAGES,
        flips=(
            *FLIPS,
            Flip("rotary_pairs", weights=neighbouring_rotary_pairs),
            Flip("qk_norm", weights=without_qk_norm),
            Flip("qkv_bias", weights=without_qkv_bias),
            Flip("kv_heads", weights=tiled_kv_heads),
        ),
        output_projections=OUTPUTS,
        mtp_model={},
        finish=finish,
    )
)
