"""Documents of a batch as a few padded batches, so that one kernel call serves many documents on an accelerator.

Causal attention within a document needs no mask where every document starts a row of its own: what pads a row lies after
all of its tokens, where none of them looks. Documents are sorted by length and grouped while a row is at most a third
padding, so there are about log(longest / shortest) groups, however many documents there are. On a CPU, where a call costs
little, every document is a view of its own.

    two rows, four documents      group 1      group 2    group 3
    a a a b b                     c c c c      b b        d
    c c c c d                     a a a .
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mtp_zoo.documents import Segment
from mtp_zoo.host_copies import to_device

SHORTEST = 2 / 3
"""Length of a group's shortest document, as a share of its longest."""


class Stretch:
    """Slots `start:stop` of one row of a batch, or of all of them (None), taken as a view."""

    def __init__(self, row: int | None, start: int, stop: int) -> None:
        rows = slice(None) if row is None else slice(row, row + 1)
        self._here = (rows, slice(None), slice(start, stop))

    def take(self, values: Tensor) -> Tensor:
        """Return [batch, heads, stop - start, ...] of [batch, heads, seq, ...]."""
        return values[self._here]

    def put_(self, out: Tensor, values: Tensor) -> None:
        """Write what belongs to these slots into [batch, heads, seq, ...]."""
        out[self._here] = values


class Group:
    """Documents of similar length, as rows of one padded batch.

    Args:
        spans: (row, start, stop) of every document, the longest first.
        seq: slots in a row of the batch.
        device: of the values.
    """

    def __init__(self, spans: Sequence[tuple[int, int, int]], seq: int, device: torch.device) -> None:
        starts = torch.tensor([row * seq + start for row, start, _ in spans])
        lengths = torch.tensor([stop - start for _, start, stop in spans])
        offsets = torch.arange(int(lengths[0]))
        real = offsets < lengths[:, None]
        slots = torch.where(real, starts[:, None] + offsets, 0)
        self._shape = tuple(slots.shape)
        self._slots = to_device(slots.flatten(), device)
        self._places = to_device(real.flatten().nonzero().flatten(), device)
        self._padding = to_device((~real).flatten().nonzero().flatten(), device)
        self._targets = to_device(slots[real], device)

    def take(self, values: Tensor) -> Tensor:
        """Return [documents, heads, longest, ...] of [batch, heads, seq, ...], with 0 on padding."""
        rows = values.transpose(1, 2).flatten(0, 1).index_select(0, self._slots).index_fill_(0, self._padding, 0)
        return rows.unflatten(0, self._shape).transpose(1, 2)

    def put_(self, out: Tensor, values: Tensor) -> None:
        """Write the documents' slots into [batch, heads, seq, ...], which is contiguous with its axes 1 and 2 exchanged."""
        flat = values.transpose(1, 2).flatten(0, 1).index_select(0, self._places)
        out.transpose(1, 2).flatten(0, 1).index_copy_(0, self._targets, flat)


def group_documents(segments: Sequence[Segment], shape: tuple[int, int], device: torch.device) -> list[Stretch | Group]:
    """Return how the documents of a batch are attended to, each document in exactly one entry.

    Args:
        segments: see `find_segments`.
        shape: (batch, seq).
        device: of the values that will be taken.
    """
    batch, seq = shape
    if len(segments) == 1 and len(segments[0].rows) == batch:
        return [Stretch(None, segments[0].start, segments[0].stop)]
    spans = [(row, each.start, each.stop) for each in segments for row in each.rows]
    if device.type == "cpu":  # a call costs little there, and copies of padded rows more
        return [Stretch(*span) for span in spans]
    return [Group(group, seq, device) for group in _by_length(spans)]


def _by_length(spans: Sequence[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield spans in groups, each from its longest down to `SHORTEST` of that."""
    group: list[tuple[int, int, int]] = []
    for span in sorted(spans, key=lambda span: span[1] - span[2]):
        longest = group[0][2] - group[0][1] if group else 0
        if group and span[2] - span[1] < SHORTEST * longest:
            yield group
            group = []
        group.append(span)
    if group:
        yield group
