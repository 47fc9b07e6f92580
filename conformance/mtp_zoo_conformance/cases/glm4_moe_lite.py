"""GLM-4.7-Flash.

Names, shapes and dtypes of the head are those of its published inventory.
"""

from __future__ import annotations

from typing import Any

from mtp_zoo_conformance.case import ConformanceCase, EngineView, Variant
from mtp_zoo_conformance.cases import register_case
from mtp_zoo_conformance.cases.latent_line import EPS_FLIP, FLIPS, LATENT, dense_head, dense_head_with_copies, finish
from mtp_zoo_conformance.cases.nextn_line import (
    COPIES,
    OUTPUTS,
    SGLANG_LEFTOVERS,
    SGLANG_STAGES,
    STAGES,
    VLLM_EMBEDDING,
    VLLM_HEAD,
    VLLM_STAGES,
)
from mtp_zoo_conformance.reference.nextn import latent_reference


def flat(**changes: Any) -> dict[str, Any]:
    """A config.json."""
    own = {
        "model_type": "glm4_moe_lite",
        "rope_theta": 10000,
        "rope_scaling": None,
        "partial_rotary_factor": 1.0,
    }
    return {"architectures": ["Glm4MoeLiteForCausalLM"], **LATENT, **own, **changes}


CASE = register_case(
    ConformanceCase(
        family="glm4_moe_lite",
        variants=(
            Variant(name="plain", config=flat()),
            Variant(name="copies", config=flat(), head_shapes=dense_head_with_copies, copies=COPIES),
        ),
        target_class="Glm4MoeLiteForCausalLM",
        head_shapes=dense_head,
        norm_centre=1.0,
        reference=latent_reference,
        engines={
            "vllm": EngineView(draft_class="Glm4MoeLiteMTP", stages=VLLM_STAGES, leftovers=(VLLM_EMBEDDING, VLLM_HEAD)),
            "sglang": EngineView(
                draft_class="Glm4MoeLiteForCausalLMNextN", stages=SGLANG_STAGES, leftovers=SGLANG_LEFTOVERS
            ),
        },
        stages=STAGES,
        flips=(*FLIPS, EPS_FLIP),
        output_projections=OUTPUTS,
        inventories=("glm_4_7_flash",),
        mtp_model={"num_mtp_layers": 1, "mtp_mlp_layer_types": ["sparse"]},
        finish=finish,
    )
)
