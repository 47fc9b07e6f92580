"""Attention of the draft chain, registered with transformers as `mtp_chain`.

While a server drafts after a verified prefix that ends in slot t, its cache holds the depth-1 keys of slots <= t and the
keys of the depths it has drafted so far from t. So at depth j the query of slot t sees

    depth-1 keys of slots 0..t of its document   (the prefix: causal)
    its own keys of depths 2..j                  (one a depth: the diagonal)

and never a deeper key of another slot. Written as one masked attention that is an [S, j * S] mask; here the prefix part is
a plain causal attention per document, the own keys are a handful of dot products, and the two are merged by their
log-sum-exp. Memory is linear in S. The backward of the prefix part runs on the merged output and log-sum-exp, as in ring
attention: softmax weights of the prefix are exp(score - merged log-sum-exp).

Layer code is untouched: `DraftHead` passes a `ChainView` as a plain keyword, and transformers hands it through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mtp_zoo.batch import Segment
from mtp_zoo.blocks import ATTENTION

QUERY_BLOCK = 256
"""Queries a step of the portable prefix kernel; its scores take QUERY_BLOCK * S entries a head."""


@dataclass
class ChainState:
    """Rotated keys and values of every (layer, depth) of one rollout.

    Writes are idempotent, so that the recomputation under gradient checkpointing neither appends nor sees later depths.
    """

    segments: Sequence[Segment]
    keys_values: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def at(self, step: int) -> ChainView:
        """The state as depth `step` (1-based) sees it."""
        return ChainView(self, step)


@dataclass(frozen=True)
class ChainView:
    """One depth's window on a `ChainState`."""

    state: ChainState
    step: int

    def visible(self, layer: int, key: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of depths 1..step; stores this depth's own."""
        self.state.keys_values.setdefault((layer, self.step), (key, value))
        return [*(self.state.keys_values[layer, step] for step in range(1, self.step)), (key, value)]


def chain_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    mtp_chain: ChainView | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: query [batch, heads, seq, head_dim], key and value with fewer heads under GQA.

    Without `mtp_chain` (drafting with a KV cache) this is transformers' own sdpa attention.
    """
    if mtp_chain is None:
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        return out, None
    groups = query.shape[1] // key.shape[1]
    pairs = [
        (_repeat_heads(k, groups), _repeat_heads(v, groups)) for k, v in mtp_chain.visible(module.layer_idx, key, value)
    ]
    own_keys = torch.stack([k for k, _ in pairs[1:]]) if len(pairs) > 1 else None
    own_values = torch.stack([v for _, v in pairs[1:]]) if len(pairs) > 1 else None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = _ChainFunction.apply(query, *pairs[0], own_keys, own_values, scale, mtp_chain.state.segments)
    return out.transpose(1, 2).contiguous(), None


def register_attention() -> None:
    """Make `mtp_chain` known to transformers; repeated calls change nothing."""
    AttentionInterface.register(ATTENTION, chain_attention)


def _repeat_heads(states: Tensor, groups: int) -> Tensor:
    return states if groups == 1 else states.repeat_interleave(groups, dim=1)


class _ChainFunction(torch.autograd.Function):
    """softmax([q K1^T | q.k2 .. q.kj]) [V1; v2 .. vj] with K1 causal inside each segment. own: [j - 1, B, H, S, D]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        own_keys: Tensor | None,
        own_values: Tensor | None,
        scale: float,
        segments: Sequence[Segment],
    ) -> Tensor:
        out = query.new_zeros(*query.shape[:-1], value.shape[-1])
        lse = torch.full(query.shape[:-1], -torch.inf, dtype=torch.float32, device=query.device)
        for segment in segments:
            here = _window(segment, query)
            out[here], lse[here] = _prefix_forward(query[here], key[here], value[here], scale)
        if own_keys is not None and own_values is not None:
            scores = _own_scores(query, own_keys, scale)
            merged = torch.logsumexp(torch.cat([lse[None], scores]), dim=0)
            own = torch.einsum("nbhs,nbhsd->bhsd", (scores - merged).exp(), own_values.float())
            out, lse = (out.float() * (lse - merged).exp()[..., None] + own).to(query.dtype), merged
        ctx.save_for_backward(query, key, value, own_keys, own_values, out, lse)
        ctx.scale, ctx.segments = scale, segments
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, own_keys, own_values, out, lse = ctx.saved_tensors
        grad = grads[0]
        d_query, d_key, d_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for segment in ctx.segments:
            here = _window(segment, query)
            d_query[here], d_key[here], d_value[here] = _prefix_backward(
                grad[here], query[here], key[here], value[here], out[here], lse[here], ctx.scale
            )
        if own_keys is None:
            return d_query, d_key, d_value, None, None, None, None
        g = grad.float()
        weights = (_own_scores(query, own_keys, ctx.scale) - lse).exp()
        inner = torch.einsum("bhsd,nbhsd->nbhs", g, own_values.float()) - (g * out.float()).sum(-1)
        d_scores = weights * inner * ctx.scale
        d_query += torch.einsum("nbhs,nbhsd->bhsd", d_scores, own_keys.float()).to(query.dtype)
        d_own_keys = (d_scores[..., None] * query.float()).to(own_keys.dtype)
        d_own_values = (weights[..., None] * g).to(own_values.dtype)
        return d_query, d_key, d_value, d_own_keys, d_own_values, None, None


