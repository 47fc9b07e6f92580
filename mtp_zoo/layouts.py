"""Rules that several families have in common: tensors of the same name on both sides, and the two stored forms of experts."""

from __future__ import annotations

from collections.abc import Iterable

from mtp_zoo.rules import Rename, Rule, Stack

GATED_ATTENTION = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
)
"""Grouped-query attention with norms on queries and keys; where there is an output gate, it lies in `q_proj`."""

LAYER_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")

DENSE_MLP = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")

GATED_SHARED_EXPERT = (
    "mlp.shared_expert.gate_proj.weight",
    "mlp.shared_expert.up_proj.weight",
    "mlp.shared_expert.down_proj.weight",
    "mlp.shared_expert_gate.weight",
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
