"""Layouts of context parallel: which rank of a group holds which slots of a row.

Two, here for one document in 8 slots on 2 ranks:

    slot         0  1  2  3  4  5  6  7
    zigzag       0  0  1  1  1  1  0  0     every document in 2 * size chunks; rank r holds chunks r and 2 * size - 1 - r
    contiguous   0  0  0  0  1  1  1  1     the row in `size` parts, wherever its documents lie

Zigzag gives all ranks the same share of causal attention. A document's room is its tokens and the padding behind them: what
padded `cu_seqlens` lay out. Padding in front of a row's first document is a room too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal, TypeAlias, cast

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from mtp_zoo.arguments import checked, instance, whole
from mtp_zoo.batch import PADDING, TokenBatch, ahead
from mtp_zoo.errors import ParallelError

Layout: TypeAlias = Literal["zigzag", "contiguous"]


def gather_order(tokens: TokenBatch, size: int, layout: Layout) -> Int[Tensor, "batch seq"]:
    """Slots in the order in which a gather over the ranks puts them: those of rank 0 first, rising within a rank.

    Example: for the table above, [0, 1, 6, 7, 2, 3, 4, 5] is zigzag's.

    Raises:
        ParallelError: rooms (zigzag) or rows (contiguous) that do not divide; says by how much to pad.
    """
    owners = _zigzag_owners(tokens, size) if layout == "zigzag" else _contiguous_owners(tokens, size)
    return owners.argsort(dim=1, stable=True)


def pick(
    values: Shaped[Tensor, "batch seq *rest"], slots: Int[Tensor, "batch some"]
) -> Shaped[Tensor, "batch some *rest"]:
    """`out[b, i] = values[b, slots[b, i]]`."""
    return values[torch.arange(len(values), device=values.device)[:, None], slots]


@checked(
    "Padding documents",
    error=ParallelError,
    tokens=instance("a TokenBatch", TokenBatch),
    multiple=whole(least=1, most=2**20),
)
def pad_documents(tokens: TokenBatch, multiple: int) -> TokenBatch:
    """The batch with every document's room padded to a multiple, as zigzag needs it: 2 * size. Before the target's forward.

    Padding that was there is left out, so that rows become no longer than they must be; tokens keep their positions.

    Example: documents of 3, 5 and 1 tokens padded to 4 lie in slots 0-2, 4-8 and 12 of 16.
    """
    rows = [_padded_row(row, multiple) for row in tokens.doc_ids.tolist()]
    length = max((len(row) for row in rows), default=0) or multiple
    source = torch.tensor([row + [-1] * (length - len(row)) for row in rows], device=tokens.doc_ids.device)

    def laid_out(name: str, value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        return pick(value, source.clamp(min=0)).masked_fill(source < 0, PADDING if name == "doc_ids" else 0)

    laid = {f.name: laid_out(f.name, getattr(tokens, f.name)) for f in fields(TokenBatch)}
    return TokenBatch(**cast("dict[str, Any]", laid))


def _padded_row(doc_ids: Sequence[int], multiple: int) -> list[int]:
    """Source slot of every slot of one row, -1 where it is padding."""
    documents: dict[int, list[int]] = {}
    for slot, document in enumerate(doc_ids):
        if document != PADDING:
            documents.setdefault(document, []).append(slot)
    return [slot for slots in documents.values() for slot in slots + [-1] * (-len(slots) % multiple)]


def _contiguous_owners(tokens: TokenBatch, size: int) -> Tensor:
    """[batch, seq], the rank of every slot."""
    length = tokens.shape[1]
    if length % size:
        raise ParallelError(
            f"Splitting a batch over {size} ranks: expected rows of a multiple of {size} slots, got {length}.",
            remedy=f"Pad the rows by {-length % size} slots (TokenBatch.from_rows(..., length=...)).",
        )
    return (torch.arange(length, device=tokens.doc_ids.device) // (length // size)).expand(tokens.shape)


def _zigzag_owners(tokens: TokenBatch, size: int) -> Tensor:
    """[batch, seq], the rank of every slot. Rooms begin where a document does; what lies before the first is one more."""
    length = tokens.shape[1]
    slots = torch.arange(length, device=tokens.doc_ids.device).expand(tokens.shape)
    before = torch.nn.functional.pad(tokens.doc_ids[:, :-1], (1, 0), value=PADDING)
    begins = (tokens.doc_ids != PADDING) & (tokens.doc_ids != before)
    start = torch.where(begins, slots, 0).cummax(dim=1).values
    next_start = torch.where(begins, slots, length).flip(1).cummin(dim=1).values.flip(1)  # at or behind the slot
    room = ahead(next_start, 1, length) - start
    _refuse_uneven(room, start, slots, 2 * size)
    chunk = (slots - start) // (room // (2 * size))
    return torch.minimum(chunk, 2 * size - 1 - chunk)


def _refuse_uneven(room: Tensor, start: Tensor, slots: Tensor, multiple: int) -> None:
    uneven = ((room % multiple != 0) & (slots == start)).nonzero().tolist()
    if not uneven:
        return
    found = [(row, slot, int(room[row, slot])) for row, slot in uneven]
    raise ParallelError(
        f"Splitting a batch zigzag over {multiple // 2} ranks: expected documents in multiples of {multiple} slots, padding "
        "included.",
        remedy=f"Pad them before the target's forward: pad_documents(tokens, {multiple}).",
        problems=[
            f"row {row}, slots {slot} to {slot + size - 1}: {size} slots, pad by {-size % multiple}"
            for row, slot, size in found
        ],
    )
