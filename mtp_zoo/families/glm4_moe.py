"""GLM-4.5, 4.5-Air, 4.6, 4.7 (model_type glm4_moe).

Sources:
    names, shapes, dtypes   layer `num_hidden_layers` (92; Air: 46), BF16 and router bias FP32; in GLM-4.5-Air-FP8, by its
                            published ignore list, attention and experts in FP8 with a scale for each channel. A copy of the
                            embedding in the layer; norms on queries and keys in the large model, not in Air
    fusion and its order    vLLM 0.32.0 models/glm4_moe_mtp.py, SGLang 0.5.23 models/glm4_moe_nextn.py:
                            eh_proj([enorm(e), hnorm(h)])
    block                   transformers models/glm4_moe/modeling_glm4_moe.py: grouped-query attention with biases on queries,
                            keys and values, RoPE on half of each head, halves turned together; a router of sigmoid scores
                            whose bias only chooses, shared experts
    tap and recycling       both engines hand over the state behind the final norm; vLLM recycles the block's output, SGLang the
                            state behind `shared_head.norm`, as transformers does
    first embedding         vLLM zeroes the embedding at position 0, SGLang does not
    shared embedding, head  both engines drop the layer's copies and take the target's
"""

from mtp_zoo.blocks import BlockSource
from mtp_zoo.layouts import (
    GROUPED_ATTENTION,
    IN_STACK,
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
    module="glm4_moe",
    config="Glm4MoeConfig",
    layer="Glm4MoeDecoderLayer",
    norm="Glm4MoeRMSNorm",
    rotary="Glm4MoeRotaryEmbedding",
    pretrained="Glm4MoePreTrainedModel",
    layer_type=None,
    fixed={"first_k_dense_replace": 0},
)

LAYER_TENSORS = (*LAYER_NORMS, *GROUPED_ATTENTION, *SIGMOID_ROUTER, *SHARED_EXPERTS)

RULES = (
    *in_stack_fusion(),
    *renames(IN_STACK, "depths.{d}.block.", LAYER_TENSORS),
    *experts(f"{IN_STACK}mlp.experts.", "depths.{d}.block.mlp.experts."),
)

FAMILY = register(
    Family(
        name="glm4_moe",
        model_types=("glm4_moe",),
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
        engines={"vllm": "Glm4MoeMTP", "sglang": "Glm4MoeForCausalLMNextN"},
    )
)
