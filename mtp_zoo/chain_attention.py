"""Attention of the draft chain, registered with transformers as `mtp_chain`.

While a server drafts after a verified prefix that ends in slot t, its cache holds the depth-1 keys of slots <= t and the
keys of the depths it has drafted so far from t. So at depth j the query of slot t sees

    depth-1 keys of slots 0..t of its document   (the prefix: causal)
    its own keys of depths 2..j                  (one a depth: the diagonal)

and never a deeper key of another slot. Written as one masked attention that is an [S, j * S] mask; here the prefix part is
a plain causal attention per document (`prefix_attention`), the own keys are a handful of dot products, and the two are
merged by their log-sum-exp. Memory is linear in S on every device; no length is short enough for a dense mask to be made.

A layer with a sliding window of W tokens sees the last W entries of that cache, its own included. The key of depth d lies
in entry t + d - 1, whatever its RoPE position is. So at depth j the query of slot t sees

    depth-1 keys of slots s with t + j - 1 - W < s <= t     (the prefix reaches back W - (j - 1) slots)
    its own keys of depths d >= 2 with j - d < W

    W = 3, t = 5:   depth 1   slots 3 4 5
                    depth 2   slots 4 5     own 2
                    depth 3   slot  5       own 2 3
                    depth 4                 own 2 3 4
                    depth 5                 own 3 4 5

Both servers count so: vLLM 0.32.0 writes each draft's key behind the last one and adds one to the length
(v1/spec_decode/utils.py, eagle_step_slot_mapping_metadata_kernel) under a kernel that sees keys at a distance below W
(v1/attention/backends/flash_attn.py: W - 1 to the left); SGLang 0.5.23 cuts prefix and chain together to the last tokens of
the window at every step (kernels/ops/speculative/cache_locs.py, generate_draft_decode_window_kv_indices).

Layer code is untouched: `DraftHead` passes a `ChainView` as a plain keyword, and transformers hands it through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mtp_zoo.batch import Segment
from mtp_zoo.blocks import ATTENTION
from mtp_zoo.context_attention import ContextView, context_attention
from mtp_zoo.key_store import KeyStore
from mtp_zoo.prefix_attention import no_keys, prefix_backward, prefix_forward, wide


class ChainState(KeyStore):
    """Keys and values of one rollout, and the stretches of slots within which depth 1 is seen."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        super().__init__()
        self.segments = segments

    def at(self, step: int) -> ChainView:
        """The state as depth `step` (1-based) sees it."""
        return ChainView(self, step)


