"""FP8 tensors: e4m3 numbers and the scales they are multiplied by; decoded to floats, encoded again.

    block     one scale a block of rows x columns       DeepSeek, Qwen: 128 x 128, `weight_scale_inv` (F32, BF16, E8M0)
    channel   one scale a row                           compressed-tensors: `weight_scale` [R, 1] or [R]
    tensor    one scale                                 (), (1,) or (1, 1)

A stack of matrices [E, R, C], as packed experts are stored, is scaled matrix by matrix. Blocks need not divide a matrix: the
last ones are smaller. What a scale means is never read off its shape: the config says it, and the shape must agree.

Sources: DeepSeek-V3 inference/kernel.py (w = q * s), vLLM 0.32.0 and SGLang 0.5.23 layers/quantization/fp8.py,
compressed-tensors 0.18.0. OCP 8-bit floating point specification: e4m3 holds up to 448, E8M0 is a bare power of two.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mtp_zoo.errors import ExportError, ScaleMismatchError
from mtp_zoo.scaling import SCALE_DTYPES, Scheme

LARGEST = 448.0
"""Largest finite e4m3 value."""

STEP = 2.0**-4
"""Largest error of e4m3 rounding, relative to the number: half of the last of three mantissa bits."""

SMALLEST_STEP = 2.0**-10
"""Largest error of e4m3 rounding below its normal range, relative to the scale: half of 2^-9."""

CHUNK = 1 << 20
"""Elements that are held in FP32 at one time: 4 MiB, which stays in a processor's cache, whatever the size of the tensor."""

TINY = 2.0**-126
"""Smallest scale: the smallest normal number of FP32 and BF16, so that no processor flushes it to zero."""


def decode(
    weight: Tensor,
    scale: Tensor,
    scheme: Scheme,
    *,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
    what: str = "an FP8 tensor",
) -> Tensor:
    """The numbers that an FP8 tensor stands for: q * s in FP32, then rounded to `dtype`.

    Args:
        weight: float8_e4m3fn [R, C] or [E, R, C].
        scale: F32, BF16 or E8M0 on the same device; shape by `scheme`.
        scheme: what one scale covers.
        dtype: of the result.
        out: where to write, of the weight's shape; may be a slice of a larger tensor, and decides the dtype.
        what: what is decoded, for messages.

    Raises:
        ScaleMismatchError: the shapes do not fit each other, or a scale is negative or not finite.

    Example: q [2, 2] = [[1, 2], [3, 4]] with one scale 0.5 is [[0.5, 1], [1.5, 2]].
    """
    shape = tuple(weight.shape)
    grid = _grid(scale, shape, scheme, what)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=weight.device)
    if out.ndim > 2 and not out.is_contiguous():
        return out.copy_(decode(weight, scale, scheme, dtype=out.dtype, what=what))
    target = out if out.ndim == 2 else out.view(-1, shape[-1])
    rows = weight.reshape(-1, shape[-1])
    at = _scale_rows(shape, scheme, grid, weight.device)
    for part in _chunks(rows):
        target[part] = _scaled(rows[part].to(torch.float32), grid[at[part]], scheme.covered(shape)[1])
    return out


def encode(
    weight: Tensor,
    scheme: Scheme,
    *,
    scale_dtype: str = "F32",
    scale_shape: tuple[int, ...] | None = None,
    what: str = "a tensor",
) -> tuple[Tensor, Tensor]:
    """The FP8 form of a float tensor: the largest number under each scale becomes 448, or as little less as it must.

    The scale is rounded to its stored dtype before anything is divided by it, and never down, so that no number leaves the
    range of e4m3. Where all numbers are zero the scale is 1.

    Args:
        weight: float [R, C] or [E, R, C].
        scheme: what one scale covers.
        scale_dtype: `F32`, `BF16` or `F8_E8M0`.
        scale_shape: one of `scheme.shapes`; the first of them by default.
        what: what is encoded, for messages.

    Returns:
        float8_e4m3fn of the weight's shape, and the scales. `decode` of both differs from `weight` by at most
        max(|w| * STEP, s * SMALLEST_STEP), s being the number's scale.

    Raises:
        ExportError: the weight holds NaN or infinity.
        ScaleMismatchError: scales of that shape do not fit the weight.
    """
    shape = tuple(weight.shape)
    scale_shape = scheme.grid(shape) if scale_shape is None else scale_shape
    _refuse(scheme.misfit(shape, scale_shape), f"Encoding {what} as FP8")
    rows = weight.detach().reshape(-1, shape[-1])
    peaks = _peaks(rows, shape, scheme)
    if scheme.kind == "tensor" and torch.Size(scale_shape).numel() == 1:
        peaks = peaks.amax().expand_as(peaks)
    if not bool(torch.isfinite(peaks).all()):
        raise ExportError(
            f"Encoding {what} as FP8: expected finite numbers, found NaN or infinity.",
            remedy="Take an earlier checkpoint of the training run, or store the head as BF16.",
        )
    if scale_dtype not in SCALE_DTYPES:
        _refuse(f"expected a scale dtype out of {SCALE_DTYPES}, got {scale_dtype}", f"Encoding {what} as FP8")
    stored = _stored_scales(peaks / LARGEST, scale_dtype)
    grid = stored.to(torch.float32).reshape(-1, peaks.shape[-1])
    quantized = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    at = _scale_rows(shape, scheme, grid, weight.device)
    for part in _chunks(rows):
        divided = _scaled(
            rows[part].to(torch.float32, copy=True), grid[at[part]], scheme.covered(shape)[1], divide=True
        )
        quantized[part] = divided.clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    flat = stored.reshape(-1)
    return quantized.view(shape), flat[: torch.Size(scale_shape).numel()].reshape(scale_shape).contiguous()


