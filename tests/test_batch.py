"""The mask contract, on literal tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_zoo.batch import IGNORED, PADDING, Segment, TokenBatch, ahead
from mtp_zoo.errors import BatchError

_ = IGNORED


def row(*values: int) -> torch.Tensor:
    return torch.tensor([values])


def table(tokens: TokenBatch, depth: int) -> tuple[list[int], list[int], list[int]]:
    slots = tokens.slots(depth)
    return slots.input_ids[0].tolist(), slots.labels[0].tolist(), slots.gate[0].int().tolist()


def test_an_answer_behind_a_prompt_is_learnt_from_the_last_prompt_tokens_on() -> None:
    tokens = TokenBatch.from_labels(row(1, 2, 3, 40, 50, 60), row(_, _, _, 40, 50, 60))
    assert table(tokens, 1) == ([2, 3, 40, 50, 60, 0], [_, 40, 50, 60, _, _], [0, 1, 1, 1, 0, 0])
    assert table(tokens, 2) == ([3, 40, 50, 60, 0, 0], [40, 50, 60, _, _, _], [1, 1, 1, 0, 0, 0])
    assert table(tokens, 3) == ([40, 50, 60, 0, 0, 0], [50, 60, _, _, _, _], [1, 1, 0, 0, 0, 0])


def test_two_packed_documents_never_look_at_each_other() -> None:
    tokens = TokenBatch.from_rows([[([1, 2, 3, 4], [True] * 4), ([5, 6, 7], [True] * 3)]], length=8)
    assert tokens.doc_ids[0].tolist() == [0, 0, 0, 0, 1, 1, 1, PADDING]
    assert tokens.position_ids[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert table(tokens, 1)[1:] == ([3, 4, _, _, 7, _, _, _], [1, 1, 0, 0, 1, 0, 0, 0])
    assert table(tokens, 2)[1:] == ([4, _, _, _, _, _, _, _], [1, 0, 0, 0, 0, 0, 0, 0])


def test_end_of_sequence_is_learnt_and_padding_behind_it_is_not() -> None:
    eos, pad = 99, 0
    tokens = TokenBatch.from_labels(row(1, 2, eos, pad), row(1, 2, eos, _), row(1, 1, 1, 0))
    assert table(tokens, 1) == ([2, eos, pad, 0], [eos, _, _, _], [1, 0, 0, 0])


def test_a_row_shorter_than_the_depth_has_no_slot_and_nothing_wraps_around() -> None:
    """https://github.com/hiyouga/LlamaFactory/pull/10648"""
    tokens = TokenBatch.all_tokens(row(7, 8))
    for depth in (1, 2, 3):
        assert table(tokens, depth)[1:] == ([_, _], [0, 0])
    assert table(tokens, 3)[0] == [0, 0]


def test_a_depth_keeps_every_slot_it_can_use() -> None:
    tokens = TokenBatch.all_tokens(torch.arange(10)[None])
    assert [int(tokens.slots(depth).gate.sum()) for depth in (1, 2, 3)] == [8, 7, 6]


def test_an_all_masked_row_has_no_slot() -> None:
    tokens = TokenBatch.from_labels(row(1, 2, 3, 4), row(_, _, _, _))
    assert not any(tokens.slots(depth).gate.any() for depth in (1, 2, 3))


def test_left_padding_shifts_nothing() -> None:
    tokens = TokenBatch.all_tokens(row(0, 0, 1, 2, 3), row(0, 0, 1, 1, 1))
    assert tokens.position_ids[0].tolist() == [0, 0, 0, 1, 2]
    assert table(tokens, 1)[1:] == ([_, _, 3, _, _], [0, 0, 1, 0, 0])
    assert tokens.segments == (Segment((0,), 2, 5),)


def test_no_labels_are_not_all_labels() -> None:
    """https://github.com/modelscope/ms-swift/pull/8192"""
    with pytest.raises(BatchError, match="nothing says which tokens are to be learnt"):
        TokenBatch.from_labels(row(1, 2, 3), None)


def test_labels_that_were_already_shifted_are_refused_with_the_place() -> None:
    with pytest.raises(BatchError, match="got 3 for token 2 at row 0, slot 1"):
        TokenBatch.from_labels(row(1, 2, 3, 4), row(_, 3, 4, _))


@pytest.mark.parametrize("mask", [torch.ones(1, 5), torch.ones(1, 1, 3, 3), torch.ones(2, 3)])
def test_masks_with_look_ahead_columns_or_more_axes_are_refused(mask: torch.Tensor) -> None:
    """https://github.com/PaddlePaddle/PaddleFleet/pull/1646"""
    with pytest.raises(BatchError, match="expected a mask of shape"):
        TokenBatch.all_tokens(row(1, 2, 3), mask)


def test_a_mask_of_document_numbers_is_refused() -> None:
    with pytest.raises(BatchError, match="mask of 0 and 1"):
        TokenBatch.all_tokens(row(1, 2, 3), row(1, 1, 2))


def test_a_document_torn_by_padding_is_refused() -> None:
    with pytest.raises(BatchError, match="document 0 continues at row 0, slot 2"):
        TokenBatch.all_tokens(row(1, 2, 3), row(1, 0, 1))


