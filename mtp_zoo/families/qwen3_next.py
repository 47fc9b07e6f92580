"""Qwen3-Next (model_type qwen3_next).

Sources:
    names, shapes, dtypes   published inventory of Qwen3-Next-80B: `mtp.` at the top level, experts one by one, BF16; its config
                            has no field that counts the depths
    experts, router         transformers models/qwen3_next/modeling_qwen3_next.py: softmax, top k renormalised, no bias; a
                            shared expert behind a sigmoid gate. vLLM 0.32.0 models/qwen3_next_mtp.py, SGLang 0.5.23
                            models/qwen3_next_mtp.py
    fusion, norms, tap      as in Qwen3.5: fc([norm(e), norm(h)]), x * (1 + w), the state behind the final norm, recycled
                            behind `mtp.norm`
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
    module="qwen3_next",
    config="Qwen3NextConfig",
    layer="Qwen3NextDecoderLayer",
    norm="Qwen3NextRMSNorm",
    rotary="Qwen3NextRotaryEmbedding",
    pretrained="Qwen3NextPreTrainedModel",
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
        name="qwen3_next",
        model_types=("qwen3_next",),
        count_field=None,
        scope=("mtp.",),
        layer="mtp.layers.{d}.",
        shared_parts=("enorm", "hnorm", "eh_proj", "norm"),
        spec=SPEC,
        rules=RULES,
        block=BLOCK,
        target=TargetNames(
            prefixes=("model.", ""),
            embedding="embed_tokens.weight",
            final_norm="norm.weight",
            lm_head=("lm_head.weight",),
        ),
        engines={"vllm": "Qwen3NextMTP", "sglang": "Qwen3NextForCausalLMMTP"},
    )
)
