"""GLM-4.7-Flash (model_type glm4_moe_lite).

Sources:
    names, shapes, dtypes   published inventory of GLM-4.7-Flash: layer 47, behind a trunk of 47 layers; BF16, router bias FP32,
                            copies of embedding and lm_head in the layer
    fusion and its order    vLLM 0.32.0 models/glm4_moe_lite_mtp.py, SGLang 0.5.23 models/glm4_moe_lite_nextn.py:
                            eh_proj([enorm(e), hnorm(h)])
    block                   transformers models/glm4_moe_lite/modeling_glm4_moe_lite.py: as DeepSeek-V3's, one group, no yarn
    epsilon of latents      both engines: `rms_norm_eps`, 1e-5
    tap and recycling       both engines hand over the state behind the final norm; vLLM recycles the block's output, SGLang the
                            state behind `shared_head.norm`, as transformers does
    first embedding         vLLM zeroes the embedding at position 0, SGLang does not
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
    recycle=PerEngine(vllm="pre_norm", sglang="post_norm", train="post_norm"),
    depth_policy="recycled",
    position_rule="hidden",
    zero_first_embedding=PerEngine(vllm=True, sglang=False, train=False),
    private_embedding="ignored",
    private_head="ignored",
    always_float=("eh_proj.weight", "norm.weight", "mlp.gate.weight", "e_score_correction_bias"),
)

BLOCK = BlockSource(
    module="glm4_moe_lite",
    config="Glm4MoeLiteConfig",
    layer="Glm4MoeLiteDecoderLayer",
    norm="Glm4MoeLiteRMSNorm",
    rotary="Glm4MoeLiteRotaryEmbedding",
    pretrained="Glm4MoeLitePreTrainedModel",
    layer_type=None,
    fixed={"mlp_layer_types": ["sparse"]},
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
        name="glm4_moe_lite",
        model_types=("glm4_moe_lite",),
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
        engines={"vllm": "Glm4MoeLiteMTP", "sglang": "Glm4MoeLiteForCausalLMNextN"},
    )
)
