# ruff: noqa: ARG001 - the signatures are those of SGLang's kernels
"""Gated delta rule (linear attention of Qwen3-Next and Qwen3.5), in plain torch: one token after the other, in float32.

Only targets run it; a head's own block is full attention. States lie in SGLang's pools and are written back in place:
the convolution's window [slots, channels, width - 1] and the recurrent state [slots, value heads, V, K].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .ledger import stand_in

NO_TREE = "draft trees (topk > 1) are not covered by the stand-ins"


@stand_in
def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split of linear attention's fused input projections.

    Shapes: qkvz [N, 2 * key_heads * key_dim + 2 * value_heads * value_dim], ba [N, 2 * value_heads].

    Returns:
        queries, keys and values side by side, z [N, value_heads, value_dim], b and a [N, value_heads].
    """
    keys, values = key_heads * key_dim, value_heads * value_dim
    qkv, z = qkvz.split([2 * keys + values, values], -1)
    b, a = ba.split([value_heads, value_heads], -1)
    return qkv.contiguous(), z.reshape(-1, value_heads, value_dim).contiguous(), b.contiguous(), a.contiguous()


def _gates(a_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    decay = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay.unsqueeze(0), torch.sigmoid(b.float()).unsqueeze(0)


@stand_in
def fused_gdn_gating_cpu(a_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay and write strength of the gated delta rule.

    Shapes: a and b [N, value_heads]; returns two [1, N, value_heads], float32.
    """
    return _gates(a_log, a, b, dt_bias)


def _convolve(x: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> tuple[Tensor, Tensor]:
    """x [channels, T] behind window [channels, width - 1] -> output [channels, T], and the two side by side."""
    whole = torch.cat((window.to(x.dtype), x), -1)
    y = F.conv1d(whole.unsqueeze(0), weight.unsqueeze(1), bias, groups=x.shape[0])[0]
    return (F.silu(y) if silu else y), whole


def _spans(starts: Tensor) -> Iterator[tuple[int, int, int]]:
    """(sequence, first, end) of every sequence that is not empty; starts [B + 1]."""
    bounds = starts.tolist()
    return ((i, s, e) for i, (s, e) in enumerate(pairwise(bounds)) if e > s)


@stand_in
def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: Any,
) -> Tensor:
    """Causal convolution over the tokens of a ragged batch.

    Shapes: x [channels, N], weight [channels, width], query_start_loc [B + 1]; returns [channels, N].
    """
    out, kept = torch.empty_like(x), weight.shape[1] - 1
    for i, s, e in _spans(query_start_loc):
        slot = cache_indices[i]
        window = conv_states[slot] if bool(has_initial_state[i]) else torch.zeros_like(conv_states[slot])
        out[:, s:e], whole = _convolve(x[:, s:e], window, weight, bias, activation == "silu")
        conv_states[slot] = whole[:, -kept:].to(conv_states.dtype)
    return out


@stand_in
def causal_conv1d_update_cpu(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_state_indices: Tensor,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_next_token: Tensor | None = None,
    retrieve_next_sibling: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
) -> Tensor:
    """Causal convolution over one token a request, or over the drafts to verify.

    Shapes: x [B, channels], or [B, channels, T] where drafts are verified: then the window after each step goes to
    intermediate_conv_window [rows, T, channels, width - 1] and the pool stays as it is.
    """
    assert retrieve_parent_token is None, NO_TREE
    single, kept = x.dim() == 2, weight.shape[1] - 1
    x = x.unsqueeze(-1) if single else x
    out = torch.empty_like(x)
    for i, slot in enumerate(conv_state_indices.tolist()):
        if slot < 0:  # padding
            continue
        out[i], whole = _convolve(x[i], conv_states[slot], weight, bias, activation == "silu")
        if intermediate_conv_window is None or intermediate_state_indices is None:
            conv_states[slot] = whole[:, -kept:].to(conv_states.dtype)
            continue
        for t in range(x.shape[2]):
            window = whole[:, t + 1 : t + 1 + kept]
            intermediate_conv_window[intermediate_state_indices[i], t] = window.to(intermediate_conv_window.dtype)
    return out.squeeze(-1) if single else out


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    strength: Tensor,
    state: Tensor,
    *,
    unit: bool,
    after: Callable[[int, Tensor], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """One sequence of the gated delta rule.

    Args:
        q, k: [T, key heads, K].
        v: [T, value heads, V].
        decay: log of the state's decay, [T, value heads].
        strength: of writing, [T, value heads].
        state: [value heads, V, K].
        unit: scale queries and keys to length one.
        after: called with the step and the state behind it.

    Returns:
        Outputs [T, value heads, V] in v's dtype, and the last state, float32.
    """
    repeat, dtype = v.shape[1] // q.shape[1], v.dtype
    q, k, v = q.float(), k.float(), v.float()
    if unit:
        q, k = _unit(q), _unit(k)
    q = q.repeat_interleave(repeat, 1) * q.shape[-1] ** -0.5
    k = k.repeat_interleave(repeat, 1)
    state, out = state.float(), torch.empty_like(v)
    for t in range(q.shape[0]):
        state = state * decay[t].float().exp()[:, None, None]
        change = (v[t] - torch.einsum("hvk,hk->hv", state, k[t])) * strength[t].float()[:, None]
        state = state + torch.einsum("hv,hk->hvk", change, k[t])
        out[t] = torch.einsum("hvk,hk->hv", state, q[t])
        if after is not None:
            after(t, state)
    return out.to(dtype), state


@stand_in
def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    initial_state_indices: Tensor,
) -> tuple[Tensor, None, None]:
    """Gated delta rule over the tokens of a ragged batch, one token after the other.

    Shapes: q and k [1, N, key heads, K], v [1, N, value heads, V], g and beta [1, N, value heads].
    """
    assert not head_first
    out = torch.empty_like(v)
    for i, s, e in _spans(cu_seqlens):
        slot = initial_state_indices[i]
        parts = (x[0, s:e] for x in (q, k, v, g, beta))
        out[0, s:e], state = delta_rule(*parts, initial_state[slot], unit=use_qk_l2norm_in_kernel)
        initial_state[slot] = state.to(initial_state.dtype)
    return out, None, None


@stand_in
def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool = True,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """Gated delta rule over one token a request, or over the drafts to verify.

    Where drafts are verified, the state after each step goes to intermediate_states_buffer [rows, T, value heads, V, K].
    """
    assert retrieve_parent_token is None, NO_TREE
    assert not others.get("is_kda"), "Kimi's variant is not covered by the stand-ins"
    decay, strength = _gates(A_log, a, b, dt_bias)
    out = torch.empty_like(v)
    for i, s, e in _spans(cu_seqlens):
        slot = int(initial_state_indices[i])
        if slot < 0:  # padding
            continue
        after = None
        if intermediate_states_buffer is not None and intermediate_state_indices is not None:
            after = _keeper(intermediate_states_buffer[int(intermediate_state_indices[i])])
        parts = (x[0, s:e] for x in (q, k, v, decay, strength))
        state = initial_state_source[slot]
        out[0, s:e], state = delta_rule(*parts, state, unit=use_qk_l2norm_in_kernel, after=after)
        if not disable_state_update:
            initial_state_source[slot] = state.to(initial_state_source.dtype)
    return out


def _keeper(rows: Tensor) -> Callable[[int, Tensor], None]:
    def keep(step: int, state: Tensor) -> None:
        rows[step] = state.to(rows.dtype)

    return keep
