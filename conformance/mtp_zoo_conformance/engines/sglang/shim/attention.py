# ruff: noqa: ARG001 - the signatures are those of SGLang's kernels
"""The two kernels of SGLang's CPU attention backend `intel_amx`, in plain torch.

Keys and values are rows of the pool's buffers [slots, kv heads, D]; `req_to_token` [requests, positions] names the row of
each position. Absorbed latent attention (MLA) is the case of one KV head whose values are a view of its keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .ledger import stand_in

PLAIN_ONLY = "cross attention, scaled caches and draft trees are not covered by the stand-ins"


def attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *, scale: float, cap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """Attention of one request in float32.

    Args:
        q: [Tq, heads, D]; k: [Tk, kv heads, D]; v: [Tk, kv heads, DV].
        visible: [Tq, Tk] bool: which key a query may see.
        scale: of the scores.
        cap: bound of the scores by tanh; 0 for none.
        sinks: [heads], a score that takes probability and gives nothing.

    Returns:
        [Tq, heads, DV], float32.
    """
    repeat = q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(repeat, 1), v.float().repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if cap > 0:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : k.shape[0]], v)


def visibility(first: int, end: int, *, causal: bool, window: int) -> Tensor:
    """[end - first, end] bool: what the queries at positions first..end-1 see of positions 0..end-1.

    Args:
        window: number of keys that a query sees, itself included; 0 for all.
    """
    query, key = torch.arange(first, end)[:, None], torch.arange(end)[None]
    seen = torch.ones(end - first, end, dtype=torch.bool)
    if causal:
        seen &= key <= query
    if window > 0:
        seen &= key > query - window
    return seen


@stand_in
def extend_attention_cpu(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    out: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    requests: Tensor,
    seq_lens: Tensor,
    new_lens: Tensor,
    new_starts: Tensor,
    longest: int,
    scale: float,
    cap: float,
    is_cross: bool,
    window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    causal: bool,
) -> None:
    """Attention of new tokens over themselves and the KV cache before them.

    Shapes: q [N, heads, D], k and v the new tokens' (None: they lie in the buffers), out [N, heads, DV], written in place.
    """
    assert not is_cross, PLAIN_ONLY
    assert (k_scale, v_scale, tree_mask) == (1.0, 1.0, None), PLAIN_ONLY
    for i, (whole, new, start) in enumerate(
        zip(seq_lens.tolist(), new_lens.tolist(), new_starts.tolist(), strict=True)
    ):
        if new == 0:
            continue
        rows = req_to_token[int(requests[i]), :whole].long()
        keys, values = _past_and_new(k, v, k_buffer, v_buffer, rows, start, new)
        seen = visibility(whole - new, whole, causal=causal, window=window)
        y = attend(q[start : start + new], keys, values, seen, scale=scale, cap=cap or 0.0, sinks=sinks)
        out[start : start + new] = y.to(out.dtype)


def _past_and_new(
    k: Tensor | None, v: Tensor | None, k_buffer: Tensor, v_buffer: Tensor, rows: Tensor, start: int, new: int
) -> tuple[Tensor, Tensor]:
    if k is None or v is None:
        return k_buffer[rows], v_buffer[rows]
    keys = k[start : start + new].reshape(new, -1, k.shape[-1])
    values = v[start : start + new].reshape(new, -1, v.shape[-1])
    if rows.numel() == new:  # un-absorbed latent attention has no past, and rows of another shape in the buffers
        return keys, values
    past = rows[:-new]
    return torch.cat((k_buffer[past].to(k.dtype), keys)), torch.cat((v_buffer[past].to(v.dtype), values))


@stand_in
def decode_attention_cpu(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    out: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    slots: Tensor,
    scratch: Tensor,
    req_to_token: Tensor,
    requests: Tensor,
    seq_lens: Tensor,
    scale: float,
    cap: float,
    is_cross: bool,
    window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Attention of one new token a request over the KV cache, which it joins.

    Shapes: q [B, heads, D], k [B, kv heads, D], slots [B] the new tokens' rows, out [B, heads, DV], written in place.
    """
    assert not is_cross, PLAIN_ONLY
    assert (k_scale, v_scale) == (1.0, 1.0), PLAIN_ONLY
    if k is not None and v is not None:
        k_buffer[slots.long()] = k.view(k.shape[0], -1, k_buffer.shape[-1]).to(k_buffer.dtype)
        if v_buffer.data_ptr() != k_buffer.data_ptr():  # absorbed latent attention: values are a view of the keys
            v_buffer[slots.long()] = v.view(v.shape[0], -1, v_buffer.shape[-1]).to(v_buffer.dtype)
    for i, whole in enumerate(seq_lens.tolist()):
        rows = req_to_token[int(requests[i]), :whole].long()
        seen = visibility(whole - 1, whole, causal=True, window=window)
        y = attend(q[i : i + 1], k_buffer[rows], v_buffer[rows], seen, scale=scale, cap=cap or 0.0, sinks=sinks)
        out[i : i + 1] = y.to(out.dtype)