def _own_scores(query: Tensor, own_keys: Tensor, scale: float) -> Tensor:
    return torch.einsum("bhsd,nbhsd->nbhs", query.float(), own_keys.float()) * scale


def _window(segment: Segment, like: Tensor) -> tuple[Any, ...]:
    """Index of a segment in [batch, heads, seq, ...]; a plain slice where it spans all rows, so that nothing is copied."""
    rows = slice(None) if len(segment.rows) == like.shape[0] else list(segment.rows)
    return rows, slice(None), slice(segment.start, segment.stop)


def _has_cpu_flash(query: Tensor, value: Tensor) -> bool:
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def _prefix_forward(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention of equally long queries and keys: output, and log-sum-exp [batch, heads, seq] in FP32."""
    if _has_cpu_flash(query, value):
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(query, key, value, 0.0, True, scale=scale)
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    lse = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
    for start, stop in _blocks(query.shape[2]):
        scores = _block_scores(query, key, start, stop, scale)
        lse[:, :, start:stop] = torch.logsumexp(scores, dim=-1)
        weights = (scores - lse[:, :, start:stop, None]).exp().to(value.dtype)
        out[:, :, start:stop] = weights @ value[:, :, :stop]
    return out, lse


def _prefix_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the prefix part, given the merged output and log-sum-exp."""
    if _has_cpu_flash(query, value):
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return flash(grad.contiguous(), query, key, value, out.contiguous(), lse.contiguous(), 0.0, True, scale=scale)
    d_query = torch.empty_like(query)
    d_key = torch.zeros(key.shape, dtype=torch.float32, device=key.device)
    d_value = torch.zeros(value.shape, dtype=torch.float32, device=value.device)
    inner = (grad.float() * out.float()).sum(-1, keepdim=True)
    for start, stop in _blocks(query.shape[2]):
        here = slice(start, stop)
        weights = (_block_scores(query, key, start, stop, scale) - lse[:, :, here, None]).exp()
        g = grad[:, :, here].float()
        d_value[:, :, :stop] += weights.transpose(-1, -2) @ g
        d_scores = weights * (g @ value[:, :, :stop].float().transpose(-1, -2) - inner[:, :, here]) * scale
        d_query[:, :, here] = (d_scores @ key[:, :, :stop].float()).to(query.dtype)
        d_key[:, :, :stop] += d_scores.transpose(-1, -2) @ query[:, :, here].float()
    return d_query, d_key.to(key.dtype), d_value.to(value.dtype)


def _blocks(length: int) -> list[tuple[int, int]]:
    return [(start, min(start + QUERY_BLOCK, length)) for start in range(0, length, QUERY_BLOCK)]


def _block_scores(query: Tensor, key: Tensor, start: int, stop: int, scale: float) -> Tensor:
    """FP32 scores of queries start:stop against keys 0:stop, future keys at -inf."""
    scores = (query[:, :, start:stop].float() @ key[:, :, :stop].float().transpose(-1, -2)) * scale
    slots = torch.arange(stop, device=query.device)
    return scores.masked_fill(slots[None, :] > slots[start:stop, None], -torch.inf)