def test_interleaved_documents_are_refused() -> None:
    ids, learn = row(1, 2, 3), torch.ones(1, 3, dtype=torch.bool)
    with pytest.raises(BatchError, match="document 0 continues"):
        TokenBatch(ids, learn, row(0, 1, 0), row(0, 0, 0))


def test_learnt_padding_is_refused() -> None:
    with pytest.raises(BatchError, match="set on padding"):
        TokenBatch(row(1, 2), torch.ones(1, 2, dtype=torch.bool), row(0, PADDING), row(0, 0))


def test_padded_cumulative_lengths_lay_documents_out_with_gaps() -> None:
    """https://github.com/NVIDIA/Megatron-LM/pull/4495"""
    ids = torch.arange(16)[None]
    tokens = TokenBatch.from_mask(
        ids,
        torch.ones_like(ids, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, 3, 8, 9]),
        cu_seqlens_padded=torch.tensor([0, 4, 12, 16]),
    )
    assert tokens.doc_ids[0].tolist() == [0, 0, 0, -1, 1, 1, 1, 1, 1, -1, -1, -1, 2, -1, -1, -1]
    assert table(tokens, 1)[1] == [2, _, _, _, 6, 7, 8, _, _, _, _, _, _, _, _, _]


@pytest.mark.parametrize("bounds", [[0, 3, 7], [1, 3], [0, 2, 2], [0, 4, 3]])
def test_cumulative_lengths_that_do_not_fit_the_row_are_refused(bounds: list[int]) -> None:
    with pytest.raises(BatchError, match="do not lay out"):
        TokenBatch.from_mask(row(1, 2, 3, 4), torch.ones(1, 4), cu_seqlens=torch.tensor(bounds))


def test_documents_are_told_apart_by_positions_that_restart() -> None:
    """https://github.com/pytorch/torchtitan/pull/3392"""
    ids, learn = torch.arange(7)[None], torch.ones(1, 7)
    by_position = TokenBatch.from_mask(ids, learn, position_ids=row(0, 1, 2, 0, 1, 2, 3))
    by_length = TokenBatch.from_mask(ids, learn, cu_seqlens=torch.tensor([0, 3, 7]))
    assert torch.equal(by_position.doc_ids, by_length.doc_ids)
    assert torch.equal(by_position.position_ids, by_length.position_ids)


def test_a_document_that_restarts_at_a_later_position_is_a_document_of_its_own() -> None:
    ids = torch.arange(5)[None]
    tokens = TokenBatch.from_mask(ids, torch.ones(1, 5), position_ids=row(0, 1, 64, 65, 66))
    assert tokens.doc_ids[0].tolist() == [0, 0, 1, 1, 1]
    assert tokens.position_ids[0].tolist() == [0, 1, 64, 65, 66]


def test_placeholder_tokens_never_enter_a_depth() -> None:
    image = 900
    tokens = TokenBatch.from_mask(row(1, image, 2, 3, 4), torch.ones(1, 5), placeholder_ids=(image,))
    assert table(tokens, 1)[2] == [0, 1, 1, 0, 0]
    assert table(tokens, 2)[2] == [1, 1, 0, 0, 0]


def test_rows_with_equal_stretches_share_a_segment() -> None:
    tokens = TokenBatch.from_rows(
        [[([1, 2, 3], [True] * 3)], [([4, 5], [True] * 2)], [([6], [True]), ([7, 8], [True] * 2)]]
    )
    assert tokens.segments == (Segment((0, 1), 0, 3), Segment((2,), 0, 1), Segment((2,), 1, 3))


def test_a_row_of_padding_only_is_in_no_segment() -> None:
    tokens = TokenBatch.from_rows([[([1, 2], [True] * 2)], []])
    assert tokens.segments == (Segment((0,), 0, 2),)
    assert not tokens.slots(1).gate.any()


def test_rows_longer_than_asked_are_refused() -> None:
    with pytest.raises(BatchError, match="at most 2 tokens a row, got 3"):
        TokenBatch.from_rows([[([1, 2, 3], [True] * 3)]], length=2)


def test_ahead_keeps_trailing_axes() -> None:
    values = torch.arange(6.0).view(1, 3, 2)
    assert ahead(values, 1, 0).tolist() == [[[2, 3], [4, 5], [0, 0]]]
    assert ahead(values, 3, -1).tolist() == [[[-1, -1]] * 3]


documents = st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(documents, min_size=1, max_size=3), pad=st.integers(0, 3), depth=st.integers(1, 4))
def test_slots_equal_a_plain_loop_over_documents(rows: list[list[list[bool]]], pad: int, depth: int) -> None:
    unique = iter(range(1, 10_000))
    packed = [[([next(unique) for _ in learn], learn) for learn in docs] for docs in rows]
    length = max(sum(len(ids) for ids, _ in docs) for docs in packed) + pad
    tokens = TokenBatch.from_rows(packed, length=length)
    slots = tokens.slots(depth)
    found = [(b, t, int(slots.input_ids[b, t]), int(slots.labels[b, t])) for b, t in slots.gate.nonzero().tolist()]
    expected = []
    for b, docs in enumerate(packed):
        start = 0
        for ids, learn in docs:
            for t in range(len(ids) - depth - 1):
                if learn[t + depth + 1]:
                    expected.append((b, start + t, ids[t + depth], ids[t + depth + 1]))
            start += len(ids)
    assert found == expected
    assert bool((slots.labels[~slots.gate] == IGNORED).all())
