"""Qwen3.5 / 3.6 with experts (model_type qwen3_5_moe, qwen3_5_moe_text).

Sources:
    names, shapes, dtypes   published inventories of Qwen3.6-35B-A3B-NVFP4 (19 tensors, experts packed) and of Qwen3-Next-80B
                            (experts one by one), both under `mtp.`, at the top level also of vision-language models
    experts, router         transformers models/qwen3_5_moe/modeling_qwen3_5_moe.py: softmax, top k renormalised, no bias; a
                            shared expert behind a sigmoid gate. vLLM 0.32.0 and SGLang 0.5.23 models/qwen3_5_mtp.py
    all else                as the dense head: `mtp_zoo/families/qwen3_5.py`
"""

from mtp_zoo.blocks import BlockSource
from mtp_zoo.keymap import Rename
from mtp_zoo.layouts import GATED_ATTENTION, GATED_SHARED_EXPERT, LAYER_NORMS, experts, renames
from mtp_zoo.registry import Family, TargetNames, register
from mtp_zoo.spec import HeadSpec, PerEngine

SPEC = HeadSpec(
    fuse_order="embed_hidden",
    norm_weight="zero_centered",
    hidden_tap="post_norm",
    recycle=PerEngine.same("post_norm"),
    depth_policy="recycled",
    position_rule="hidden",
    zero_first_embedding=PerEngine.same(False),
    private_embedding="absent",
    private_head="absent",
    always_float=("eh_proj.weight", "norm.weight", "layernorm.weight", "mlp.gate.weight", "shared_expert_gate.weight"),
)

BLOCK = BlockSource(
    module="qwen3_5_moe",
    config="Qwen3_5MoeTextConfig",
    layer="Qwen3_5MoeDecoderLayer",
    norm="Qwen3_5MoeRMSNorm",
    rotary="Qwen3_5MoeTextRotaryEmbedding",
    pretrained="Qwen3_5MoePreTrainedModel",
    layer_type="full_attention",
)

LAYER_TENSORS = (*LAYER_NORMS, *GATED_ATTENTION, "mlp.gate.weight", *GATED_SHARED_EXPERT)

RULES = (
    Rename("mtp.fc.weight", "depths.0.eh_proj.weight"),
    Rename("mtp.pre_fc_norm_embedding.weight", "depths.0.enorm.weight"),
    Rename("mtp.pre_fc_norm_hidden.weight", "depths.0.hnorm.weight"),
    Rename("mtp.norm.weight", "depths.0.norm.weight"),
    *renames("mtp.layers.{d}.", "depths.{d}.block.", LAYER_TENSORS),
    *experts("mtp.layers.{d}.mlp.experts.", "depths.{d}.block.mlp.experts."),
)

FAMILY = register(
    Family(
        name="qwen3_5_moe",
        model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
        count_field="mtp_num_hidden_layers",
        scope=("mtp.",),
        layer="mtp.layers.{d}.",
        shared_parts=("enorm", "hnorm", "eh_proj", "norm"),
        spec=SPEC,
        rules=RULES,
        block=BLOCK,
        target=TargetNames(
            prefixes=("model.language_model.", "model.", "language_model.model.", ""),
            embedding="embed_tokens.weight",
            final_norm="norm.weight",
            lm_head=("lm_head.weight", "language_model.lm_head.weight"),
        ),
        engines={"vllm": "Qwen3_5MoeMTP", "sglang": "Qwen3_5ForCausalLMMTP"},
    )
)
