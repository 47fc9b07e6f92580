"""Rules that several families have in common: fusions, tensors of the same name on both sides, and the two stored forms of
experts. A rule applies where the head has its tensor, so that optional tensors (biases, norms) stand here too."""

from __future__ import annotations

from collections.abc import Iterable

from mtp_zoo.rules import Rename, Rule, Skip, Stack

GATED_ATTENTION = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
)
"""Grouped-query attention with norms on queries and keys; where there is an output gate, it lies in `q_proj`."""

GROUPED_ATTENTION = (
    *GATED_ATTENTION,
    "self_attn.q_proj.bias",
    "self_attn.k_proj.bias",
    "self_attn.v_proj.bias",
)
"""Grouped-query attention with optional biases and optional norms on queries and keys."""

LATENT_ATTENTION = (
    "self_attn.q_proj.weight",
    "self_attn.q_a_proj.weight",
    "self_attn.q_a_proj.bias",
    "self_attn.q_a_layernorm.weight",
    "self_attn.q_b_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight",
    "self_attn.kv_a_proj_with_mqa.bias",
    "self_attn.kv_a_layernorm.weight",
    "self_attn.kv_b_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.o_proj.bias",
)
"""Latent attention (MLA); queries come through a latent of their own or straight from `q_proj`."""

INDEXER = (
    "self_attn.indexer.wq_b.weight",
    "self_attn.indexer.wk.weight",
    "self_attn.indexer.weights_proj.weight",
    "self_attn.indexer.k_norm.weight",
    "self_attn.indexer.k_norm.bias",
)
"""Selects the tokens of sparse attention (DSA)."""

LAYER_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")

DENSE_MLP = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")

GATED_SHARED_EXPERT = (
    "mlp.shared_expert.gate_proj.weight",
    "mlp.shared_expert.up_proj.weight",
    "mlp.shared_expert.down_proj.weight",
    "mlp.shared_expert_gate.weight",
)

SIGMOID_ROUTER = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")
"""A router of sigmoid scores; the bias takes part in the choice of experts only."""

SHARED_EXPERTS = (
    "mlp.shared_experts.gate_proj.weight",
    "mlp.shared_experts.up_proj.weight",
    "mlp.shared_experts.down_proj.weight",
)

IN_STACK = "model.layers.{n}."
"""A depth that is one more layer behind the trunk's."""


def in_stack_fusion() -> tuple[Rule, ...]:
    """Fusion and output norm of a depth in the trunk's stack, and the copies of the target's matrices that some releases put
    beside them: both engines drop them and use the target's."""
    head = "depths.{d}."
    return (
        *renames(IN_STACK, head, ("enorm.weight", "hnorm.weight", "eh_proj.weight")),
        Rename(f"{IN_STACK}shared_head.norm.weight", f"{head}norm.weight"),
        Skip(f"{IN_STACK}embed_tokens.weight", "engines use the target's embedding", copy_of="embedding"),
        Skip(f"{IN_STACK}shared_head.head.weight", "engines use the target's lm_head", copy_of="lm_head"),
    )


def renames(native: str, head: str, names: Iterable[str]) -> tuple[Rule, ...]:
    """Tensors that have the same name behind a prefix on either side."""
    return tuple(Rename(f"{native}{name}", f"{head}{name}") for name in names)


def experts(native: str, head: str) -> tuple[Rule, ...]:
    """The experts of transformers' layers, `gate_up_proj` [E, 2I, H] (gate rows first) and `down_proj` [E, H, I].

    Stored one tensor an expert and projection, or packed just as they are held. Which one a checkpoint has, its names tell;
    a head that comes from no checkpoint is written in the first form, which every engine reads.

    Example: `experts("mtp.layers.{d}.mlp.experts.", "depths.{d}.block.mlp.experts.")` claims
    `mtp.layers.0.mlp.experts.7.up_proj.weight` [I, H] as `gate_up_proj[7, I:2I]`.
    """
    return (
        Stack((f"{native}{{e}}.gate_proj.weight", f"{native}{{e}}.up_proj.weight"), f"{head}gate_up_proj"),
        Stack((f"{native}{{e}}.down_proj.weight",), f"{head}down_proj"),
        Rename(f"{native}gate_up_proj", f"{head}gate_up_proj"),
        Rename(f"{native}down_proj", f"{head}down_proj"),
    )
