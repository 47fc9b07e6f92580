"""Qwen3.5 / 3.6 / 3.8, dense (model_type qwen3_5, qwen3_5_text).

Sources:
    names, shapes, dtypes   published inventories of Qwen3.5-0.8B-Base, Qwen3.6-27B and Qwen3.8-27B-FP8: 15 tensors under
                            `mtp.`, at the top level also where the language model is nested in a vision-language model
    fusion and its order    vLLM 0.32.0 models/qwen3_5_mtp.py; SGLang 0.5.23 models/qwen3_5_mtp.py: fc([norm(e), norm(h)])
    zero-centred norms      transformers models/qwen3_5/modeling_qwen3_5.py, Qwen3_5RMSNorm: x * (1 + w)
    tap and recycling       both engines hand over the state behind the final norm, and recycle behind `mtp.norm`
    shared embedding, head  both engines take the target's; the checkpoint stores none under `mtp.`
    several depths          vLLM's Qwen3_5MultiTokenPredictor has one fusion and one norm for all `mtp.layers.{d}`
"""

from mtp_zoo.blocks import BlockSource
from mtp_zoo.keymap import Rename
from mtp_zoo.layouts import DENSE_MLP, GATED_ATTENTION, LAYER_NORMS, renames
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
    always_float=("eh_proj.weight", "enorm.weight", "hnorm.weight", "norm.weight", "layernorm.weight"),
)

BLOCK = BlockSource(
    module="qwen3_5",
    config="Qwen3_5TextConfig",
    layer="Qwen3_5DecoderLayer",
    norm="Qwen3_5RMSNorm",
    rotary="Qwen3_5TextRotaryEmbedding",
    pretrained="Qwen3_5PreTrainedModel",
    layer_type="full_attention",
)

LAYER_TENSORS = (*LAYER_NORMS, *GATED_ATTENTION, *DENSE_MLP)

RULES = (
    Rename("mtp.fc.weight", "depths.0.eh_proj.weight"),
    Rename("mtp.pre_fc_norm_embedding.weight", "depths.0.enorm.weight"),
    Rename("mtp.pre_fc_norm_hidden.weight", "depths.0.hnorm.weight"),
    Rename("mtp.norm.weight", "depths.0.norm.weight"),
    *renames("mtp.layers.{d}.", "depths.{d}.block.", LAYER_TENSORS),
)

FAMILY = register(
    Family(
        name="qwen3_5",
        model_types=("qwen3_5", "qwen3_5_text"),
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
        engines={"vllm": "Qwen3_5MTP", "sglang": "Qwen3_5ForCausalLMMTP"},
    )
)
