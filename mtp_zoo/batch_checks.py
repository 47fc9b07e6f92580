"""What the constructors of a TokenBatch accept, value by value; `document_sources` checks what several say together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtp_zoo.arguments import INTEGER, LIST, MAPPING, Rule, checked, optional, refuse, shown, tuple_of, whole
from mtp_zoo.documents import ACT
from mtp_zoo.errors import BatchError

LONGEST_ROW, LARGEST_ID = 2**24, 2**31 - 1
"""Tokens in a row, and a token id; a larger one is a mistake that would be allocated first."""

WHOLE_NUMBERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _is_whole_numbers(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in WHOLE_NUMBERS


IDS = Rule(
    "a tensor of whole numbers [batch, seq]",
    lambda value: _is_whole_numbers(value) and value.ndim == 2,
)
NUMBERS = optional(Rule("a tensor of whole numbers", _is_whole_numbers))
MASK = Rule("a tensor", lambda value: isinstance(value, Tensor))
PLACEHOLDERS = Rule(
    "a list or tuple of token ids",
    lambda value: LIST.accepts(value) and all(INTEGER.accepts(each) or isinstance(each, np.integer) for each in value),
)

LAYOUT = {
    "attention_mask": optional(MASK),
    "position_ids": NUMBERS,
    "cu_seqlens": NUMBERS,
    "cu_seqlens_padded": NUMBERS,
    "seq_idx": NUMBERS,
    "placeholder_ids": PLACEHOLDERS,
}

checked_labels = checked(f"{ACT} from labels", error=BatchError, input_ids=IDS, labels=optional(MASK), **LAYOUT)
checked_mask = checked(f"{ACT} from a mask", error=BatchError, input_ids=IDS, learn_mask=MASK, **LAYOUT)
checked_text = checked(f"{ACT} of plain text", error=BatchError, input_ids=IDS, attention_mask=optional(MASK))
checked_collated = checked(
    f"{ACT} of collated rows",
    error=BatchError,
    inputs=Rule("a mapping with input_ids", lambda value: MAPPING.accepts(value) and "input_ids" in value),
    placeholder_ids=PLACEHOLDERS,
)
checked_rows = checked(
    "Packing rows",
    error=BatchError,
    rows=LIST,
    length=optional(whole(least=0, most=LONGEST_ROW)),
    pad_id=whole(least=0, most=LARGEST_ID),
)
FIELDS = {
    **dict.fromkeys(("input_ids", "doc_ids", "position_ids"), IDS),
    "learn_mask": Rule("a bool tensor", lambda value: isinstance(value, Tensor) and value.dtype == torch.bool),
    "placeholders": optional(
        Rule("a bool tensor", lambda value: isinstance(value, Tensor) and value.dtype == torch.bool)
    ),
}

ONE_AXIS = tuple_of(Rule("a sequence", lambda value: LIST.accepts(value) or isinstance(value, (np.ndarray, Tensor))))


def check_documents_of_rows(rows: Sequence[Any]) -> None:
    """Refuse rows that are not lists of (token ids, which of them are trained on).

    Raises:
        BatchError: all such rows are listed.
    """
    wrong = [
        f"row {number}: expected a list of (ids, mask) pairs, got {shown(row)}"
        for number, row in enumerate(rows)
        if not LIST.accepts(row) or not all(_is_document(each) for each in row)
    ]
    refuse("Packing rows", wrong, BatchError, "Give each row as a list of documents, each a pair (ids, mask).")


def _is_document(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and ONE_AXIS.accepts(tuple(value))
