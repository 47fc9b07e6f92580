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
from mtp_zoo.chain_function import ChainFunction
from mtp_zoo.context_attention import ContextView, context_attention
from mtp_zoo.document_groups import Group, Stretch, group_documents
from mtp_zoo.errors import UnsupportedAttentionError
from mtp_zoo.key_store import KeyStore
from mtp_zoo.prefix_attention import wide

BOOKKEEPING = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "output_router_logits", "is_causal"}
)
"""Keywords of transformers' layers that change nothing in what is computed here; `is_causal` only where it is True."""


class ChainState(KeyStore):
    """Keys and values of one rollout, and the stretches of slots within which depth 1 is seen."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        super().__init__()
        self.segments = segments
        self._documents: list[Stretch | Group] | None = None

    def documents(self, states: Tensor) -> Sequence[Stretch | Group]:
        """Return how documents in [batch, heads, seq, width] are attended to; decided once a rollout."""
        if self._documents is None:
            self._documents = group_documents(self.segments, (states.shape[0], states.shape[2]), states.device)
        return self._documents

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
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: query [batch, heads, seq, head_dim], key and value with fewer heads under GQA.

    Without `mtp_chain` (drafting with a KV cache) this is transformers' own sdpa attention, under `cache_mask`; on a batch that
    is cut along its slots it is `context_attention`. `s_aux` [heads] are attention sinks: the logit of an outcome without a
    value, in every softmax.

    Raises:
        UnsupportedAttentionError: the layer asks for something that would change the result and is not computed here.
    """
    chained = mtp_chain is not None
    _refuse_unsupported(module, attention_mask if chained else None, dropout, kwargs)
    query, key, value = _in_one_dtype(query, key, value)
    if isinstance(mtp_chain, ContextView):
        options: dict[str, Any] = {"mtp_chain": mtp_chain, "sliding_window": sliding_window, "s_aux": s_aux}
        return context_attention(module, query, key, value, attention_mask, 0.0, scaling, **options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if mtp_chain is None:
        mask = cache_mask(attention_mask, query.shape[2], key.shape[2], sliding_window, query.device)
        if s_aux is None:
            return sdpa_attention_forward(module, query, key, value, mask, 0.0, scale)
        return _cached_with_sinks(query, key, value, mask, scale, s_aux).transpose(1, 2).contiguous(), None
    pairs = mtp_chain.visible(module.layer_idx, key, value)
    prefix, own = pairs[0], pairs[mtp_chain.own(sliding_window)]
    documents, reach = mtp_chain.state.documents(query), mtp_chain.reach(sliding_window)
    tensors = (each for pair in (prefix, *own) for each in pair)
    out = ChainFunction.apply(query, s_aux, documents, scale, reach, *tensors)
    return out.transpose(1, 2).contiguous(), None


def _refuse_unsupported(module: Any, mask: Tensor | None, dropout: float, kwargs: dict[str, Any]) -> None:
    """Refuse every keyword that is set and that no path here honours, by name."""
    unset = (None, False)
    named = [
        name for name, value in kwargs.items() if name not in BOOKKEEPING and not any(value is each for each in unset)
    ]
    named += ["is_causal=False"] if kwargs.get("is_causal") is False else []
    named += [f"dropout={dropout}"] if dropout else []
    # A mask of one entry is what a sparse layer is handed so that it can cut its indexer's part out of it.
    named += [f"attention_mask {list(mask.shape)}"] if mask is not None and mask.numel() != 1 else []
    if named:
        raise UnsupportedAttentionError(
            f"Running the attention of {type(module).__name__}: the layer asks for something that the draft chain does not "
            "compute.",
            remedy="Set what the layer asks for to none in the head's config, or train this head with another attention.",
            problems=named,
        )


def _in_one_dtype(*states: Tensor) -> tuple[Tensor, ...]:
    """The states in the dtype of a matrix product here: that of the autocast context, else the widest of theirs.

    Norms with FP32 weights hand out FP32 queries and keys beside half-precision values.
    """
    device = states[0].device.type
    widest = torch.promote_types(torch.promote_types(states[0].dtype, states[1].dtype), states[2].dtype)
    cast = torch.is_autocast_enabled(device) and widest != torch.float64
    dtype = torch.get_autocast_dtype(device) if cast else widest
    return tuple(each.to(dtype) for each in states)


def _cached_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, sinks: Tensor
) -> Tensor:
    """Attention of the few queries of a draft step over a KV cache, with sinks; scores and weights in FP32."""
    with torch.autocast(query.device.type, enabled=False):
        groups = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
        scores = wide(query) @ wide(key).transpose(-1, -2) * scale
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        sink = wide(sinks)[None, :, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
        return (weights @ wide(value)).to(query.dtype)


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
