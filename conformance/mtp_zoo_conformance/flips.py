"""Flips: heads that are wrong in one convention. A case whose gates let a flip through does not test that convention.

`CONVENTIONS` are flips of `HeadSpec` fields and apply to every family. A case adds those of its block, made by moving or
shifting weights so that our right code computes what wrong code would.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mtp_zoo.spec import Engine, HeadSpec, PerEngine

if TYPE_CHECKING:
    from mtp_zoo.head import DraftHead


@dataclass(frozen=True)
class Flip:
    """One wrong convention.

    Attributes:
        name: the convention.
        spec: what to change in the spec, for a head that follows an engine (None: the training default).
        weights: what to change in a loaded head.
    """

    name: str
    spec: Callable[[HeadSpec, Engine | None], HeadSpec] | None = None
    weights: Callable[[DraftHead], None] | None = None


def _other_order(spec: HeadSpec, engine: Engine | None) -> HeadSpec:
    del engine
    other = "hidden_embed" if spec.fuse_order == "embed_hidden" else "embed_hidden"
    return dataclasses.replace(spec, fuse_order=other)


def _other_tap(spec: HeadSpec, engine: Engine | None) -> HeadSpec:
    del engine
    return dataclasses.replace(spec, hidden_tap="pre_norm" if spec.hidden_tap == "post_norm" else "post_norm")


def _other_recycle(spec: HeadSpec, engine: Engine | None) -> HeadSpec:
    other = "pre_norm" if spec.recycle.of(engine) == "post_norm" else "post_norm"
    return dataclasses.replace(spec, recycle=PerEngine.same(other))


def _other_position(spec: HeadSpec, engine: Engine | None) -> HeadSpec:
    """Between `hidden` and `token` lies a shift of every position, to which rotary attention is blind."""
    del engine
    return dataclasses.replace(spec, position_rule="hidden" if spec.position_rule == "constant" else "constant")


def _other_first_embedding(spec: HeadSpec, engine: Engine | None) -> HeadSpec:
    return dataclasses.replace(spec, zero_first_embedding=PerEngine.same(not spec.zero_first_embedding.of(engine)))


TAP_FLIP = Flip("hidden_tap", spec=_other_tap)
"""The one flip that shows in the target's states and not in the head."""

CONVENTIONS = (
    Flip("fuse_order", spec=_other_order),
    TAP_FLIP,
    Flip("recycle", spec=_other_recycle),
    Flip("position_rule", spec=_other_position),
    Flip("zero_first_embedding", spec=_other_first_embedding),
)


def without_unit_offset(head: DraftHead) -> None:
    """Gain by the norm's weight where the family gains by one plus the weight."""
    for name, parameter in head.named_parameters():
        if "norm" in name:
            parameter.data -= 1


def with_unit_offset(head: DraftHead) -> None:
    """Gain by one plus the norm's weight where the family gains by the weight."""
    for name, parameter in head.named_parameters():
        if "norm" in name:
            parameter.data += 1


def without_qkv_bias(head: DraftHead) -> None:
    """Leave the biases of queries, keys and values out."""
    attention = _attention(head)
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.bias.data.zero_()


def without_qk_norm(head: DraftHead) -> None:
    """Queries and keys enter the attention as projected."""
    attention = _attention(head)
    attention.q_norm, attention.k_norm = nn.Identity(), nn.Identity()


def gate_in_halves(head: DraftHead) -> None:
    """Read the query projection as all queries, then all gates, where the family stores query and gate head by head."""
    projection = _attention(head).q_proj.weight
    size = _attention(head).head_dim
    halves = projection.data.unflatten(0, (2, -1, size))
    projection.data = halves.transpose(0, 1).flatten(0, 2).contiguous()


def neighbouring_rotary_pairs(head: DraftHead) -> None:
    """Rotate entries 2i and 2i+1 together where the family rotates i and i + half."""
    attention = _attention(head)
    turned = _rotary_size(head)
    order = torch.arange(attention.head_dim)
    order[:turned] = torch.cat([torch.arange(0, turned, 2), torch.arange(1, turned, 2)])
    gates = attention.q_proj.out_features // attention.o_proj.in_features  # 2 where each query head carries its gate
    for name, parts in (("q_proj", gates), ("k_proj", 1)):
        for rows in getattr(attention, name).parameters():  # of the weight, and of the bias where there is one
            heads = rows.data.unflatten(0, (-1, parts, attention.head_dim)).clone()
            heads[:, 0] = heads[:, 0, order]
            rows.data = heads.flatten(0, 2)
    for name in ("q_norm", "k_norm"):
        norm = getattr(attention, name, None)
        if norm is not None:
            norm.weight.data = norm.weight.data[order].contiguous()


def other_rotary_base(head: DraftHead) -> None:
    """Rotate every pair at twice its frequency."""
    for buffer in head.rotary.buffers():
        buffer.mul_(2)


def tiled_kv_heads(head: DraftHead) -> None:
    """Let query head h read key head h modulo the number of key heads, where the family shares a key head by neighbours."""
    attention = _attention(head)
    groups, size = attention.num_key_value_groups, attention.head_dim
    heads = attention.o_proj.in_features // size
    order = torch.arange(heads).unflatten(0, (groups, -1)).T.flatten()
    for rows in attention.q_proj.parameters():
        rows.data = rows.data.unflatten(0, (heads, -1))[order].flatten(0, 1)
    out = attention.o_proj.weight
    out.data = out.data.unflatten(1, (heads, -1))[:, order].flatten(1)


def without_shared_expert(head: DraftHead) -> None:
    """Leave the shared expert out."""
    head.get_parameter("depths.0.block.mlp.shared_expert.down_proj.weight").data.zero_()


def up_before_gate(head: DraftHead) -> None:
    """Read packed experts as up rows, then gate rows, where the family packs the gate first."""
    packed = head.get_parameter("depths.0.block.mlp.experts.gate_up_proj")
    packed.data = packed.data.unflatten(1, (2, -1)).flip(1).flatten(1, 2)


def experts_in_reverse(head: DraftHead) -> None:
    """Number the experts from the end, as a map that mixes up their order would."""
    for name in ("gate_up_proj", "down_proj"):
        packed = head.get_parameter(f"depths.0.block.mlp.experts.{name}")
        packed.data = packed.data.flip(0)


def _rotary_size(head: DraftHead) -> int:
    """Rotated entries of each attention head."""
    cos, _ = head.rotary(torch.zeros(1, 1, 1), torch.zeros(1, 1, dtype=torch.int64))
    return cos.shape[-1]


def _attention(head: DraftHead) -> Any:
    return head.get_submodule("depths.0.block.self_attn")
