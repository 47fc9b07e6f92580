"""DeepSeek-V3, R1, V3.1.

Names, shapes and dtypes of the head are those of the published inventory of DeepSeek-R1.
"""

from __future__ import annotations

from typing import Any

from mtp_zoo_conformance.case import ConformanceCase, EngineView, Variant
from mtp_zoo_conformance.cases import register_case
from mtp_zoo_conformance.cases.latent_line import FLIPS, LATENT, dense_head, dense_head_with_copies, finish
from mtp_zoo_conformance.cases.nextn_line import (
    COPIES,
    GROUP_FLIP,
    OUTPUTS,
    SGLANG_LEFTOVERS,
    SGLANG_STAGES,
    STAGES,
    VLLM_HEAD,
    VLLM_STAGES,
)
from mtp_zoo_conformance.flips import Flip
from mtp_zoo_conformance.latent_flips import without_mscale
from mtp_zoo_conformance.reference.nextn import latent_reference

YARN = {
    "type": "yarn",
    "factor": 8,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
"""As released, but for the original length (4096) and the factor (40). With 1024 some of the 32 frequencies keep their value,
some are mixed, and some are divided whole. 40 would nearly double the scores of random queries and keys, and with them
what rounding does."""
LONG = 8 * 1024


def flat(**changes: Any) -> dict[str, Any]:
    """A config.json."""
    own = {
        "model_type": "deepseek_v3",
        "scoring_func": "sigmoid",
        "n_group": 2,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_interleave": True,
    }
    return {"architectures": ["DeepseekV3ForCausalLM"], **LATENT, **own, **changes}


CASE = register_case(
    ConformanceCase(
        family="deepseek_v3",
        variants=(
            Variant(name="yarn", config=flat(rope_scaling=YARN, max_position_embeddings=LONG)),
            Variant(name="plain", config=flat(rope_scaling=None)),
            Variant(name="copies", config=flat(rope_scaling=None), head_shapes=dense_head_with_copies, copies=COPIES),
            Variant(
                name="tied",
                config=flat(rope_scaling=None, tie_word_embeddings=True),
                not_run={
                    "vllm": "vLLM 0.32.0 does not tie a DeepSeek target's output matrix to its embedding, and says nothing: it "
                    "was still NaN behind its loader. No release is tied"
                },
            ),
        ),
        target_class="DeepseekV3ForCausalLM",
        head_shapes=dense_head,
        norm_centre=1.0,
        reference=latent_reference,
        engines={
            "vllm": EngineView(draft_class="DeepSeekMTP", stages=VLLM_STAGES, leftovers=(VLLM_HEAD,)),
            "sglang": EngineView(
                draft_class="DeepseekV3ForCausalLMNextN", stages=SGLANG_STAGES, leftovers=SGLANG_LEFTOVERS
            ),
        },
        stages=STAGES,
        flips=(*FLIPS, GROUP_FLIP, Flip("yarn_mscale", weights=without_mscale)),
        output_projections=OUTPUTS,
        inventories=("deepseek_r1",),
        mtp_model={},
        finish=finish,
    )
)
