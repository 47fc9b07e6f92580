"""TokenBatch: the mask contract. Every shift of a token axis in the library happens in this file.

Notation: `x[t]` is the token in slot t of a row, `h[t]` the target's state there. Depth k (1-based) reads the state of
slot t and the embedding of `x[t+k]`; its logits predict `x[t+k+1]`. So for one row of six tokens, of which the last three
are to be learnt (an answer behind a prompt):

    slot t             0    1    2    3    4    5
    x                  a    b    c    D    E    F
    learn_mask         0    0    0    1    1    1

    depth 1 reads      b    c    D    E    F    .
    depth 1 predicts   c    D    E    F    .    .
    depth 1 gate       0    1    1    1    0    0

    depth 2 reads      c    D    E    F    .    .
    depth 2 predicts   D    E    F    .    .    .
    depth 2 gate       1    1    1    0    0    0

The learn mask is raw: entry t says whether token t is to be learnt. It is never given shifted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Int, Shaped
from numpy.typing import NDArray
from torch import Tensor

from mtp_zoo.errors import BatchError

IGNORED = -100
"""Label value of a token that is not to be learnt."""

PADDING = -1
"""Document id of a slot that holds no token."""

Document: TypeAlias = "tuple[Sequence[int] | NDArray[np.int32], Sequence[bool] | NDArray[np.bool_]]"
"""Token ids of one document, and which of them are to be learnt."""


@dataclass(frozen=True)
class DepthSlots:
    """What depth k reads and predicts in every slot; see the table at the top of this file.

    Attributes:
        input_ids: token whose embedding enters the slot; 0 where there is none.
        labels: token to predict; `IGNORED` where the gate is closed.
        gate: whether the slot counts.
    """

    input_ids: Int[Tensor, "batch seq"]
    labels: Int[Tensor, "batch seq"]
    gate: Bool[Tensor, "batch seq"]


@dataclass(frozen=True)
class Segment:
    """Slots `start:stop` of `rows`, in which attention is causal and closed to everything else."""

    rows: tuple[int, ...]
    start: int
    stop: int


def ahead(values: Shaped[Tensor, "batch seq *rest"], steps: int, fill: float) -> Shaped[Tensor, "batch seq *rest"]:
    """`out[:, t] = values[:, t + steps]`, and `fill` where `t + steps` is past the end.

    Example: `ahead([[5, 6, 7]], 1, fill=0)` is `[[6, 7, 0]]`; with `steps=3` or more all slots are `fill`.
    """
    out = torch.full_like(values, fill)
    if steps < values.shape[1]:
        out[:, : values.shape[1] - steps] = values[:, steps:]
    return out


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """A batch of token rows, each holding one or several documents and padding on either side.

    Attributes:
        input_ids: int64 token ids.
        learn_mask: True where the token itself is to be learnt.
        doc_ids: number of the document that the token belongs to, rising along the row; `PADDING` outside.
        position_ids: the target's position of every token; restarts with every document.
        placeholders: True where the token stands for an image or audio embedding: it never enters a depth as input.

    Raises:
        BatchError: shapes that differ, documents that are interleaved or torn, learnt padding.
    """

    input_ids: Int[Tensor, "batch seq"]
    learn_mask: Bool[Tensor, "batch seq"]
    doc_ids: Int[Tensor, "batch seq"]
    position_ids: Int[Tensor, "batch seq"]
    placeholders: Bool[Tensor, "batch seq"] | None = None

    def __post_init__(self) -> None:
        for name in ("input_ids", "learn_mask", "doc_ids", "position_ids"):
            shape = getattr(self, name).shape
            if len(shape) != 2 or shape != self.input_ids.shape:
                raise BatchError(
                    f"Building a TokenBatch: expected {name} [batch, seq] = {list(self.input_ids.shape)}, "
                    f"got {list(shape)}.",
                    remedy="Give one entry a token; trim look-ahead columns and expand 3-D or 4-D masks to [batch, seq].",
                )
        _check_documents(self.doc_ids)
        if bool((self.learn_mask & (self.doc_ids == PADDING)).any()):
            raise BatchError(
                "Building a TokenBatch: learn_mask is set on padding.",
                remedy="Clear learn_mask where attention_mask is 0.",
            )

    @classmethod
    def from_labels(
        cls,
        input_ids: Tensor,
        labels: Tensor | None,
        attention_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_padded: Tensor | None = None,
        placeholder_ids: Sequence[int] = (),
    ) -> TokenBatch:
        """A batch whose labels are the tokens themselves, with `IGNORED` where a token is not to be learnt.

        Args:
            input_ids: [batch, seq].
            labels: [batch, seq]; unshifted, as transformers' collators make them.
            attention_mask: 1 on tokens, 0 on padding (left or right).
            position_ids: the target's positions; where they do not rise by one, a document starts.
            cu_seqlens: [documents + 1], for a single row: where each document's tokens start and end.
            cu_seqlens_padded: the same where documents are padded in place; then `cu_seqlens` counts tokens only.
            placeholder_ids: token ids that stand for image or audio embeddings.

        Raises:
            BatchError: no labels, labels that are shifted or of another shape, or a layout that contradicts itself.
        """
        if labels is None:
            raise BatchError(
                "Building a TokenBatch from labels: got none, so nothing says which tokens are to be learnt.",
                remedy="Pass labels with -100 on prompts, or say TokenBatch.all_tokens(...) for plain text.",
            )
        if labels.shape != input_ids.shape:
            raise BatchError(
                f"Building a TokenBatch: expected labels of shape {list(input_ids.shape)}, got {list(labels.shape)}.",
                remedy="Give one label a token.",
            )
        learn = labels != IGNORED
        shifted = (learn & (labels != input_ids)).nonzero()
        if len(shifted):
            row, slot = shifted[0].tolist()
            raise BatchError(
                f"Building a TokenBatch: expected labels to be -100 or the token itself, got {int(labels[row, slot])} for "
                f"token {int(input_ids[row, slot])} at row {row}, slot {slot} ({len(shifted)} such slots).",
                remedy="Pass unshifted labels; TokenBatch does every shift.",
            )
        return cls.from_mask(
            input_ids,
            learn,
            attention_mask,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            cu_seqlens_padded=cu_seqlens_padded,
            placeholder_ids=placeholder_ids,
        )

    @classmethod
    def from_mask(
        cls,
        input_ids: Tensor,
        learn_mask: Tensor,
        attention_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_padded: Tensor | None = None,
        placeholder_ids: Sequence[int] = (),
    ) -> TokenBatch:
        """A batch with an explicit learn mask; the other arguments are those of `from_labels`."""
        real = (
            torch.ones_like(input_ids, dtype=torch.bool)
            if attention_mask is None
            else _as_bool(attention_mask, input_ids)
        )
        if cu_seqlens is not None:
            doc_ids = _documents_from_lengths(cu_seqlens, cu_seqlens_padded, input_ids)
            doc_ids = torch.where(real, doc_ids, PADDING)
        elif position_ids is not None and position_ids.shape == input_ids.shape:
            doc_ids = _documents_from_positions(position_ids, real)
        else:
            doc_ids = torch.where(real, 0, PADDING)
        positions = _positions(doc_ids) if position_ids is None else position_ids
        marks = torch.isin(input_ids, input_ids.new_tensor(placeholder_ids)) if len(placeholder_ids) else None
        return cls(input_ids, _as_bool(learn_mask, input_ids) & (doc_ids != PADDING), doc_ids, positions, marks)

    @classmethod
    def all_tokens(cls, input_ids: Tensor, attention_mask: Tensor | None = None) -> TokenBatch:
        """Plain text: every token that is not padding is to be learnt."""
        return cls.from_mask(input_ids, torch.ones_like(input_ids, dtype=torch.bool), attention_mask)

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[Document]], *, length: int | None = None, pad_id: int = 0) -> TokenBatch:
        """Rows of documents laid end to end, padded on the right to `length` (default: the longest row).

        Raises:
            BatchError: a row that is longer than `length`.
        """
        sizes = [sum(len(ids) for ids, _ in row) for row in rows]
        length = max(sizes, default=0) if length is None else length
        if max(sizes, default=0) > length:
            raise BatchError(
                f"Packing rows: expected at most {length} tokens a row, got {max(sizes)}.",
                remedy="Cut or move documents.",
            )
        input_ids = torch.full((len(rows), length), pad_id, dtype=torch.int64)
        learn = torch.zeros(len(rows), length, dtype=torch.bool)
        doc_ids = torch.full((len(rows), length), PADDING, dtype=torch.int64)
        for row, documents in enumerate(rows):
            start = 0
            for number, (ids, learnt) in enumerate(documents):
                here = slice(start, start + len(ids))
                input_ids[row, here] = torch.tensor(ids, dtype=torch.int64)
                learn[row, here] = torch.tensor(learnt, dtype=torch.bool)
                doc_ids[row, here] = number
                start += len(ids)
        return cls(input_ids, learn, doc_ids, _positions(doc_ids))

    @property
    def shape(self) -> tuple[int, int]:
        """(batch, seq)."""
        batch, seq = self.input_ids.shape
        return batch, seq

    def to(self, device: torch.device | str) -> TokenBatch:
        """The same batch on another device."""
        tensors = ("input_ids", "learn_mask", "doc_ids", "position_ids", "placeholders")
        values = {name: getattr(self, name) for name in tensors}
        return replace(self, **{name: value.to(device) for name, value in values.items() if value is not None})

    def slots(self, depth: int) -> DepthSlots:
        """What `depth` (1-based) reads and predicts in every slot; see the table at the top of this file.

        A slot counts iff `t + depth + 1` is in range and in the same document, the token there is to be learnt, and the
        token that enters is no placeholder. A depth keeps every slot it can use; deeper ones do not shorten shallow ones.
        """
        same = (self.doc_ids == ahead(self.doc_ids, depth + 1, PADDING)) & (self.doc_ids != PADDING)
        gate = same & ahead(self.learn_mask, depth + 1, False)
        if self.placeholders is not None:
            gate &= ~ahead(self.placeholders, depth, False)
        labels = torch.where(gate, ahead(self.input_ids, depth + 1, IGNORED), IGNORED)
        return DepthSlots(ahead(self.input_ids, depth, 0), labels, gate)

    def main_gate(self) -> Bool[Tensor, "batch seq"]:
        """Slots that the target's own next-token loss would count: token t+1 is learnt and of the same document."""
        same = (self.doc_ids == ahead(self.doc_ids, 1, PADDING)) & (self.doc_ids != PADDING)
        return same & ahead(self.learn_mask, 1, False)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The documents as stretches of slots; rows with the same stretch share one entry.

        Padding behind a document belongs to its segment: no token can see it, and it keeps equal stretches equal.
        Padding in front of a row's first document belongs to none.
        """
        before = torch.nn.functional.pad(self.doc_ids[:, :-1], (1, 0), value=PADDING)
        starts = (self.doc_ids != PADDING) & (self.doc_ids != before)
        bounds: dict[tuple[int, int], list[int]] = {}
        for row, marks in enumerate(starts.cpu()):
            first = marks.nonzero().flatten().tolist()
            for start, stop in zip(first, [*first[1:], self.shape[1]], strict=False):  # a row may hold no document
                bounds.setdefault((start, stop), []).append(row)
        return tuple(Segment(tuple(rows), start, stop) for (start, stop), rows in bounds.items())


def _as_bool(mask: Tensor, like: Tensor) -> Tensor:
    if mask.shape != like.shape:
        raise BatchError(
            f"Building a TokenBatch: expected a mask of shape {list(like.shape)}, got {list(mask.shape)}.",
            remedy="Give one entry a token; trim look-ahead columns, and don't pass 3-D or 4-D attention masks.",
        )
    if mask.dtype != torch.bool and bool(((mask != 0) & (mask != 1)).any()):
        raise BatchError(
            f"Building a TokenBatch: expected a mask of 0 and 1, got values up to {mask.max().item()}.",
            remedy="Pass document boundaries as cu_seqlens or position_ids.",
        )
    return mask.bool()


def _check_documents(doc_ids: Tensor) -> None:
    """Documents must rise along the row and be whole: no id may come back after another id or after padding."""
    if doc_ids.numel() == 0:
        return
    highest = doc_ids.cummax(dim=1).values
    before = torch.nn.functional.pad(doc_ids[:, :-1], (1, 0), value=PADDING)
    rises = highest > torch.nn.functional.pad(highest[:, :-1], (1, 0), value=PADDING)
    starts = (doc_ids != PADDING) & (doc_ids != before)
    torn = (starts & ~rises).nonzero()
    if len(torn):
        row, slot = torn[0].tolist()
        raise BatchError(
            f"Building a TokenBatch: document {int(doc_ids[row, slot])} continues at row {row}, slot {slot} after padding "
            "or another document.",
            remedy="Lay each document's tokens side by side; attention_mask may be 0 only around them.",
        )


def _positions(doc_ids: Tensor) -> Tensor:
    """0, 1, 2, ... within every document; 0 on padding."""
    slots = torch.arange(doc_ids.shape[1], device=doc_ids.device).expand_as(doc_ids)
    before = torch.nn.functional.pad(doc_ids[:, :-1], (1, 0), value=PADDING - 1)
    start = torch.where(doc_ids != before, slots, 0).cummax(dim=1).values
    return torch.where(doc_ids != PADDING, slots - start, 0)


def _documents_from_positions(position_ids: Tensor, real: Tensor) -> Tensor:
    """A document starts at the first token and wherever the position is not the one before plus one."""
    before = torch.nn.functional.pad(position_ids[:, :-1], (1, 0), value=-2)
    before_real = torch.nn.functional.pad(real[:, :-1], (1, 0), value=False)
    starts = real & ((position_ids != before + 1) | ~before_real)
    return torch.where(real, starts.cumsum(dim=1) - 1, PADDING)


def _documents_from_lengths(cu_seqlens: Tensor, cu_padded: Tensor | None, like: Tensor) -> Tensor:
    """Document ids of one row from cumulative lengths.

    Example: cu_seqlens [0, 3, 8], cu_padded [0, 4, 12] lay 3 tokens in slots 0-2 and 5 tokens in slots 4-8.
    """
    starts = (cu_seqlens if cu_padded is None else cu_padded).tolist()
    lengths = cu_seqlens.diff().tolist()
    room = [stop - start for start, stop in pairwise(starts)]
    fits = len(room) == len(lengths) and all(0 < length <= space for length, space in zip(lengths, room, strict=True))
    if like.shape[0] != 1 or not fits or starts[0] != 0 or starts[-1] > like.shape[1]:
        raise BatchError(
            f"Building a TokenBatch: cu_seqlens {cu_seqlens.tolist()} (padded: {None if cu_padded is None else starts}) do "
            f"not lay out input_ids {list(like.shape)}.",
            remedy="Give one row, starts at 0, rising bounds within the row, and no document longer than its room.",
        )
    doc_ids = torch.full_like(like, PADDING)
    for number, (start, length) in enumerate(zip(starts, lengths, strict=False)):
        doc_ids[0, start : start + length] = number
    return doc_ids
