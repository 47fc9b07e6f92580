"""Causal attention that also gives its log-sum-exp, and whose backward takes those of a softmax over further keys.

Two softmaxes over disjoint keys merge exactly through their log-sum-exp. Backwards, the weights of one part are
exp(score - merged log-sum-exp), so a kernel's backward that is handed the merged output and log-sum-exp gives the exact
gradients of its part; ring attention works the same way.

    device, dtype                                          kernel
    CPU                                                    torch's flash attention for CPU, in FP32: in half precision its
                                                           exponentials have 15 bits, and the log-sum-exp with them
    CUDA, FP16 or BF16, widths <= 256                      torch's flash attention
    everything else, and every `reach` below the length    the blocks of this file, in plain torch

The flash kernels take keys and values of one width: the narrower is padded with zeros, which change no score and no sum
(latent attention has narrower values than keys). No kernel holds a [seq, seq] matrix, at any length. With a reach of R keys
the blocks visit O(seq * (R + QUERY_BLOCK)) pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.functional import pad

Kernel: TypeAlias = Literal["cpu_flash", "cuda_flash", "blocks"]

QUERY_BLOCK = 256
"""Queries a step of the blocks; their scores take QUERY_BLOCK * (keys in reach) entries a head."""

FLASH_ALIGNMENT = 8
"""Head widths that torch's CUDA flash kernel takes without padding are multiples of this."""


def choose_kernel(query: Tensor, key: Tensor, value: Tensor, reach: int | None = None) -> Kernel:
    """The fastest exact kernel for these tensors; see the table at the top of this file."""
    if reach is not None and reach < query.shape[2]:
        return "blocks"
    if query.device.type == "cpu":
        return "cpu_flash"
    query, key, value = _one_width(query, key, value)
    # the last two arguments: causal, and no groups of query heads
    if query.is_cuda and can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, True, False)):
        return "cuda_flash"
    return "blocks"


def _one_width(*states: Tensor) -> tuple[Tensor, ...]:
    """The same states, padded with zeros to the widest; on CUDA to a multiple of `FLASH_ALIGNMENT`."""
    width = max(each.shape[-1] for each in states)
    width += -width % FLASH_ALIGNMENT if states[0].is_cuda else 0
    return tuple(each if each.shape[-1] == width else pad(each, (0, width - each.shape[-1])) for each in states)


def _narrowed(states: Tensor, width: int) -> Tensor:
    """The states without the entries that padded them."""
    return states if states.shape[-1] == width else states[..., :width]


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
    if kernel == "blocks":
        return _blocks_forward(query, key, value, scale, reach)
    width, dtype = value.shape[-1], query.dtype
    query, key, value = _one_width(query, key, value)
    if kernel == "cpu_flash":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        query, key, value = wide(query), wide(key), wide(value)
    else:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = flash(query, key, value, 0.0, True, scale=scale)
    return _narrowed(out, width).to(dtype), lse


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
    widths = [each.shape[-1] for each in (query, key, value)]
    dtype = query.dtype
    grad, query, key, value, out = _one_width(grad, query, key, value, out)
    grad, out, lse = grad.contiguous(), out.contiguous(), lse.contiguous()
    if kernel == "cpu_flash":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        states = (wide(each) for each in (grad, query, key, value, out))
        grads = flash(*states, lse, 0.0, True, scale=scale)
    else:
        grads = _cuda_flash_backward(grad, query, key, value, out, lse, scale)
    d_query, d_key, d_value = (_narrowed(each, width).to(dtype) for each, width in zip(grads, widths, strict=True))
    return d_query, d_key, d_value


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
