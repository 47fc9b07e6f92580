"""The softmax of the draft chain, forwards and backwards, with statistics in FP32 whatever the dtype and the autocast context.

    out = softmax([sink | q K1^T | q.k2 | q.k3 ..]) [0; V1; v2; v3; ..]       with K1 causal inside each document

Memory. Each depth saves its query, its output, and the keys and values that it was handed, with as few heads as the layer
has: depths share the saved keys and values, since each is one tensor, so a layer holds O(S + K) entries a slot and not
O(K^2). Keys are repeated for groups of query heads inside a kernel call alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtp_zoo.document_groups import Group, Stretch
from mtp_zoo.prefix_attention import prefix_backward, prefix_forward, wide, wide_dtype


class ChainFunction(torch.autograd.Function):
    """Attention of one depth; see the top of this file.

    Args of `apply`:
        query: [batch, heads, seq, width].
        sinks: [heads], the logit of an extra outcome without a value; None: there is none.
        documents: from `group_documents`.
        scale: of the scores.
        reach: how many prefix slots a query sees, see `prefix_forward`.
        keys_values: the prefix's key and value [batch, key heads, seq, width], and then those of each own depth.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        sinks: Tensor | None,
        documents: Sequence[Stretch | Group],
        scale: float,
        reach: int | None,
        *keys_values: Tensor,
    ) -> Tensor:
        """Return [batch, heads, seq, value width]."""
        with torch.autocast(query.device.type, enabled=False):
            key, value, *own = keys_values
            out, lse = _prefix(query, key, value, documents, scale, reach)
            out, lse = _with_own(out, lse, query, own, scale)
            if sinks is not None:
                out, lse = _with_sinks(out, lse, sinks)
        ctx.save_for_backward(query, sinks, out, lse, *keys_values)
        ctx.documents, ctx.scale, ctx.reach = documents, scale, reach
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradient of every tensor of `apply`."""
        query, sinks, out, lse, key, value, *own = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            d_query, d_key, d_value = _prefix_gradients(ctx, grad, query, key, value, out, lse)
            inner = (wide(grad) * wide(out)).sum(-1)
            d_own: list[Tensor] = []
            for own_key, own_value in zip(own[::2], own[1::2], strict=True):
                pair, d_part = _own_gradients(grad, query, own_key, own_value, inner, lse, ctx.scale)
                d_query += d_part
                d_own += pair
            d_sinks = None
            if sinks is not None:  # an outcome of value 0: its weight takes from all others
                weights = (wide(sinks)[None, :, None] - lse).exp()
                d_sinks = -(weights * inner).sum((0, 2)).to(sinks.dtype)
        return d_query.to(query.dtype), d_sinks, None, None, None, d_key, d_value, *d_own


def _prefix(
    query: Tensor, key: Tensor, value: Tensor, documents: Sequence[Stretch | Group], scale: float, reach: int | None
) -> tuple[Tensor, Tensor]:
    """Causal attention inside each document; slots of no document get 0 and a log-sum-exp of -inf."""
    out = _by_slot(query, value.shape[-1], query.dtype, 0.0)
    lse = _by_slot(query, 1, wide_dtype(query), -torch.inf)
    for part in documents:
        keys, values = (_for_heads(part.take(each), query.shape[1]) for each in (key, value))
        some, rest = prefix_forward(part.take(query), keys, values, scale, reach)
        part.put_(out, some)
        part.put_(lse, rest[..., None])
    return out, lse.squeeze(-1)


def _with_own(out: Tensor, lse: Tensor, query: Tensor, own: Sequence[Tensor], scale: float) -> tuple[Tensor, Tensor]:
    """The prefix's softmax merged with one over the own keys."""
    if not own:
        return out, lse
    scores = [_own_scores(query, key, scale) for key in own[::2]]
    merged = torch.logsumexp(torch.stack([lse, *scores]), dim=0)
    total = _scaled(out, (lse - merged).exp())
    for score, value in zip(scores, own[1::2], strict=True):
        by_group = _grouped(total, value.shape[1])
        by_group += _grouped((score - merged).exp()[..., None], value.shape[1]) * wide(value)[:, :, None]
    return total.to(query.dtype), merged


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """A softmax merged with one more outcome a head, which has a logit and no value."""
    merged = torch.logaddexp(lse, wide(sinks)[None, :, None])
    return _scaled(out, (lse - merged).exp()).to(out.dtype), merged


def _prefix_gradients(
    ctx: Any, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query (in FP32), key and value from the prefix's part of the softmax."""
    d_query = _by_slot(query, query.shape[-1], query.dtype, 0.0)
    d_key, d_value = (_by_slot(each, each.shape[-1], each.dtype, 0.0) for each in (key, value))
    for part in ctx.documents:
        keys, values = (_for_heads(part.take(each), query.shape[1]) for each in (key, value))
        given = (part.take(grad), part.take(query), keys, values, part.take(out), part.take(lse[..., None])[..., 0])
        part_query, part_key, part_value = prefix_backward(*given, ctx.scale, ctx.reach)
        part.put_(d_query, part_query)
        part.put_(d_key, _of_key_heads(part_key, key.shape[1]))
        part.put_(d_value, _of_key_heads(part_value, value.shape[1]))
    return wide(d_query), d_key, d_value


def _own_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, inner: Tensor, lse: Tensor, scale: float
) -> tuple[list[Tensor], Tensor]:
    """Gradients of an own key and value, and the query's from them, in FP32."""
    heads = key.shape[1]
    weights = (_own_scores(query, key, scale) - lse).exp()
    d_scores = weights * (_own_scores(grad, value, 1.0) - inner) * scale
    d_query = _grouped(d_scores[..., None], heads) * wide(key)[:, :, None]
    d_key = torch.einsum("bhgs,bhgsd->bhsd", _grouped(d_scores, heads), _grouped(wide(query), heads))
    d_value = torch.einsum("bhgs,bhgsd->bhsd", _grouped(weights, heads), _grouped(wide(grad), heads))
    return [d_key.to(key.dtype), d_value.to(value.dtype)], d_query.flatten(1, 2)


def _own_scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """[batch, heads, seq], each query's product with the key in its own slot."""
    products = torch.einsum("bhgsd,bhsd->bhgs", _grouped(wide(query), key.shape[1]), wide(key))
    return products.flatten(1, 2) * scale


def _grouped(values: Tensor, heads: int) -> Tensor:
    """[batch, key heads, group, seq, ...] of [batch, heads, seq, ...]; a view."""
    return values.unflatten(1, (heads, -1))


def _for_heads(values: Tensor, heads: int) -> Tensor:
    """Keys or values, repeated for each query head of their group."""
    return values if values.shape[1] == heads else values.repeat_interleave(heads // values.shape[1], dim=1)


def _of_key_heads(grads: Tensor, heads: int) -> Tensor:
    """Gradients of repeated keys or values, summed over each group."""
    return grads if grads.shape[1] == heads else _grouped(wide(grads), heads).sum(2).to(grads.dtype)


def _scaled(out: Tensor, factor: Tensor) -> Tensor:
    return wide(out) * factor[..., None]


def _by_slot(like: Tensor, width: int, dtype: torch.dtype, fill: float) -> Tensor:
    """[batch, heads, seq, width] whose memory lies slot by slot: what follows an attention layer then copies nothing."""
    batch, heads, seq = like.shape[:3]
    return torch.full((batch, seq, heads, width), fill, dtype=dtype, device=like.device).transpose(1, 2)
