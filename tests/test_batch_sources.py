"""Every source that tells documents apart gives the same batch, and none of them is read in two ways."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DataCollatorWithFlattening

from mtp_zoo.batch import IGNORED, PADDING, TokenBatch
from mtp_zoo.errors import BatchError

_ = IGNORED


def row(*values: int) -> Tensor:
    return torch.tensor([values], dtype=torch.int64)


def cu(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def build(slots: int, **sources: Tensor) -> TokenBatch:
    """A batch of one row, ids 10, 11, .., all to be learnt."""
    ids = torch.arange(10, 10 + slots)[None]
    return TokenBatch.from_mask(ids, torch.ones_like(ids), **sources)


# One worked layout: 10 11 12 . 14 15 . . by every source that can tell it.
IN_PLACE: dict[str, dict[str, Tensor]] = {
    "mask and positions": {"attention_mask": row(1, 1, 1, 0, 1, 1, 0, 0), "position_ids": row(0, 1, 2, 0, 0, 1, 0, 0)},
    "seq_idx": {"seq_idx": row(0, 0, 0, -1, 1, 1, -1, -1)},
    "seq_idx from 5 and mask": {"seq_idx": row(5, 5, 5, 5, 7, 7, 7, 7), "attention_mask": row(1, 1, 1, 0, 1, 1, 0, 0)},
    "padded bounds": {"cu_seqlens": cu(0, 3, 5), "cu_seqlens_padded": cu(0, 4, 8)},
    "padded bounds with an empty document": {"cu_seqlens": cu(0, 3, 3, 5, 5), "cu_seqlens_padded": cu(0, 4, 4, 7, 8)},
    "padded bounds that leave the end to the mask": {
        "cu_seqlens": cu(0, 3, 5),
        "cu_seqlens_padded": cu(0, 4, 6),
        "attention_mask": row(1, 1, 1, 0, 1, 1, 0, 0),
    },
    "all of them": {
        "attention_mask": row(1, 1, 1, 0, 1, 1, 0, 0),
        "position_ids": row(0, 1, 2, 0, 0, 1, 0, 0),
        "seq_idx": row(0, 0, 0, -1, 1, 1, -1, -1),
        "cu_seqlens": cu(0, 3, 5),
        "cu_seqlens_padded": cu(0, 4, 8),
    },
}


def check_in_place(name: str) -> None:
    tokens = build(8, **IN_PLACE[name])
    assert tokens.doc_ids[0].tolist() == [0, 0, 0, PADDING, 1, 1, PADDING, PADDING]
    assert tokens.position_ids[0].tolist() == [0, 1, 2, 0, 0, 1, 0, 0]
    assert tokens.learn_mask[0].int().tolist() == [1, 1, 1, 0, 1, 1, 0, 0]
    assert tokens.slots(1).labels[0].tolist() == [12, _, _, _, _, _, _, _]


@pytest.mark.parametrize("name", IN_PLACE)
def test_documents_padded_in_place_are_the_same_by_every_source(name: str) -> None:
    check_in_place(name)


# The same for documents end to end: 10 11 12 | 13 14 15 16.
END_TO_END: dict[str, dict[str, Tensor]] = {
    "positions": {"position_ids": row(0, 1, 2, 0, 1, 2, 3)},
    "seq_idx": {"seq_idx": row(0, 0, 0, 1, 1, 1, 1)},
    "bounds": {"cu_seqlens": cu(0, 3, 7)},
    "bounds with empty documents": {"cu_seqlens": cu(0, 0, 3, 3, 7, 7)},
    "three equal axes": {"position_ids": row(0, 1, 2, 0, 1, 2, 3).expand(3, 1, 7)},
    "text positions in front of three equal axes": {"position_ids": row(0, 1, 2, 0, 1, 2, 3).expand(4, 1, 7)},
    "all of them": {
        "attention_mask": torch.ones(1, 7),
        "position_ids": row(0, 1, 2, 0, 1, 2, 3),
        "seq_idx": row(0, 0, 0, 1, 1, 1, 1).int(),
        "cu_seqlens": cu(0, 3, 7),
    },
}


@pytest.mark.parametrize("name", END_TO_END)
def test_documents_end_to_end_are_the_same_by_every_source(name: str) -> None:
    tokens = build(7, **END_TO_END[name])
    assert tokens.doc_ids[0].tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert tokens.position_ids[0].tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert tokens.slots(1).labels[0].tolist() == [12, _, _, 15, 16, _, _]


def test_padded_bounds_lay_documents_out_with_gaps() -> None:
    tokens = build(16, cu_seqlens=cu(0, 3, 8, 9), cu_seqlens_padded=cu(0, 4, 12, 16))
    assert tokens.doc_ids[0].tolist() == [0, 0, 0, -1, 1, 1, 1, 1, 1, -1, -1, -1, 2, -1, -1, -1]
    assert tokens.slots(1).labels[0].tolist() == [12, _, _, _, 16, 17, 18, *[_] * 9]


def test_rows_are_told_apart_on_their_own() -> None:
    ids = torch.arange(8).reshape(2, 4)
    expected = [[0, 0, 1, 1], [PADDING, 0, 0, 0]]
    by_number = TokenBatch.from_mask(ids, torch.ones(2, 4), seq_idx=torch.tensor([[3, 3, 4, 4], [-1, 0, 0, 0]]))
    positions = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 2]])
    by_position = TokenBatch.from_mask(
        ids, torch.ones(2, 4), torch.tensor([[1] * 4, [0, 1, 1, 1]]), position_ids=positions
    )
    assert by_number.doc_ids.tolist() == by_position.doc_ids.tolist() == expected
    assert by_number.position_ids.tolist() == positions.tolist()


def test_one_row_of_positions_goes_for_all() -> None:
    ids = torch.arange(8).reshape(2, 4)
    tokens = TokenBatch.from_mask(ids, torch.ones(2, 4), position_ids=row(0, 1, 0, 1))
    assert tokens.doc_ids.tolist() == [[0, 0, 1, 1]] * 2
    assert tokens.position_ids.tolist() == [[0, 1, 0, 1]] * 2


def test_documents_of_one_token_end_to_end() -> None:
    for sources in ({"position_ids": row(0, 0, 0, 1)}, {"seq_idx": row(0, 1, 2, 2)}, {"cu_seqlens": cu(0, 1, 2, 4)}):
        tokens = build(4, **sources)
        assert tokens.doc_ids[0].tolist() == [0, 1, 2, 2]
        assert tokens.position_ids[0].tolist() == [0, 0, 0, 1]


def test_a_row_may_start_with_a_later_chunk_of_a_document() -> None:
    tokens = build(5, position_ids=row(64, 65, 0, 1, 2))
    assert tokens.doc_ids[0].tolist() == [0, 0, 1, 1, 1]
    assert tokens.position_ids[0].tolist() == [64, 65, 0, 1, 2]


@pytest.mark.parametrize(
    ("sources", "documents"),
    [
        ({"seq_idx": row(0, 0, 1, 1)}, [0, 0, 1, 1]),
        ({"cu_seqlens": cu(0, 2, 4)}, [0, 0, 1, 1]),
        ({"seq_idx": row(0, 0, 0, 0)}, [0, 0, 0, 0]),
        ({"cu_seqlens": cu(0, 4)}, [0, 0, 0, 0]),
    ],
)
def test_another_source_says_whether_a_jump_is_a_chunk_or_a_gap(
    sources: dict[str, Tensor], documents: list[int]
) -> None:
    tokens = build(4, position_ids=row(0, 1, 64, 65), **sources)
    assert tokens.doc_ids[0].tolist() == documents
    assert tokens.position_ids[0].tolist() == [0, 1, 64, 65]


BOTH_READINGS: dict[str, tuple[dict[str, Tensor], str]] = {
    "a jump ahead": ({"position_ids": row(0, 1, 64, 65)}, "slot 2: a later chunk .* or one document has a gap"),
    "a jump back": ({"position_ids": row(0, 1, 2, 1)}, "slot 3: a later chunk .* or one document has a gap"),
    "a position twice": ({"position_ids": row(0, 1, 1, 2)}, "slot 2: a later chunk .* or one document has a gap"),
    "positions that go on behind masked tokens": (
        {"attention_mask": row(1, 0, 1, 1), "position_ids": row(0, 0, 1, 2)},
        "slot 2: a later chunk .* or one document has a gap",
    ),
    "axes that differ": (
        {"position_ids": torch.stack([row(0, 1, 1, 2), row(0, 1, 1, 2), row(0, 1, 2, 3)])},
        "an image begins or ends within a document, or a document starts",
    ),
    "axes that differ behind the text's": (
        {"position_ids": torch.stack([row(0, 1, 2, 3), *[row(0, 1, 1, 2)] * 3])},
        "an image begins or ends within a document, or a document starts",
    ),
    "positions rolled by one slot": (
        {"position_ids": row(1, 2, 3, 0)},
        "begin at 1 and end at 0: they were rolled along the row, or a later chunk of a document lies in front",
    ),
    "positions rolled backwards": ({"position_ids": row(3, 0, 1, 2)}, "rolled along the row, or a later chunk"),
    "positions of two documents rolled by one slot": (
        {"position_ids": row(1, 0, 1, 0)},
        "rolled along the row, or a later chunk of a document lies in front and a document of 1 tokens behind",
    ),
    "a mask of numbers": ({"attention_mask": row(1, 1, 2, 2)}, "they number documents, or they are a mistake"),
    "bounds that end early": ({"cu_seqlens": cu(0, 3)}, "may be padding, or a document whose bound is missing"),
    "bounds whose rest is half masked": (
        {"cu_seqlens": cu(0, 2), "attention_mask": row(1, 1, 1, 0)},
        "may be padding, or a document whose bound is missing",
    ),
    "padded bounds alone": ({"cu_seqlens_padded": cu(0, 4)}, "filled with tokens, or with tokens and padding"),
    "a masked token within bounds": (
        {"cu_seqlens": cu(0, 4), "attention_mask": row(1, 1, 0, 1)},
        "slot 2 is padding by attention_mask and a token by cu_seqlens",
    ),
    "a masked token within a row": (
        {"attention_mask": row(1, 0, 1, 1)},
        "document 0 continues at row 0, slot 2 behind padding: .* masked, or two documents have one number",
    ),
    "numbers that fall": (
        {"seq_idx": row(1, 1, 0, 0)},
        "document 0 continues at row 0, slot 2 behind document 1, or documents are not numbered in their order",
    ),
}


@pytest.mark.parametrize("name", BOTH_READINGS)
def test_what_can_be_read_in_two_ways_is_refused_with_both(name: str) -> None:
    sources, message = BOTH_READINGS[name]
    with pytest.raises(BatchError, match=message):
        build(4, **sources)


def test_bounds_for_several_rows_are_refused_with_both_readings() -> None:
    ids = torch.arange(8).reshape(2, 4)
    with pytest.raises(BatchError, match="bounds within each row, or within the rows laid end to end"):
        TokenBatch.from_mask(ids, torch.ones(2, 4), cu_seqlens=cu(0, 4, 8))


CONTRADICTIONS: dict[str, tuple[dict[str, Tensor], str]] = {
    "bounds and numbers": (
        {"cu_seqlens": cu(0, 2, 4), "seq_idx": row(0, 0, 0, 1)},
        "slot 2 is in document 1 by cu_seqlens and in document 0 by seq_idx",
    ),
    "numbers and mask": (
        {"seq_idx": row(0, 0, -1, -1), "attention_mask": row(1, 1, 1, 0)},
        "slot 2 is padding by seq_idx and a token by attention_mask",
    ),
    "bounds and mask": (
        {"cu_seqlens": cu(0, 2), "cu_seqlens_padded": cu(0, 4), "attention_mask": row(1, 1, 1, 0)},
        "slot 2 is a token by attention_mask and padding by cu_seqlens",
    ),
    "positions that run over a bound": (
        {"cu_seqlens": cu(0, 2, 4), "position_ids": row(0, 1, 2, 3)},
        "position_ids go on from 1 to 2 at row 0, slot 2, which is in another document by cu_seqlens",
    ),
    "positions that restart within a document": (
        {"seq_idx": row(0, 0, 0, 0), "position_ids": row(0, 1, 0, 1)},
        "position_ids start anew from 1 to 0 at row 0, slot 2, which is in the same document by seq_idx",
    ),
    "positions that do not leave 0": (
        {"cu_seqlens": cu(0, 4), "position_ids": row(0, 0, 1, 2)},
        "position_ids start anew from 0 to 0 at row 0, slot 1, which is in the same document by cu_seqlens",
    ),
    "positions that fall within a document": (
        {"seq_idx": row(0, 0, 0, 0), "position_ids": row(7, 8, 3, 4)},
        "position_ids start anew from 8 to 3 at row 0, slot 2",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_sources_that_disagree_are_refused_by_name(name: str) -> None:
    sources, message = CONTRADICTIONS[name]
    with pytest.raises(BatchError, match=message):
        build(4, **sources)


@pytest.mark.parametrize(
    ("bounds", "room"),
    [
        ((0, 3, 5), None),
        ((1, 4), None),
        ((0, 3, 2, 4), None),
        ((), None),
        ((0, 3, 4), (0, 2, 4)),
        ((0, 2), (0, 2, 4)),
        ((0, 2, 4), (1, 3, 4)),
        ((1, 2), (0, 4)),
        ((0, 2), (0, 5)),
    ],
)
def test_bounds_that_do_not_fit_the_row_are_refused(bounds: tuple[int, ...], room: tuple[int, ...] | None) -> None:
    padded = {} if room is None else {"cu_seqlens_padded": cu(*room)}
    with pytest.raises(BatchError, match="do not lay out 4 slots"):
        build(4, cu_seqlens=cu(*bounds), **padded)


@pytest.mark.parametrize("value", [2, -1, 0.5])
def test_masks_take_no_other_values_than_0_and_1(value: float) -> None:
    with pytest.raises(BatchError, match="expected learn_mask of 0 and 1, got values from"):
        TokenBatch.from_mask(row(5, 6, 7), torch.tensor([[0, 1, value]]))


@pytest.mark.parametrize("name", ["seq_idx", "position_ids", "attention_mask"])
def test_a_source_of_another_shape_is_refused_by_name(name: str) -> None:
    with pytest.raises(BatchError, match=f"expected {name} .* = \\[1, 4\\], got \\[1, 5\\]"):
        build(4, **{name: row(0, 0, 0, 0, 0)})


def test_ids_without_a_batch_axis_are_refused() -> None:
    with pytest.raises(
        BatchError, match=r"input_ids: expected a tensor of whole numbers \[batch, seq\], got a Tensor \[3\]"
    ):
        TokenBatch.all_tokens(torch.arange(3))


spans = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=5)


@settings(max_examples=60)
@given(spans=spans)
def test_random_layouts_are_the_same_by_every_source(spans: list[tuple[int, int]]) -> None:
    """Documents of some length, none included, each with some padding behind it."""
    lengths, rooms = [length for length, _ in spans], [length + pad for length, pad in spans]
    documents, positions = [], []
    for length, pad in spans:
        number = max(documents, default=-1) + 1
        documents += [number] * length + [PADDING] * pad
        positions += [*range(length), *[0] * pad]
    mask = {"attention_mask": row(*(int(number != PADDING) for number in documents))}
    bounds = {
        "cu_seqlens": cu(0, *accumulate(lengths)),
        "cu_seqlens_padded": cu(0, *accumulate(rooms)),
    }
    for sources in (
        {"seq_idx": row(*documents)},
        {"position_ids": row(*positions), **mask},
        bounds,
        {"seq_idx": row(*documents), "position_ids": row(*positions), **bounds, **mask},
    ):
        tokens = build(len(documents), **sources)
        assert tokens.doc_ids[0].tolist() == documents
        assert tokens.position_ids[0].tolist() == positions


# What collators emit


EXAMPLES = [{"input_ids": [10, 11, 12], "labels": [_, 11, 12]}, {"input_ids": [13, 14, 15, 16]}]
EXAMPLES[1]["labels"] = EXAMPLES[1]["input_ids"]


@pytest.mark.parametrize(
    "names", [{"return_seq_idx"}, {"return_flash_attn_kwargs"}, set(), {"return_seq_idx", "start"}]
)
def test_the_flattening_collator_of_transformers(names: set[str]) -> None:
    options = {name: True for name in names if name != "start"}
    start = 2 if "start" in names else 0
    tokens = TokenBatch.from_collated(DataCollatorWithFlattening(position_ids_start=start, **options)(EXAMPLES))
    assert tokens.doc_ids[0].tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert tokens.position_ids[0].tolist() == [start + p for p in (0, 1, 2, 0, 1, 2, 3)]
    assert tokens.slots(1).labels[0].tolist() == [12, _, _, 15, 16, _, _]


def test_the_padding_free_collator_of_trl_and_the_padded_one() -> None:
    collators = pytest.importorskip("trl.trainer.sft_trainer", reason="trl is not installed")
    flat = collators.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, pad_to_multiple_of=8)
    tokens = TokenBatch.from_collated(flat(EXAMPLES))
    assert tokens.doc_ids[0].tolist() == [0, 0, 0, 1, 1, 1, 1, 2]  # it calls the padding a document of one token
    assert tokens.slots(1).labels[0].tolist() == [12, _, _, 15, 16, _, _, _]
    padded = collators.DataCollatorForLanguageModeling(pad_token_id=0, return_position_ids=True)
    assert TokenBatch.from_collated(padded(EXAMPLES)).slots(1).labels.tolist() == [[12, _, _, _], [15, 16, _, _]]


def test_a_collators_queries_and_keys_are_the_same_documents() -> None:
    inputs: dict[str, Any] = {"input_ids": row(1, 2, 3), "labels": row(1, 2, 3)}
    with pytest.raises(BatchError, match=r"cu_seq_lens_q and cu_seq_lens_k differ: \[\[0, 2, 3\], \[0, 1, 3\]\]"):
        TokenBatch.from_collated({**inputs, "cu_seq_lens_q": cu(0, 2, 3), "cu_seq_lens_k": cu(0, 1, 3)})
    tokens = TokenBatch.from_collated({**inputs, "cu_seq_lens_q": cu(0, 2, 3), "max_length_q": 2})
    assert tokens.doc_ids[0].tolist() == [0, 0, 1]
    with pytest.raises(BatchError, match="nothing says which tokens are to be learnt"):
        TokenBatch.from_collated({"input_ids": row(1, 2, 3)})
