"""What a document in a row is: a stretch of slots with one number, positions of its own and attention closed to others."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from mtp_zoo.errors import BatchError

PADDING = -1
"""Document id of a slot that holds no token."""

IGNORED = -100
"""Label value of a token that is not to be learnt."""

ACT = "Building a TokenBatch"
"""What messages say was being done."""


@dataclass(frozen=True)
class Segment:
    """Slots `start:stop` of `rows`, in which attention is causal and closed to everything else."""

    rows: tuple[int, ...]
    start: int
    stop: int


def check_shape(name: str, value: Tensor, input_ids: Tensor) -> None:
    """Refuse what is not [batch, seq], one entry a token.

    Raises:
        BatchError: another shape.
    """
    if value.ndim != 2 or value.shape != input_ids.shape:
        raise BatchError(
            f"{ACT}: expected {name} [batch, seq] = {list(input_ids.shape)}, got {list(value.shape)}.",
            remedy="Give one entry a token; trim look-ahead columns, and reduce 3-D or 4-D masks to [batch, seq].",
        )


def as_bool(name: str, mask: Tensor, input_ids: Tensor) -> Bool[Tensor, "batch seq"]:
    """A mask of 0 and 1, one entry a token, as booleans.

    Raises:
        BatchError: another shape, or other values.
    """
    check_shape(name, mask, input_ids)
    if mask.dtype != torch.bool and bool(((mask != 0) & (mask != 1)).any()):
        raise BatchError(
            f"{ACT}: expected {name} of 0 and 1, got values from {mask.min().item()} to {mask.max().item()}: they number "
            "documents, or they are a mistake (an additive mask, for one).",
            remedy="Pass numbers of documents as seq_idx, less than 0 on padding, and a mask as 0 and 1.",
        )
    return mask.bool()


def check_documents(doc_ids: Int[Tensor, "batch seq"]) -> None:
    """Refuse documents that do not rise along their row, or are not whole.

    Raises:
        BatchError: a number comes back after another one or after padding, or is lower than one before it.
    """
    highest = before(doc_ids.cummax(dim=1).values, PADDING)
    torn = first_slot(document_starts(doc_ids) & (doc_ids <= highest))
    if torn is not None:
        row, slot = torn
        number, last = int(doc_ids[torn]), int(highest[torn])
        how = (
            "behind padding: a token inside it is masked, or two documents have one number"
            if number == last
            else f"behind document {last}, or documents are not numbered in their order"
        )
        raise BatchError(
            f"{ACT}: document {number} continues at row {row}, slot {slot} {how}.",
            remedy="Lay each document's tokens side by side with padding only around them, and number documents upwards.",
        )


def document_starts(doc_ids: Int[Tensor, "batch seq"]) -> Bool[Tensor, "batch seq"]:
    """The first slot of every document."""
    return (doc_ids != PADDING) & (doc_ids != before(doc_ids, PADDING))


def count_positions(doc_ids: Int[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
    """0, 1, 2, ... within every document; 0 on padding."""
    slots = torch.arange(doc_ids.shape[1], device=doc_ids.device, dtype=doc_ids.dtype).expand_as(doc_ids)
    start = torch.where(document_starts(doc_ids), slots, 0).cummax(dim=1).values
    return torch.where(doc_ids != PADDING, slots - start, 0)


def find_segments(doc_ids: Int[Tensor, "batch seq"]) -> tuple[Segment, ...]:
    """The documents as stretches of slots; rows with the same stretch share one entry.

    Padding behind a document belongs to its segment: no token can see it, and it keeps equal stretches equal.
    Padding in front of a row's first document belongs to none.
    """
    bounds: dict[tuple[int, int], list[int]] = {}
    for row, marks in enumerate(document_starts(doc_ids).cpu()):
        first = marks.nonzero().flatten().tolist()
        for start, stop in zip(first, [*first[1:], doc_ids.shape[1]], strict=False):  # a row may hold no document
            bounds.setdefault((start, stop), []).append(row)
    return tuple(Segment(tuple(rows), start, stop) for (start, stop), rows in bounds.items())


def before(values: Shaped[Tensor, "batch seq"], fill: int | bool) -> Shaped[Tensor, "batch seq"]:
    """`out[:, t] = values[:, t - 1]`, and `fill` in slot 0."""
    out = torch.full_like(values, fill)
    out[:, 1:] = values[:, :-1]
    return out


def first_slot(flags: Bool[Tensor, "batch seq"]) -> tuple[int, int] | None:
    """(row, slot) of the first flag that is set, row by row."""
    rows, slots = flags.nonzero().unbind(dim=1)
    return (int(rows[0]), int(slots[0])) if len(rows) else None


def check_lengths(row: int, number: int, ids: Sized, learnt: Sized) -> None:
    """Refuse a document whose mask has not one entry a token; a single entry would stand for all of them."""
    if len(ids) != len(learnt):
        raise BatchError(
            f"Packing rows: expected one mask entry a token, got {len(learnt)} for the {len(ids)} tokens of document {number} "
            f"of row {row}.",
            remedy="Say for every token whether it is to be learnt.",
        )


def check_unshifted(labels: Tensor, input_ids: Tensor) -> None:
    """Refuse labels that are not the token itself."""
    learn = labels != IGNORED
    other = learn & (labels != input_ids)
    place = first_slot(other)
    if place is None:
        return
    following = bool((learn[:, :-1] <= (labels[:, :-1] == input_ids[:, 1:])).all())
    raise BatchError(
        f"{ACT}: expected labels to be -100 or the token itself, got {int(labels[place])} for token "
        f"{int(input_ids[place])} at row {place[0]}, slot {place[1]} ({int(other.sum())} such slots); "
        + ("every label is the next token, so they are shifted." if following else "nor are they the next tokens."),
        remedy="Pass unshifted labels; TokenBatch does every shift.",
    )
