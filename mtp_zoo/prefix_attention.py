"""Causal attention that also gives its log-sum-exp, and whose backward takes those of a softmax over further keys.

Two softmaxes over disjoint keys merge exactly through their log-sum-exp. Backwards, the weights of one part are
exp(score - merged log-sum-exp), so a kernel's backward that is handed the merged output and log-sum-exp gives the exact
gradients of its part; ring attention works the same way.

    device, dtype                                          kernel
    CPU, equal widths of keys and values                   torch's flash attention for CPU
    CUDA, FP16 or BF16, equal widths <= 256                torch's flash attention
    everything else, and every `reach` below the length    the blocks of this file, in plain torch

None holds a [seq, seq] matrix, at any length. With a reach of R keys the blocks visit O(seq * (R + QUERY_BLOCK)) pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

Kernel: TypeAlias = Literal["cpu_flash", "cuda_flash", "blocks"]

QUERY_BLOCK = 256
"""Queries a step of the blocks; their scores take QUERY_BLOCK * (keys in reach) entries a head."""

FLASH_ALIGNMENT = 8
"""Head widths that torch's CUDA flash kernel takes without padding are multiples of this."""


def choose_kernel(query: Tensor, key: Tensor, value: Tensor, reach: int | None = None) -> Kernel:
    """The fastest exact kernel for these tensors; see the table at the top of this file."""
    banded = reach is not None and reach < query.shape[2]
    if banded or query.shape[-1] != value.shape[-1]:
        return "blocks"
    if query.device.type == "cpu":
        return "cpu_flash"
    # the last two arguments: causal, and no groups of query heads
    aligned = query.shape[-1] % FLASH_ALIGNMENT == 0
    if query.is_cuda and aligned and can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, True, False)):
        return "cuda_flash"
    return "blocks"


def prefix_forward(
    query: Float[Tensor, "batch heads seq width"],
    key: Float[Tensor, "batch heads seq width"],
    value: Float[Tensor, "batch heads seq value_width"],
    scale: float,
    reach: int | None = None,
) -> tuple[Float[Tensor, "batch heads seq value_width"], Float[Tensor, "batch heads seq"]]:
    """Causal attention of equally long queries and keys.

    Args:
        query, key, value: as many heads each.
        scale: of the scores.
        reach: the query of slot t sees the keys of slots t - reach + 1 .. t; None: 0 .. t. With 0 or less it sees none.

    Returns:
        The output in the query's dtype, and the log-sum-exp of the scaled scores in FP32, or FP64 for an FP64 query; 0 and
        -inf where no key is seen.

    Example: with `reach=2` the query of slot 5 sees keys 4 and 5, the one of slot 0 sees key 0.
    """
    if reach is not None and reach < 1:
        return query.new_zeros(*query.shape[:-1], value.shape[-1]), no_keys(query)
    kernel = choose_kernel(query, key, value, reach)
    if kernel == "cpu_flash":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(query, key, value, 0.0, True, scale=scale)
    if kernel == "cuda_flash":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, scale=scale)
        return out, lse
    return _blocks_forward(query, key, value, scale, reach)


def prefix_backward(
    grad: Float[Tensor, "batch heads seq value_width"],
    query: Float[Tensor, "batch heads seq width"],
    key: Float[Tensor, "batch heads seq width"],
    value: Float[Tensor, "batch heads seq value_width"],
    out: Float[Tensor, "batch heads seq value_width"],
    lse: Float[Tensor, "batch heads seq"],
    scale: float,
    reach: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, from the output and log-sum-exp over all keys, also those outside of this part."""
    if reach is not None and reach < 1:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    kernel = choose_kernel(query, key, value, reach)
    if kernel == "blocks":
        return _blocks_backward(grad, query, key, value, out, lse, scale, reach)
    grad, out, lse = grad.contiguous(), out.contiguous(), lse.contiguous()
    if kernel == "cpu_flash":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return flash(grad, query, key, value, out, lse, 0.0, True, scale=scale)
    return _cuda_flash_backward(grad, query, key, value, out, lse, scale)


def _cuda_flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    length = query.shape[2]
    # The state of the random numbers is read for dropout alone, cumulative lengths for ragged batches alone.
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
    offset = torch.zeros((), dtype=torch.uint64, device=query.device)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, query, key, value, out, lse, None, None, length, length, 0.0, True, seed, offset, scale=scale
    )


def _blocks_forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, reach: int | None
) -> tuple[Tensor, Tensor]:
    out, lse = query.new_empty(*query.shape[:-1], value.shape[-1]), no_keys(query)
    for rows, columns in _blocks(query.shape[2], reach):
        scores = _block_scores(query, key, rows, columns, scale, reach)
        lse[:, :, rows] = torch.logsumexp(scores, dim=-1)
        weights = (scores - lse[:, :, rows, None]).exp().to(value.dtype)
        out[:, :, rows] = weights @ value[:, :, columns]
    return out, lse


def _blocks_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    reach: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    d_query = torch.empty_like(query)
    d_key = torch.zeros_like(key, dtype=wide_dtype(key))
    d_value = torch.zeros_like(value, dtype=wide_dtype(value))
    for rows, columns in _blocks(query.shape[2], reach):
        g = wide(grad[:, :, rows])
        inner = (g * wide(out[:, :, rows])).sum(-1, keepdim=True)
        weights = (_block_scores(query, key, rows, columns, scale, reach) - lse[:, :, rows, None]).exp()
        d_value[:, :, columns] += weights.transpose(-1, -2) @ g
        d_scores = weights * (g @ wide(value[:, :, columns]).transpose(-1, -2) - inner) * scale
        d_query[:, :, rows] = (d_scores @ wide(key[:, :, columns])).to(query.dtype)
        d_key[:, :, columns] += d_scores.transpose(-1, -2) @ wide(query[:, :, rows])
    return d_query, d_key.to(key.dtype), d_value.to(value.dtype)


def wide_dtype(states: Tensor) -> torch.dtype:
    """What scores, weights and sums are computed in: FP32, or FP64 where the states are."""
    return torch.promote_types(states.dtype, torch.float32)


def wide(states: Tensor) -> Tensor:
    """The states in `wide_dtype`."""
    return states.to(wide_dtype(states))


def no_keys(query: Float[Tensor, "batch heads seq width"]) -> Float[Tensor, "batch heads seq"]:
    """The log-sum-exp over no keys."""
    return torch.full(query.shape[:-1], -torch.inf, dtype=wide_dtype(query), device=query.device)


def _blocks(length: int, reach: int | None) -> Iterator[tuple[slice, slice]]:
    """Stretches of queries, each with the keys that any of them sees.

    Example: 6 slots in blocks of 4 are queries 0:4 with keys 0:4 and queries 4:6 with keys 0:6; with a reach of 2, keys 3:6.
    """
    for start in range(0, length, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, length)
        yield slice(start, stop), slice(0 if reach is None else max(0, start - reach + 1), stop)


def _block_scores(query: Tensor, key: Tensor, rows: slice, columns: slice, scale: float, reach: int | None) -> Tensor:
    """Scores of some queries against some keys, at -inf where the query doesn't see the key."""
    scores = (wide(query[:, :, rows]) @ wide(key[:, :, columns]).transpose(-1, -2)) * scale
    slots = torch.arange(rows.stop, device=query.device)
    distance = slots[rows, None] - slots[None, columns]
    unseen = distance < 0 if reach is None else (distance < 0) | (distance >= reach)
    return scores.masked_fill_(unseen, -torch.inf)
