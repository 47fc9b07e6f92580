"""One Qwen3.5 MTP layer in plain torch, written from the family's published conventions and from no library's code.

Each convention is a field of `Conventions`, so that a test can flip it and see that it matters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import silu


@dataclasses.dataclass(frozen=True)
class Conventions:
    """What the shapes of the tensors do not say."""

    embedding_first: bool = True
    norm_offset: float = 1.0
    gate: Literal["per_head", "halves", "none"] = "per_head"
    rotary_fraction: float = 0.25
    rotary_pairs: Literal["halves", "neighbours"] = "halves"
    qk_norm: bool = True
    kv_heads: Literal["in_turn", "tiled"] = "in_turn"
    output_norm: bool = True
    theta: float | None = None


def mtp_layer(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    embeddings: Tensor,
    hidden: Tensor,
    positions: Tensor,
    conventions: Conventions | None = None,
) -> Tensor:
    """The normed output of depth 1, [batch, seq, hidden].

    Args:
        weights: the checkpoint's `mtp.*` tensors, under their native names.
        config: the language model's configuration.
        embeddings: of the token that follows each slot's, [batch, seq, hidden].
        hidden: the target's state of each slot, behind its final norm, [batch, seq, hidden].
        positions: of the hidden states, [seq].
    """
    how = conventions or Conventions()

    def norm(x: Tensor, name: str) -> Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt()
        return x * scale * (how.norm_offset + weights[f"mtp.{name}.weight"])

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"mtp.{name}.weight"].T

    pair = [norm(embeddings, "pre_fc_norm_embedding"), norm(hidden, "pre_fc_norm_hidden")]
    x = linear(torch.cat(pair if how.embedding_first else pair[::-1], dim=-1), "fc")

    y = norm(x, "layers.0.input_layernorm")
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    packed = linear(y, "layers.0.self_attn.q_proj")
    if how.gate == "halves":
        query, gate = packed.unflatten(-1, (2, heads, size)).unbind(-3)
    else:
        query, gate = packed.unflatten(-1, (heads, 2, size)).unbind(-2)
    key = linear(y, "layers.0.self_attn.k_proj").unflatten(-1, (kv_heads, size))
    value = linear(y, "layers.0.self_attn.v_proj").unflatten(-1, (kv_heads, size))
    if how.qk_norm:
        query, key = norm(query, "layers.0.self_attn.q_norm"), norm(key, "layers.0.self_attn.k_norm")
    query, key = (rotate(part, positions, config, how) for part in (query, key))
    groups = heads // kv_heads
    if how.kv_heads == "in_turn":  # queries 0..groups-1 share key 0
        key, value = key.repeat_interleave(groups, dim=2), value.repeat_interleave(groups, dim=2)
    else:
        key, value = key.repeat(1, 1, groups, 1), value.repeat(1, 1, groups, 1)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / size**0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    mixed = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(future, -torch.inf).softmax(-1), value)
    if how.gate != "none":
        mixed = mixed * gate.sigmoid()
    x = x + linear(mixed.flatten(-2), "layers.0.self_attn.o_proj")

    y = norm(x, "layers.0.post_attention_layernorm")
    inner = silu(linear(y, "layers.0.mlp.gate_proj")) * linear(y, "layers.0.mlp.up_proj")
    x = x + linear(inner, "layers.0.mlp.down_proj")
    return norm(x, "norm") if how.output_norm else x


def rotate(x: Tensor, positions: Tensor, config: Mapping[str, Any], how: Conventions) -> Tensor:
    """Rotary embedding of the first part of each head's [batch, seq, heads, size]."""
    size = int(x.shape[-1] * how.rotary_fraction)
    theta = how.theta or config["rope_parameters"]["rope_theta"]
    angles = positions[:, None] * theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    cos, sin = (part.float()[None, :, None] for part in (angles.cos(), angles.sin()))
    turned, rest = x[..., :size], x[..., size:]
    if how.rotary_pairs == "halves":
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([turned, rest], dim=-1)
