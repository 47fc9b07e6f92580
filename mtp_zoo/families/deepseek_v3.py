"""DeepSeek-V3, R1, V3.1 (model_type deepseek_v3).

Sources:
    names, shapes, dtypes   published inventory of DeepSeek-R1: layer 61, behind a trunk of 61 layers; projections and experts
                            in FP8 blocks, router bias FP32, all else BF16; copies of embedding and lm_head in the layer
    fusion and its order    vLLM 0.32.0 models/deepseek_mtp.py, SGLang 0.5.23 models/deepseek_nextn.py:
                            eh_proj([enorm(e), hnorm(h)]); the paper (arXiv 2412.19437, eq. 21) prints [h, e]
    block                   transformers models/deepseek_v3/modeling_deepseek_v3.py: latent attention with interleaved RoPE and
                            yarn, a router of sigmoid scores whose bias only chooses, groups of experts, shared experts
    epsilon of latents      both engines, models/deepseek_v2.py: `rms_norm_eps`
    tap and recycling       both engines hand over the state behind the final norm, and recycle behind `shared_head.norm`
    first embedding         vLLM zeroes the embedding at position 0 (vllm#33299), SGLang does not; the token there is a real one
    shared embedding, head  both engines drop the layer's copies and take the target's
"""

from mtp_zoo.blocks import BlockSource
from mtp_zoo.corrections import latent_norm_eps
from mtp_zoo.layouts import (
    IN_STACK,
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
    module="deepseek_v3",
    config="DeepseekV3Config",
    layer="DeepseekV3DecoderLayer",
    norm="DeepseekV3RMSNorm",
    rotary="DeepseekV3RotaryEmbedding",
    pretrained="DeepseekV3PreTrainedModel",
    layer_type=None,
    fixed={"first_k_dense_replace": 0},
    corrections=(latent_norm_eps,),
)

LAYER_TENSORS = (*LAYER_NORMS, *LATENT_ATTENTION, *SIGMOID_ROUTER, *SHARED_EXPERTS)

RULES = (
    *in_stack_fusion(),
    *renames(IN_STACK, "depths.{d}.block.", LAYER_TENSORS),
    *experts(f"{IN_STACK}mlp.experts.", "depths.{d}.block.mlp.experts."),
)

FAMILY = register(
    Family(
        name="deepseek_v3",
        model_types=("deepseek_v3",),
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
        engines={"vllm": "DeepSeekMTP", "sglang": "DeepseekV3ForCausalLMNextN"},
    )
)
