"""What an export changes in a head: which tensors leave as the base stores them, and which hold numbers that are none."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from mtp_zoo.checkpoint import CheckpointIndex, TensorReader, stored_dtype
from mtp_zoo.errors import ExportError

if TYPE_CHECKING:
    from mtp_zoo.export_plan import ExportPlan
    from mtp_zoo.head import DraftHead

SHOWN = 8
"""Names in a notice; the report has all."""


@dataclass
class Changes:
    """Filled while the head is written.

    Attributes:
        unchanged: native tensors that the base stores with the same bytes.
        changed: the others that the base has.
        not_finite: native tensors with a NaN or an infinity.
    """

    unchanged: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    not_finite: list[str] = field(default_factory=list)

    def watch(
        self, stored: Iterator[tuple[str, torch.Tensor]], index: CheckpointIndex
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Hand on tensors as they are stored, and compare each with the base's of its name; one is held at a time."""
        reader = TensorReader(index)
        for name, value in stored:
            if value.dtype.itemsize > 1 and value.numel() and not _is_finite(value):
                self.not_finite.append(name)
            entry = index.entries.get(name)
            if entry is not None:
                alike = (entry.dtype, entry.shape) == (stored_dtype(value.dtype), tuple(value.shape))
                same = alike and _is_stored(value, reader.raw(entry))
                (self.unchanged if same else self.changed).append(name)
            yield name, value
            del value

    def refuse_not_finite(self) -> None:
        """Raise ExportError with the names of tensors that hold a NaN or an infinity."""
        if self.not_finite:
            raise ExportError(
                f"Exporting a head: {len(self.not_finite)} of its tensors hold a NaN or an infinity.",
                remedy="Take a training checkpoint from before that, or write it all the same (mtp-zoo export --force).",
                problems=self.not_finite,
            )

    def notices(self, head: DraftHead, plan: ExportPlan) -> Iterator[str]:
        """Yield what the reader should know: trained tensors that leave as they came, numbers that are none."""
        trained = {name for name, value in head.named_parameters(remove_duplicate=False) if value.requires_grad}
        natives = [name for binding in plan.bindings if trained & binding.heads.keys() for name in binding.natives]
        equal = [name for name in natives if name in set(self.unchanged)]
        if equal and self.changed:
            yield f"{len(equal)} trainable tensors are stored as in the base, bit for bit: {_some(equal)}"
        if self.not_finite:
            yield f"{len(self.not_finite)} tensors hold a NaN or an infinity: {_some(self.not_finite)}"


def kept_wider(head: DraftHead, plan: ExportPlan, dtype: torch.dtype | None) -> Mapping[str, str]:
    """Return the native tensors that are stored in another dtype than the one asked for, and in which."""
    if dtype is None:
        return {}
    wanted = stored_dtype(dtype)
    exact = {n for b in plan.bindings if not all(map(head.rounds, b.heads)) for n in b.natives}
    return {tensor.name: tensor.dtype for tensor in plan.head if tensor.name in exact and tensor.dtype != wanted}


def _is_finite(value: torch.Tensor) -> bool:
    """A NaN is both the least and the greatest of its tensor; a mask of all entries would take as much memory again."""
    return all(math.isfinite(float(bound)) for bound in torch.aminmax(value))


def _is_stored(value: torch.Tensor, pieces: Iterator[bytearray]) -> bool:
    """Compare bytes piece by piece, up to the first that differs: the base's tensor is never held whole."""
    raw, offset = value.contiguous().reshape(-1).view(torch.uint8).numpy().data, 0
    for piece in pieces:
        if raw[offset : offset + len(piece)] != memoryview(piece):
            return False
        offset += len(piece)
    return True


def _some(names: list[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
