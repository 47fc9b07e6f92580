"""DeepSeek-V3.2: DeepSeek-V3 with an indexer.

No inventory is published here: names and shapes are those of DeepSeek-R1 and, for the indexer, of GLM-5.1.
"""

from __future__ import annotations

from typing import Any

from mtp_zoo_conformance.case import ConformanceCase, Variant
from mtp_zoo_conformance.cases import register_case
from mtp_zoo_conformance.cases.deepseek_v3 import LONG, YARN
from mtp_zoo_conformance.cases.latent_line import (
    FLIPS,
    INDEXER,
    LATENT,
    SPARSE_VLLM,
    finish,
    sparse_head,
    sparse_head_with_copies,
    sparse_sglang,
)
from mtp_zoo_conformance.cases.nextn_line import COPIES, GROUP_FLIP, OUTPUTS, STAGES
from mtp_zoo_conformance.flips import Flip
from mtp_zoo_conformance.latent_flips import without_mscale
from mtp_zoo_conformance.reference.nextn import latent_reference


def flat(**changes: Any) -> dict[str, Any]:
    """A config.json."""
    own = {
        "model_type": "deepseek_v32",
        "scoring_func": "sigmoid",
        "n_group": 2,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": YARN,
        "max_position_embeddings": LONG,
    }
    return {"architectures": ["DeepseekV32ForCausalLM"], **LATENT, **INDEXER, **own, **changes}


CASE = register_case(
    ConformanceCase(
        family="deepseek_v32",
        variants=(
            Variant(name="yarn", config=flat()),
            Variant(name="copies", config=flat(), head_shapes=sparse_head_with_copies, copies=COPIES),
        ),
        target_class="DeepseekV32ForCausalLM",
        head_shapes=sparse_head,
        norm_centre=1.0,
        reference=latent_reference,
        engines={"vllm": SPARSE_VLLM, "sglang": sparse_sglang("DeepseekV3ForCausalLMNextN")},
        stages=STAGES,
        flips=(*FLIPS, GROUP_FLIP, Flip("yarn_mscale", weights=without_mscale)),
        output_projections=OUTPUTS,
        finish=finish,
    )
)
