"""What has to be read of a checkpoint to fill the rows of a head that this process holds: all of them, or some.

    Move    slices of a native and of a head tensor that are the same numbers      the key map's, of whole tensors
    rows    of a head tensor, counted along its first axis                         what this process holds of it
    Read    rows of a stored tensor, and the moves out of them into held rows      what it reads for that

Worked example: `qkv` [6, H] is filled from `q` [3, H] and `kv` [3, H], laid end to end. A process that holds rows 2..4 of `qkv`
reads row 2 of `q` into row 0 of what it holds, and rows 0..1 of `kv` into rows 1..2. Of experts stacked on the first axis, it
reads those whose number is among its rows, and nothing of the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from mtp_zoo.checkpoint import TensorEntry, TensorReader, stored_dtype
from mtp_zoo.quantization import QuantizedTensor
from mtp_zoo.quantized_tensors import read_decoded
from mtp_zoo.rules import Binding, Index, Move

Stored: TypeAlias = TensorEntry | QuantizedTensor


@dataclass(frozen=True)
class Read:
    """Rows of one stored tensor, and where their numbers go.

    Attributes:
        stored: cut to these rows; an FP8 tensor together with the scales of these rows.
        moves: `native_index` counts in `stored` (empty where all of it is taken), `head_index` in the
            held rows.
    """

    stored: Stored
    moves: tuple[Move, ...]

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """What is read."""
        return entries_of(self.stored)


def entries_of(stored: Stored) -> tuple[TensorEntry, ...]:
    """The tensors of a checkpoint that hold it: one, or an FP8 weight and its scale."""
    return (stored.weight, stored.scale) if isinstance(stored, QuantizedTensor) else (stored,)


def plan_reads(binding: Binding, tensors: Mapping[str, Stored], held: Mapping[str, range]) -> list[Read]:
    """What to read for one binding, in the order of its moves, no byte twice.

    Args:
        binding: of a load plan.
        tensors: every stored tensor of the plan, by native name.
        held: the rows that are held of every head tensor; of one without axes, `range(1)`.
    """
    cuts: dict[str, list[_Cut]] = {}
    for move in binding.moves:
        cut = _cut(move, binding, held[move.head])
        if cut is not None:
            cuts.setdefault(move.native, []).append(cut)
    return [read for native, found in cuts.items() for read in _joined(tensors[native], found)]


def run_read(read: Read, values: Mapping[str, Tensor], reader: TensorReader) -> None:
    """Fill what one read fills: straight in its place where the bytes are the same there, else through one buffer.

    Args:
        read: from `plan_reads`.
        values: the held rows of every head tensor, without a graph.
        reader: of the checkpoint.

    Raises:
        BrokenCheckpointError, ScaleMismatchError: see `read_decoded`.
    """
    first, stored = read.moves[0], read.stored
    place = values[first.head][first.head_index]
    whole = not first.native_index
    if isinstance(stored, QuantizedTensor):
        native = read_decoded(stored, reader, place.dtype, place.device, place if whole else None)
        if whole:
            return
    elif whole and place.is_contiguous() and place.device.type == "cpu" and stored_dtype(place.dtype) == stored.dtype:
        reader.read_into(stored, place)
        return
    else:
        native = reader.read(stored)
    for move in read.moves:
        values[move.head][move.head_index] = native[move.native_index].to(place.device)


@dataclass(frozen=True)
class _Cut:
    """Native rows `start` up to `stop`, in them what `inside` says, are `head_index` of the held rows of `head`."""

    start: int
    stop: int
    inside: Index
    head: str
    head_index: Index


def _cut(move: Move, binding: Binding, held: range) -> _Cut | None:
    """What of a move falls into the held rows; None where nothing does."""
    native, head = binding.natives[move.native], binding.heads[move.head]
    if not head:
        return _Cut(0, 1, (), move.head, ())
    lead, *rest = move.head_index or (slice(None),)
    if isinstance(lead, int):
        inside = (lead - held.start, *rest)
        return _Cut(0, native[0], (), move.head, inside) if lead in held else None
    taken, *columns = move.native_index or (slice(None),)
    assert isinstance(taken, slice)
    begin, end, _ = lead.indices(head[0])
    start, stop = max(begin, held.start), min(end, held.stop)
    if start >= stop:
        return None
    shift = taken.indices(native[0])[0] - begin
    rows = slice(start - held.start, stop - held.start)
    return _Cut(start + shift, stop + shift, tuple(columns), move.head, (rows, *rest))


def _joined(stored: Stored, cuts: Sequence[_Cut]) -> list[Read]:
    """One read for all cuts whose rows touch, once they are widened to whole blocks of scales."""
    height, rows = _height(stored), stored.shape[0] if stored.shape else 1
    spans: list[tuple[int, int, list[_Cut]]] = []
    for cut in sorted(cuts, key=lambda cut: cut.start):
        start, stop = cut.start // height * height, min(-(-cut.stop // height) * height, rows)
        if spans and start <= spans[-1][1]:
            begin, end, found = spans.pop()
            spans.append((begin, max(end, stop), [*found, cut]))
        else:
            spans.append((start, stop, [cut]))
    return [
        Read(stored_rows(stored, start, stop), tuple(_move(stored.name, cut, start, stop) for cut in found))
        for start, stop, found in spans
    ]


def _move(native: str, cut: _Cut, start: int, stop: int) -> Move:
    whole = (cut.start, cut.stop, cut.inside) == (start, stop, ())
    index = () if whole else (slice(cut.start - start, cut.stop - start), *cut.inside)
    return Move(native, index, cut.head, cut.head_index)


def _height(stored: Stored) -> int:
    """Rows of the first axis that can't be decoded apart: those of a block of scales."""
    if isinstance(stored, QuantizedTensor) and stored.scheme.kind == "block" and len(stored.shape) == 2:
        return stored.scheme.covered(stored.shape)[0]
    return 1


def stored_rows(stored: Stored, start: int, stop: int) -> Stored:
    """Rows `start` up to `stop` of a stored tensor, counted along its first axis.

    Args:
        stored: an FP8 tensor may be cut only where a block of its scales begins or the tensor ends.
        start, stop: within the tensor.
    """
    if isinstance(stored, TensorEntry):
        return _rows(stored, start, stop)
    weight, scale = stored.weight, stored.scale
    if math.prod(scale.shape) > 1:  # a single scale is for all rows, whatever its shape
        height = stored.scheme.covered(weight.shape)[0] if len(weight.shape) == 2 else 1
        scale = _rows(scale, start // height, -(-stop // height))
    return QuantizedTensor(_rows(weight, start, stop), scale, stored.scheme)


def _rows(entry: TensorEntry, start: int, stop: int) -> TensorEntry:
    if not entry.shape or (start, stop) == (0, entry.shape[0]):
        return entry
    size = entry.nbytes // entry.shape[0]
    shape = (stop - start, *entry.shape[1:])
    return entry._replace(shape=shape, start=entry.start + start * size, end=entry.start + stop * size)
