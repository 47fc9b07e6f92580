"""FP8 tensors of a checkpoint: read as floats, and written back in the form in which the checkpoint holds them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mtp_zoo.checkpoint import TensorReader
from mtp_zoo.fp8 import decode, encode
from mtp_zoo.quantization import QuantizedTensor

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes: equal as integers is equal bit for bit, signed zeros included."""


class Encoded(NamedTuple):
    """A tensor and its scale as they will be stored; `kept` says that they are the checkpoint's own bytes."""

    weight: Tensor
    scale: Tensor
    kept: bool


def read_decoded(
    tensor: QuantizedTensor, reader: TensorReader, dtype: torch.dtype, device: torch.device, out: Tensor | None = None
) -> Tensor:
    """The numbers that a stored FP8 tensor stands for; it is moved to `device` as FP8, and decoded there into `out`.

    Raises:
        BrokenCheckpointError: a file has become shorter than its header says.
        ScaleMismatchError: a scale is negative or not finite.
    """
    weight, scale = reader.read(tensor.weight).to(device), reader.read(tensor.scale).to(device)
    return decode(weight, scale, tensor.scheme, dtype=dtype, out=out, what=_what(tensor))


def encoded_like(value: Tensor, base: QuantizedTensor, reader: TensorReader) -> Encoded:
    """`value` in the form of a stored FP8 tensor; one that was not changed since it was decoded gets its bytes back.

    Args:
        value: float, on the CPU, of the base's shape.
        base: the stored tensor.
        reader: of its checkpoint.

    Raises:
        ExportError: the value holds NaN or infinity.
        ScaleMismatchError: see `read_decoded`.
    """
    weight, scale = reader.read(base.weight), reader.read(base.scale)
    # A head that was loaded as BF16 and trained in FP32 holds what BF16 had kept of the decoded numbers.
    for dtype in dict.fromkeys([value.dtype, torch.bfloat16]):
        if _same_bits(decode(weight, scale, base.scheme, dtype=dtype, what=_what(base)).to(value.dtype), value):
            return Encoded(weight, scale, kept=True)
    shape = tuple(scale.shape)
    fresh = encode(value, base.scheme, scale_dtype=base.scale.dtype, scale_shape=shape, what=_what(base))
    return Encoded(*fresh, kept=False)


def _same_bits(left: Tensor, right: Tensor) -> bool:
    bits = BITS[left.dtype.itemsize]
    return torch.equal(left.view(bits), right.contiguous().view(bits))


def _what(tensor: QuantizedTensor) -> str:
    return f"'{tensor.name}' of {tensor.weight.file}"