def _refuse(misfit: str | None, act: str) -> None:
    if misfit:
        raise ScaleMismatchError(
            f"{act}: {misfit}.",
            remedy="Restore the tensor, its scale and the config.json that belongs to them from the original checkpoint.",
        )


def _grid(scale: Tensor, shape: tuple[int, ...], scheme: Scheme, what: str) -> Tensor:
    """The scales in FP32 as [all rows of scales, columns of scales], checked."""
    _refuse(scheme.misfit(shape, tuple(scale.shape)), f"Decoding {what}")
    numbers = scale.to(torch.float32)
    if not bool((torch.isfinite(numbers) & (numbers >= 0)).all()):
        _refuse("expected scales that are finite and not negative, found others", f"Decoding {what}")
    grid = scheme.grid(shape)
    if numbers.numel() == 1:
        return numbers.reshape(1, 1).expand(torch.Size(grid[:-1]).numel(), grid[-1])
    return numbers.reshape(-1, grid[-1])


def _scale_rows(shape: tuple[int, ...], scheme: Scheme, grid: Tensor, device: torch.device) -> Tensor:
    """For every row of the flattened weight, the row of `grid` that scales it."""
    rows, covered = shape[-2], scheme.covered(shape)[0]
    within = torch.arange(rows, device=device) // covered
    matrices = torch.Size(shape[:-2]).numel()
    first = torch.arange(matrices, device=device) * (grid.shape[0] // max(matrices, 1))
    return (first[:, None] + within[None, :]).reshape(-1)


def _chunks(rows: Tensor) -> Iterator[slice]:
    """Slices of whole rows, each of at most CHUNK elements (or of one row)."""
    size = max(1, CHUNK // max(rows.shape[-1], 1))
    return (slice(at, at + size) for at in range(0, rows.shape[0], size))


def _scaled(numbers: Tensor, scales: Tensor, width: int, *, divide: bool = False) -> Tensor:
    """`numbers` [n, C] times (or divided by) `scales` [n, ceil(C / width)], in place."""
    whole = numbers.shape[-1] // width
    parts = [(numbers[:, : whole * width].unflatten(1, (whole, width)), scales[:, :whole, None])] if whole else []
    if whole < scales.shape[-1]:
        parts.append((numbers[:, whole * width :], scales[:, whole:]))
    for part, factor in parts:
        _ = part.div_(factor) if divide else part.mul_(factor)
    return numbers


def _peaks(rows: Tensor, shape: tuple[int, ...], scheme: Scheme) -> Tensor:
    """Largest magnitude under each scale, FP32 [.., rows of scales, columns of scales]; NaN where there is one."""
    height, width = scheme.covered(shape)
    grid = scheme.grid(shape)
    by_row = torch.zeros(rows.shape[0], grid[-1], dtype=torch.float32, device=rows.device)
    for part in _chunks(rows):
        by_row[part] = _largest(rows[part].abs(), width).to(torch.float32)
    stacked = by_row.view(*shape[:-1], grid[-1]).transpose(-1, -2)
    return _largest(stacked, height).transpose(-1, -2).contiguous()


def _largest(numbers: Tensor, size: int) -> Tensor:
    """Largest of each run of `size` along the last axis; the last run may be shorter."""
    whole = numbers.shape[-1] // size * size
    parts = [numbers[..., :whole].unflatten(-1, (-1, size)).amax(-1)] if whole else []
    if whole < numbers.shape[-1]:
        parts.append(numbers[..., whole:].amax(-1, keepdim=True))
    return torch.cat(parts, dim=-1) if parts else numbers.new_zeros(*numbers.shape[:-1], 0)


def _stored_scales(scales: Tensor, dtype: str) -> Tensor:
    """`scales` (FP32, not negative) in their stored dtype: zero as one, all others rounded up where they do not fit."""
    scales = torch.where(scales == 0, 1.0, scales.clamp_min(TINY))
    if dtype == "F32":
        return scales
    if dtype == "BF16":
        nearest = scales.to(torch.bfloat16)
        # The bits of positive floats are in the order of their values: one more is the next number.
        above = (nearest.view(torch.int16) + 1).view(torch.bfloat16)
        return torch.where(nearest.to(torch.float32) < scales, above, nearest)
    mantissa, exponent = torch.frexp(scales)
    power = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return (power + 127).clamp(0, 254).to(torch.uint8).view(torch.float8_e8m0fnu)
