"""Flips of latent attention; see `flips`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mtp_zoo.head import DraftHead

DEFAULT_EPS = 1e-6
"""Epsilon of transformers' norms where none is given, as in its latent attention (models/deepseek_v3)."""


def rotary_halves(head: DraftHead) -> None:
    """Rotate entries i and i + half together where the family rotates 2i and 2i + 1."""
    attention = _attention(head)
    size, nope = attention.qk_rope_head_dim, attention.qk_nope_head_dim
    order = torch.arange(size).unflatten(0, (2, -1)).T.flatten()  # 0, half, 1, half + 1, ..
    keys, queries = attention.kv_a_proj_with_mqa.weight, attention.q_b_proj.weight
    keys.data[-size:] = keys.data[-size:][order]
    heads = queries.data.unflatten(0, (-1, nope + size))
    heads[:, nope:] = heads[:, nope:][:, order]


def without_mscale(head: DraftHead) -> None:
    """Scale the scores by the size of a head alone, where the family has a second factor for YaRN."""
    attention = _attention(head)
    attention.scaling = attention.qk_head_dim**-0.5


def default_latent_eps(head: DraftHead) -> None:
    """Norm the latents with transformers' default epsilon instead of the config's."""
    attention = _attention(head)
    for norm in (attention.q_a_layernorm, attention.kv_a_layernorm):
        norm.variance_epsilon = DEFAULT_EPS


def _attention(head: DraftHead) -> Any:
    return head.get_submodule("depths.0.block.self_attn")
