"""Which slots of a row are one document, from whatever a data pipeline says about it.

A pipeline tells documents apart by one or several of

    attention_mask      0 on padding; a row of one document needs nothing else
    cu_seqlens          where each document of a single row starts and ends, with `cu_seqlens_padded` where they lie apart
    seq_idx             the number of each token's document; below 0 on padding
    position_ids        a position 0 starts a document

One row of two documents, padded in place, as each of them tells it:

    slot t              0    1    2    3    4    5    6    7
    token               a    b    c    .    D    E    .    .

    attention_mask      1    1    1    0    1    1    0    0
    position_ids        0    1    2    0    0    1    0    0    (beside attention_mask)
    seq_idx             0    0    0   -1    1    1   -1   -1
    cu_seqlens          0, 3, 5    with cu_seqlens_padded 0, 4, 8

    doc_ids             0    0    0   -1    1    1   -1   -1

Sources given together must tell the same; none is preferred silently. Where one source alone can be read in two ways, the
error names both.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch
from jaxtyping import Int
from torch import Tensor

from mtp_zoo.documents import (
    ACT,
    PADDING,
    as_bool,
    before,
    check_documents,
    check_shape,
    count_positions,
    document_starts,
    first_slot,
)
from mtp_zoo.errors import BatchError


def find_documents(
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_padded: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> tuple[Int[Tensor, "batch seq"], Int[Tensor, "batch seq"]]:
    """Document ids, numbered 0, 1, .. along each row with `PADDING` outside, and positions.

    The arguments are those of `TokenBatch.from_labels`.

    Raises:
        BatchError: a source that can be read in two ways or does not fit the batch, or two that contradict each other.
    """
    check_shape("input_ids", input_ids, input_ids)
    pads: dict[str, Tensor] = {}
    if attention_mask is not None:
        pads["attention_mask"] = ~as_bool("attention_mask", attention_mask, input_ids)
    if seq_idx is not None:
        check_shape("seq_idx", seq_idx, input_ids)
        pads["seq_idx"] = seq_idx < 0
    told: dict[str, Tensor] = {}
    if cu_seqlens is not None or cu_seqlens_padded is not None:
        told["cu_seqlens"] = _laid_out(cu_seqlens, cu_seqlens_padded, input_ids, pads.values())
        pads["cu_seqlens"] = told["cu_seqlens"] == PADDING
    real = _real(pads, input_ids)
    if seq_idx is not None:
        told["seq_idx"] = _renumbered(torch.where(real, seq_idx.to(input_ids.dtype), PADDING))
    _check_same(told)
    positions = None if position_ids is None else _text_positions(position_ids, input_ids)
    if not told and positions is not None:
        return _restarts(positions, real), positions
    whole = torch.where(real, torch.zeros_like(input_ids), PADDING)
    source, doc_ids = next(iter(told.items()), ("attention_mask", whole))
    if positions is None:
        return doc_ids, count_positions(doc_ids)
    _check_positions(positions, doc_ids, source)
    return doc_ids, positions


def _laid_out(cu_seqlens: Tensor | None, cu_padded: Tensor | None, like: Tensor, pads: Iterable[Tensor]) -> Tensor:
    """Document ids of one row from cumulative lengths; a document without tokens is left out.

    Example: cu_seqlens [0, 3, 8], cu_padded [0, 4, 12] lay 3 tokens in slots 0-2 and 5 tokens in slots 4-8.
    """
    if cu_seqlens is None:
        raise BatchError(
            f"{ACT}: got cu_seqlens_padded alone: its room may be filled with tokens, or with tokens and padding.",
            remedy="Pass cu_seqlens beside it, which counts tokens only.",
        )
    if like.shape[0] != 1:
        raise BatchError(
            f"{ACT}: got cu_seqlens for {like.shape[0]} rows: they may be the bounds within each row, or within the rows laid "
            "end to end.",
            remedy="Pass one row, as input_ids.reshape(1, -1), or seq_idx of [batch, seq].",
        )
    bounds = cu_seqlens.tolist()
    starts = bounds if cu_padded is None else cu_padded.tolist()
    _check_bounds(bounds, starts, like.shape[1])
    if starts[-1] < like.shape[1] and not any(bool(padding[:, starts[-1] :].all()) for padding in pads):
        raise BatchError(
            f"{ACT}: cu_seqlens end at slot {starts[-1]} of {like.shape[1]}: what is behind may be padding, or a document "
            "whose bound is missing, and no other source says that all of it is padding.",
            remedy="Pass attention_mask with 0 on padding, or the bound of the last document.",
        )
    doc_ids = torch.full_like(like, PADDING)
    lengths = [stop - start for start, stop in pairwise(bounds)]
    held = [(start, length) for start, length in zip(starts, lengths, strict=False) if length]
    for number, (start, length) in enumerate(held):
        doc_ids[:, start : start + length] = number
    return doc_ids


def _check_bounds(bounds: list[int], starts: list[int], slots: int) -> None:
    """Cumulative lengths and where their documents start: one list or two, which must lay out a row."""
    fits = bounds[:1] == starts[:1] == [0] and len(bounds) == len(starts) and starts[-1] <= slots
    spans = zip(pairwise(bounds), pairwise(starts), strict=True) if fits else ()
    if not fits or not all(0 <= stop - start <= end - begin for (start, stop), (begin, end) in spans):
        room = "" if bounds is starts else f" in the room of {starts}"
        raise BatchError(
            f"{ACT}: cu_seqlens {bounds}{room} do not lay out {slots} slots.",
            remedy="Give bounds that start at 0, rise and end within the row, and no document longer than its room.",
        )


def _real(pads: dict[str, Tensor], like: Tensor) -> Tensor:
    """Slots that hold a token, as all sources say that can tell; `seq_idx` need not mark what others call padding."""
    exact = {name: padding for name, padding in pads.items() if name != "seq_idx"}
    for one, other in pairwise(exact):
        _refuse_padding(exact[one] != exact[other], (one, exact[one]), (other, exact[other]))
    if "seq_idx" in pads:
        for name, padding in exact.items():
            _refuse_padding(pads["seq_idx"] & ~padding, ("seq_idx", pads["seq_idx"]), (name, padding))
    return ~torch.stack([torch.zeros_like(like, dtype=torch.bool), *pads.values()]).any(dim=0)


def _refuse_padding(differ: Tensor, one: tuple[str, Tensor], other: tuple[str, Tensor]) -> None:
    """Two sources that disagree on what is padding."""
    place = first_slot(differ)
    if place is not None:
        says = ["padding" if bool(padding[place]) else "a token" for _, padding in (one, other)]
        raise BatchError(
            f"{ACT}: row {place[0]}, slot {place[1]} is {says[0]} by {one[0]} and {says[1]} by {other[0]}.",
            remedy="Correct one of them; where documents are padded in place, cu_seqlens counts tokens only and "
            "cu_seqlens_padded says where they lie.",
        )


def _renumbered(numbers: Tensor) -> Tensor:
    """Documents numbered 0, 1, .. in each row, where a row may number them 5, 8, .."""
    check_documents(numbers)
    return torch.where(numbers != PADDING, document_starts(numbers).cumsum(dim=1) - 1, PADDING)


def _check_same(told: dict[str, Tensor]) -> None:
    """Two sources that see other documents in the same tokens."""
    for one, other in pairwise(told):
        place = first_slot(told[one] != told[other])
        if place is not None:
            raise BatchError(
                f"{ACT}: row {place[0]}, slot {place[1]} is in document {int(told[one][place])} by {one} and in document "
                f"{int(told[other][place])} by {other}, counted from 0.",
                remedy="Correct one of them.",
            )


def _text_positions(position_ids: Tensor, like: Tensor) -> Tensor:
    """[batch, seq] from what models take: [1, seq] for all rows, or [3 or 4, batch, seq], whose rotary axes must agree.

    Example: [[[0, 1, 2]], [[0, 1, 2]], [[0, 1, 2]]] is [[0, 1, 2]].
    """
    if position_ids.ndim == 3:
        if bool((position_ids != position_ids[:1]).any()):
            raise BatchError(
                f"{ACT}: position_ids {list(position_ids.shape)} differ between rotary axes, as they do where images are; the "
                "head follows one axis. Where they jump, an image begins or ends within a document, or a document starts.",
                remedy="Leave images out, or pass position_ids of [batch, seq], which count tokens.",
            )
        position_ids = position_ids[0]
    if position_ids.shape == (1, like.shape[1]):
        position_ids = position_ids.expand_as(like)
    check_shape("position_ids", position_ids, like)
    return position_ids


def _restarts(position_ids: Tensor, real: Tensor) -> Tensor:
    """Documents start at a row's first token, which may be a later chunk's, and at every position 0 behind it.

    Example: positions [64, 65, 0, 1, 2] are a chunk of two tokens and a document of three.
    """
    first = real & (real.cumsum(dim=1) == 1)
    follows = before(real, False) & (position_ids == before(position_ids, PADDING) + 1)
    starts = first | (real & (position_ids == 0))
    unclear = first_slot(real & ~starts & ~follows)
    if unclear is not None:
        raise BatchError(
            f"{ACT}: position_ids jump to {int(position_ids[unclear])} at row {unclear[0]}, slot {unclear[1]}: a later chunk "
            "of another document begins there, or one document has a gap in its positions.",
            remedy="Say which with seq_idx or cu_seqlens.",
        )
    _check_unrolled(position_ids, real)
    return torch.where(real, starts.cumsum(dim=1) - 1, PADDING)


def _check_unrolled(position_ids: Tensor, real: Tensor) -> None:
    """Refuse a row whose first token's position is the length of what lies behind its last start: both join in a roll.

    Example: [1, 2, 3, 0] are one document rolled by one slot, or its later chunk and a document of one token.
    """
    tokens = real.cumsum(dim=1)
    first, last = (
        torch.where(real & (tokens == place), position_ids, 0).sum(dim=1, keepdim=True)
        for place in (1, real.sum(dim=1, keepdim=True))
    )
    row = first_slot(first == last + 1)
    if row is not None:
        begin, end = int(first[row]), int(last[row])
        raise BatchError(
            f"{ACT}: position_ids of row {row[0]} begin at {begin} and end at {end}: they were rolled along the row, or a "
            f"later chunk of a document lies in front and a document of {begin} tokens behind.",
            remedy="Pass position_ids as the target reads them; if they are, say where documents lie with seq_idx or "
            "cu_seqlens.",
        )


def _check_positions(position_ids: Tensor, doc_ids: Tensor, source: str) -> None:
    """Positions must rise within each of `source`'s documents, and not run on from one into the next."""
    last, starts = before(position_ids, PADDING), document_starts(doc_ids)
    restarts = (doc_ids != PADDING) & ~starts & ((position_ids == 0) | (position_ids < last))
    runs_on = starts & (before(doc_ids, PADDING) != PADDING) & (position_ids == last + 1)
    wrong = first_slot(restarts | runs_on)
    if wrong is not None:
        says = ("go on", "another document") if bool(runs_on[wrong]) else ("start anew", "the same document")
        raise BatchError(
            f"{ACT}: position_ids {says[0]} from {int(last[wrong])} to {int(position_ids[wrong])} at row {wrong[0]}, "
            f"slot {wrong[1]}, which is in {says[1]} by {source}.",
            remedy="Correct one of them: the target reads the positions, and each document has its own.",
        )
