"""GLM-5 and 5.1: latent attention with an indexer.

Names, shapes and dtypes of the head are those of the published inventory of GLM-5.1, which stores no copies.
"""

from __future__ import annotations

from typing import Any

from mtp_zoo_conformance.case import ConformanceCase, Variant
from mtp_zoo_conformance.cases import register_case
from mtp_zoo_conformance.cases.latent_line import (
    EPS_FLIP,
    FLIPS,
    INDEXER,
    LATENT,
    SPARSE_VLLM,
    finish,
    sparse_head,
    sparse_head_with_copies,
    sparse_sglang,
)
from mtp_zoo_conformance.cases.nextn_line import COPIES, OUTPUTS, STAGES
from mtp_zoo_conformance.reference.nextn import latent_reference


def flat(**changes: Any) -> dict[str, Any]:
    """A config.json."""
    own = {
        "model_type": "glm_moe_dsa",
        "scoring_func": "sigmoid",
        "head_dim": 64,
        "rope_parameters": {"rope_theta": 10000, "rope_type": "default"},
        "rope_interleave": True,
        "indexer_rope_interleave": True,
    }
    return {"architectures": ["GlmMoeDsaForCausalLM"], **LATENT, **INDEXER, **own, **changes}


CASE = register_case(
    ConformanceCase(
        family="glm_moe_dsa",
        variants=(
            Variant(name="plain", config=flat()),
            Variant(name="copies", config=flat(), head_shapes=sparse_head_with_copies, copies=COPIES),
        ),
        target_class="GlmMoeDsaForCausalLM",
        head_shapes=sparse_head,
        norm_centre=1.0,
        reference=latent_reference,
        engines={"vllm": SPARSE_VLLM, "sglang": sparse_sglang("GlmMoeDsaForCausalLMNextN")},
        stages=STAGES,
        flips=(*FLIPS, EPS_FLIP),
        output_projections=OUTPUTS,
        inventories=("glm_5_1",),
        finish=finish,
    )
)
