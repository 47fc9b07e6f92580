"""What the cases with latent attention have in common, on top of `nextn_line`: DeepSeek-V3, V3.2, GLM-4.7-Flash, GLM-5.

vLLM's and SGLang's kernels on a CPU want latents of 512 and 64 rotated entries; all else is small.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mtp_zoo_conformance.case import EngineView, Shapes, Twin
from mtp_zoo_conformance.cases import nextn_line
from mtp_zoo_conformance.cases.nextn_line import (
    BASE,
    HEAD,
    SGLANG_LEFTOVERS,
    SGLANG_STAGES,
    VLLM_HEAD,
    VLLM_STAGES,
    copied_shapes,
    layer_shapes,
)
from mtp_zoo_conformance.flips import Flip
from mtp_zoo_conformance.latent_flips import default_latent_eps, rotary_halves

LATENT: dict[str, Any] = {
    **BASE,
    "moe_layer_freq": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}

INDEXER: dict[str, Any] = {"index_topk": 512, "index_head_dim": 128, "index_n_heads": 4}
"""Nothing that runs here is longer than `index_topk`: what is selected is all, as up to 2048 tokens in released models."""


def latent_shapes(text: Mapping[str, Any]) -> Shapes:
    """Latent attention, 7 tensors."""
    hidden, heads, queries, latents = (
        text[name] for name in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    nope, rope, value = (text[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return {
        f"{HEAD}self_attn.q_a_proj.weight": (queries, hidden),
        f"{HEAD}self_attn.q_a_layernorm.weight": (queries,),
        f"{HEAD}self_attn.q_b_proj.weight": (heads * (nope + rope), queries),
        f"{HEAD}self_attn.kv_a_proj_with_mqa.weight": (latents + rope, hidden),
        f"{HEAD}self_attn.kv_a_layernorm.weight": (latents,),
        f"{HEAD}self_attn.kv_b_proj.weight": (heads * (nope + value), latents),
        f"{HEAD}self_attn.o_proj.weight": (hidden, heads * value),
    }


def indexer_shapes(text: Mapping[str, Any]) -> Shapes:
    """The indexer of sparse attention, 5 tensors."""
    hidden, size, heads = text["hidden_size"], text["index_head_dim"], text["index_n_heads"]
    return {
        f"{HEAD}self_attn.indexer.wq_b.weight": (heads * size, text["q_lora_rank"]),
        f"{HEAD}self_attn.indexer.wk.weight": (size, hidden),
        f"{HEAD}self_attn.indexer.weights_proj.weight": (heads, hidden),
        f"{HEAD}self_attn.indexer.k_norm.weight": (size,),
        f"{HEAD}self_attn.indexer.k_norm.bias": (size,),
    }


def dense_head(text: Mapping[str, Any]) -> Shapes:
    """A head that attends to everything."""
    return {**layer_shapes(text), **latent_shapes(text)}


def dense_head_with_copies(text: Mapping[str, Any]) -> Shapes:
    """The same, with copies of embedding and output matrix."""
    return {**dense_head(text), **copied_shapes(text)}


def sparse_head(text: Mapping[str, Any]) -> Shapes:
    """A head with an indexer."""
    return {**dense_head(text), **indexer_shapes(text)}


def sparse_head_with_copies(text: Mapping[str, Any]) -> Shapes:
    """The same, with copies of embedding and output matrix."""
    return {**sparse_head(text), **copied_shapes(text)}


LATENT_SCALE = 0.03
"""Latents are drawn this small, with a mean square of about 1e-3: with those of released sizes the epsilon of their norms would
not show."""


def finish(name: str, value: Tensor) -> Tensor:
    """As `nextn_line.finish`, with small latents; the rotated rows of the keys have no norm and keep their size."""
    if name.endswith("q_a_proj.weight"):
        value = LATENT_SCALE * value
    if name.endswith("kv_a_proj_with_mqa.weight"):
        value = value.clone()
        value[: LATENT["kv_lora_rank"]] *= LATENT_SCALE
    return nextn_line.finish(name, value)


FLIPS = (*nextn_line.FLIPS, Flip("rotary_pairs", weights=rotary_halves))

EPS_FLIP = Flip("latent_norm_eps", weights=default_latent_eps)
"""For configs whose `rms_norm_eps` is not transformers' default."""

DENSE_TWIN = Twin(
    config={"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]},
    without_fields=("index_.*", "indexer_.*"),
    without_tensors=(r".*\.indexer\..*",),
    words="sparse attention opened as its dense twin: model_type deepseek_v3, no index fields, no indexer tensors",
)
"""How vLLM on a CPU reads a head with an indexer: its CPU backends have no sparse attention. Both forms attend to the same as
long as no context is longer than `index_topk`."""

SPARSE_VLLM = EngineView(
    draft_class="DeepSeekMTP",
    stages=VLLM_STAGES,
    leftovers=(VLLM_HEAD,),
    twin=DENSE_TWIN,
    unjudged={
        "indexer": "vLLM has no sparse attention on a CPU: a dense twin is judged, the same up to index_topk tokens; the "
        "indexer's weights and scores need a GPU"
    },
)


def sparse_sglang(draft_class: str) -> EngineView:
    """SGLang's view of a head with an indexer."""
    return EngineView(
        draft_class=draft_class,
        stages=SGLANG_STAGES,
        leftovers=SGLANG_LEFTOVERS,
        unjudged={
            "indexer": "SGLang has no sparse attention on a CPU: a stand-in selects everything, which is right up to "
            "index_topk tokens; the indexer's scores need a GPU"
        },
    )