class ChainView:
    """One depth's view of a `ChainState`."""

    def __init__(self, state: ChainState, step: int) -> None:
        self.state = state
        self.step = step

    def visible(self, layer: int, key: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of depths 1..step; stores this depth's own."""
        return self.state.through(layer, self.step, (key, value))

    def reach(self, window: int | None) -> int | None:
        """How many prefix slots a query of this depth sees, its own included; None: all. See the top of this file."""
        return None if window is None else window - (self.step - 1)

    def own(self, window: int | None) -> slice:
        """Which of the pairs of depths 1..step are own keys that a query of this depth sees: never that of depth 1.

        Example: at depth 5 all of depths 2..5 are `slice(1, 5)`; under a window of 3 depths 3..5 are `slice(2, 5)`.
        """
        return slice(1 if window is None else max(1, self.step - window), self.step)


def chain_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    mtp_chain: ChainView | ContextView | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: query [batch, heads, seq, head_dim], key and value with fewer heads under GQA.

    Without `mtp_chain` (drafting with a KV cache) this is transformers' own sdpa attention, under `cache_mask`; on a batch that
    is cut along its slots it is `context_attention`.
    """
    if mtp_chain is None:
        mask = cache_mask(attention_mask, query.shape[2], key.shape[2], sliding_window, query.device)
        return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **kwargs)
    if isinstance(mtp_chain, ContextView):
        kwargs = {"mtp_chain": mtp_chain, "sliding_window": sliding_window, **kwargs}
        return context_attention(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    groups = query.shape[1] // key.shape[1]
    pairs = [
        (_repeat_heads(k, groups), _repeat_heads(v, groups)) for k, v in mtp_chain.visible(module.layer_idx, key, value)
    ]
    own = pairs[mtp_chain.own(sliding_window)]
    own_keys = torch.stack([k for k, _ in own]) if own else None
    own_values = torch.stack([v for _, v in own]) if own else None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    reach = mtp_chain.reach(sliding_window)
    out = _ChainFunction.apply(query, *pairs[0], own_keys, own_values, scale, mtp_chain.state.segments, reach)
    return out.transpose(1, 2).contiguous(), None


def cache_mask(mask: Tensor | None, queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """The mask of the last `queries` entries of a KV cache that still holds `keys` entries, under a sliding window.

    Args:
        mask: bool [.., queries, all entries so far], True where a key is seen; None: a single query that sees all.
        queries, keys: lengths; a cache that dropped what no window reaches holds fewer keys than the mask has columns.
        window: how many entries back a query sees, its own included; None leaves the mask as it is.

    Example: two queries behind three cached entries, window 2: rows [0 0 1 1 0] and [0 0 0 1 1].
    """
    if window is None or (queries == 1 and keys <= window):
        return mask if mask is None else mask[..., -keys:]
    entry = torch.arange(keys, device=device)
    distance = entry[keys - queries :, None] - entry[None, :]
    band = (distance >= 0) & (distance < window)
    return band[None, None] if mask is None else mask[..., -keys:] & band


def register_attention() -> None:
    """Make `mtp_chain` known to transformers; repeated calls change nothing."""
    AttentionInterface.register(ATTENTION, chain_attention)


def _repeat_heads(states: Tensor, groups: int) -> Tensor:
    return states if groups == 1 else states.repeat_interleave(groups, dim=1)


class _ChainFunction(torch.autograd.Function):
    """softmax([q K1^T | q.kd ..]) [V1; vd ..] with K1 causal inside each segment. own: [depths, B, H, S, D]."""

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
        reach: int | None,
    ) -> Tensor:
        out = query.new_zeros(*query.shape[:-1], value.shape[-1])
        lse = no_keys(query)
        for segment in segments:
            here = _stretch(segment, query)
            out[here], lse[here] = prefix_forward(query[here], key[here], value[here], scale, reach)
        if own_keys is not None and own_values is not None:
            scores = _own_scores(query, own_keys, scale)
            merged = torch.logsumexp(torch.cat([lse[None], scores]), dim=0)
            own = torch.einsum("nbhs,nbhsd->bhsd", (scores - merged).exp(), wide(own_values))
            out, lse = (wide(out) * (lse - merged).exp()[..., None] + own).to(query.dtype), merged
        ctx.save_for_backward(query, key, value, own_keys, own_values, out, lse)
        ctx.scale, ctx.segments, ctx.reach = scale, segments, reach
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, own_keys, own_values, out, lse = ctx.saved_tensors
        grad = grads[0]
        d_query, d_key, d_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for segment in ctx.segments:
            here = _stretch(segment, query)
            d_query[here], d_key[here], d_value[here] = prefix_backward(
                grad[here], query[here], key[here], value[here], out[here], lse[here], ctx.scale, ctx.reach
            )
        if own_keys is None:
            return d_query, d_key, d_value, None, None, None, None, None
        g = wide(grad)
        weights = (_own_scores(query, own_keys, ctx.scale) - lse).exp()
        inner = torch.einsum("bhsd,nbhsd->nbhs", g, wide(own_values)) - (g * wide(out)).sum(-1)
        d_scores = weights * inner * ctx.scale
        d_query += torch.einsum("nbhs,nbhsd->bhsd", d_scores, wide(own_keys)).to(query.dtype)
        d_own_keys = (d_scores[..., None] * wide(query)).to(own_keys.dtype)
        d_own_values = (weights[..., None] * g).to(own_values.dtype)
        return d_query, d_key, d_value, d_own_keys, d_own_values, None, None, None


def _own_scores(query: Tensor, own_keys: Tensor, scale: float) -> Tensor:
    return torch.einsum("bhsd,nbhsd->nbhs", wide(query), wide(own_keys)) * scale


def _stretch(segment: Segment, like: Tensor) -> tuple[Any, ...]:
    """Index of a segment in [batch, heads, seq, ...]; a plain slice where it spans all rows, so that nothing is copied."""
    rows = slice(None) if len(segment.rows) == like.shape[0] else list(segment.rows)
    return rows, slice(None), slice(segment.start, segment.stop)
