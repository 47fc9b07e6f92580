"""DeepSeek-V3.2, V3.2-Exp, V3.2-Speciale (model_type deepseek_v32).

Sources:
    names, shapes, dtypes   as DeepSeek-V3 (layer 61, FP8 blocks, copies of embedding and lm_head), and the indexer's, which the
                            published inventory of GLM-5.1 lists under the same names
    fusion and its order    vLLM 0.32.0 models/deepseek_v32, SGLang 0.5.23 models/deepseek_nextn.py:
                            eh_proj([enorm(e), hnorm(h)])
    block                   transformers models/deepseek_v32/modeling_deepseek_v32.py: DeepSeek-V3's, with an indexer that
                            picks the `index_topk` tokens to attend to. Attention here is dense, which is the same while the
                            context is no longer than that; the indexer's tensors are kept as they are
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
    module="deepseek_v32",
    config="DeepseekV32Config",
    layer="DeepseekV32DecoderLayer",
    norm="DeepseekV32RMSNorm",
    rotary="DeepseekV32RotaryEmbedding",
    pretrained="DeepseekV32PreTrainedModel",
    layer_type=None,
    fixed={"mlp_layer_types": ["sparse"]},
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
        name="deepseek_v32",
        model_types=("deepseek_v32",),
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
        engines={"vllm": "DeepseekV32MTP", "sglang": "DeepseekV3ForCausalLMNextN"},
    )
)
