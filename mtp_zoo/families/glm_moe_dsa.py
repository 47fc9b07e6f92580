"""GLM-5, 5.1, 5.2, 5.3 (model_type glm_moe_dsa).

Sources:
    names, shapes, dtypes   published inventory of GLM-5.1: layer 78, behind a trunk of 78 layers; BF16, router bias FP32, no
                            copies of embedding and lm_head (other exports of the same model hold them)
    fusion and its order    vLLM 0.32.0 models/deepseek_v32, SGLang 0.5.23 models/deepseek_nextn.py:
                            eh_proj([enorm(e), hnorm(h)])
    block                   transformers models/glm_moe_dsa/modeling_glm_moe_dsa.py: DeepSeek-V3's, with an indexer that
                            picks the `index_topk` tokens to attend to. Attention here is dense, which is the same while the
                            context is no longer than that; the indexer's tensors are kept as they are
    epsilon of latents      both engines: `rms_norm_eps`, 1e-5
    tap and recycling       both engines hand over the state behind the final norm, and recycle behind `shared_head.norm`
    first embedding         vLLM zeroes the embedding at position 0, SGLang does not
    shared embedding, head  both engines drop the layer's copies and take the target's
"""

from mtp_zoo.blocks import BlockSource
from mtp_zoo.corrections import dense_attention, latent_norm_eps
from mtp_zoo.layouts import (
    IN_STACK,
    INDEXER,
    LATENT_ATTENTION,
    LAYER_NORMS,
    SHARED_EXPERTS,
    SIGMOID_ROUTER,
    experts,
    in_stack_fusion,
    renames,
)
from mtp_zoo.registry import Family, TargetNames, register
from mtp_zoo.spec import HeadSpec, PerEngine

SPEC = HeadSpec(
    fuse_order="embed_hidden",
    norm_weight="direct",
    hidden_tap="post_norm",
    recycle=PerEngine.same("post_norm"),
    depth_policy="recycled",
    position_rule="hidden",
    zero_first_embedding=PerEngine(vllm=True, sglang=False, train=False),
    private_embedding="ignored",
    private_head="ignored",
    always_float=("eh_proj.weight", "norm.weight", "mlp.gate.weight", "e_score_correction_bias"),
)

BLOCK = BlockSource(
    module="glm_moe_dsa",
    config="GlmMoeDsaConfig",
    layer="GlmMoeDsaDecoderLayer",
    norm="GlmMoeDsaRMSNorm",
    rotary="GlmMoeDsaRotaryEmbedding",
    pretrained="GlmMoeDsaPreTrainedModel",
    layer_type=None,
    fixed={"mlp_layer_types": ["sparse"], "indexer_types": ["full"]},
    corrections=(latent_norm_eps, dense_attention),
    context_field="index_topk",
)

LAYER_TENSORS = (*LAYER_NORMS, *LATENT_ATTENTION, *INDEXER, *SIGMOID_ROUTER, *SHARED_EXPERTS)

RULES = (
    *in_stack_fusion(),
    *renames(IN_STACK, "depths.{d}.block.", LAYER_TENSORS),
    *experts(f"{IN_STACK}mlp.experts.", "depths.{d}.block.mlp.experts."),
)

FAMILY = register(
    Family(
        name="glm_moe_dsa",
        model_types=("glm_moe_dsa",),
        count_field="num_nextn_predict_layers",
        scope=(IN_STACK,),
        layer=IN_STACK,
        shared_parts=(),
        spec=SPEC,
        rules=RULES,
        block=BLOCK,
        target=TargetNames(
            prefixes=("model.",), embedding="embed_tokens.weight", final_norm="norm.weight", lm_head=("lm_head.weight",)
        ),
        engines={"vllm": "DeepseekV32MTP", "sglang": "GlmMoeDsaForCausalLMNextN"},
    )
)
