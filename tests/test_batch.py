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
    for depth in (1, 2, 3):
        assert table(tokens, depth)[1:] == ([_] * 4, [0] * 4)


def test_a_row_beside_an_all_masked_one_keeps_its_slots() -> None:
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    tokens = TokenBatch.from_labels(ids, torch.tensor([[_] * 4, [_, _, 7, 8]]))
    assert tokens.slots(1).labels.tolist() == [[_] * 4, [7, 8, _, _]]
    assert tokens.slots(2).labels.tolist() == [[_] * 4, [8, _, _, _]]


def test_packed_documents_of_length_one_have_no_slot_and_give_none() -> None:
    one, three = [([1], [True])], [([2, 3, 4], [True] * 3)]
    tokens = TokenBatch.from_rows([one + one + three + one])
    assert tokens.doc_ids[0].tolist() == [0, 1, 2, 2, 2, 3]
    assert tokens.position_ids[0].tolist() == [0, 0, 0, 1, 2, 0]
    assert table(tokens, 1)[1:] == ([_, _, 4, _, _, _], [0, 0, 1, 0, 0, 0])
    assert table(tokens, 2)[1:] == ([_] * 6, [0] * 6)
    assert tokens.segments == (Segment((0,), 0, 1), Segment((0,), 1, 2), Segment((0,), 2, 5), Segment((0,), 5, 6))


def test_the_first_answer_token_is_predicted_one_slot_earlier_by_every_depth() -> None:
    ids = row(1, 2, 3, 4, 50, 60)
    tokens = TokenBatch.from_labels(ids, row(_, _, _, _, 50, 60))
    first = [int((tokens.slots(depth).labels[0] == 50).nonzero()) for depth in (1, 2, 3)]
    assert first == [2, 1, 0]


def test_the_targets_own_loss_counts_from_the_last_prompt_token_to_the_last_but_one() -> None:
    tokens = TokenBatch.from_labels(row(1, 2, 3, 40, 50), row(_, _, _, 40, 50))
    assert tokens.main_gate()[0].int().tolist() == [0, 0, 1, 1, 0]
    packed = TokenBatch.from_rows([[([1, 2, 3], [True] * 3), ([4], [True])]], length=5)
    assert packed.main_gate()[0].int().tolist() == [1, 1, 0, 0, 0]


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
    with pytest.raises(BatchError, match=r"got 3 for token 2 at row 0, slot 1 .* so they are shifted"):
        TokenBatch.from_labels(row(1, 2, 3, 4), row(_, 3, 4, _))


@pytest.mark.parametrize("labels", [(_, 3, 5, _), (_, 2, 4, _), (1, 2, 3, 0)])
def test_labels_of_other_tokens_are_not_called_shifted(labels: tuple[int, ...]) -> None:
    with pytest.raises(BatchError, match="nor are they the next tokens"):
        TokenBatch.from_labels(row(1, 2, 3, 4), row(*labels))


@pytest.mark.parametrize("mask", [torch.ones(1, 5), torch.ones(1, 1, 3, 3), torch.ones(2, 3)])
def test_masks_with_look_ahead_columns_or_more_axes_are_refused(mask: torch.Tensor) -> None:
    """https://github.com/PaddlePaddle/PaddleFleet/pull/1646"""
    with pytest.raises(BatchError, match=r"expected attention_mask \[batch, seq\] = \[1, 3\], got"):
        TokenBatch.all_tokens(row(1, 2, 3), mask)


def test_a_document_torn_by_padding_is_refused() -> None:
    with pytest.raises(BatchError, match="document 0 continues at row 0, slot 2 behind padding"):
        TokenBatch.all_tokens(torch.zeros(2, 5, dtype=torch.int64), torch.tensor([[1, 0, 1, 0, 1]] * 2))


def test_interleaved_documents_are_refused() -> None:
    ids, learn = row(1, 2, 3), torch.ones(1, 3, dtype=torch.bool)
    with pytest.raises(BatchError, match="document 0 continues at row 0, slot 2 behind document 1"):
        TokenBatch(ids, learn, row(0, 1, 0), row(0, 0, 0))


def test_learnt_padding_is_refused() -> None:
    with pytest.raises(BatchError, match="set on padding"):
        TokenBatch(row(1, 2), torch.ones(1, 2, dtype=torch.bool), row(0, PADDING), row(0, 0))


def test_placeholder_tokens_never_enter_a_depth() -> None:
    image = 900
    tokens = TokenBatch.from_mask(row(1, image, 2, 3, 4), torch.ones(1, 5), placeholder_ids=(image,))
    assert table(tokens, 1) == ([image, 2, 3, 4, 0], [_, 3, 4, _, _], [0, 1, 1, 0, 0])
    assert table(tokens, 2) == ([2, 3, 4, 0, 0], [_, 4, _, _, _], [0, 1, 0, 0, 0])
    assert tokens.slots(1).enters[0].tolist() == [False, True, True, True, False]


def test_no_depth_counts_behind_a_placeholder_that_an_earlier_depth_read() -> None:
    ids = row(10, 11, 900, 900, 12, 13, 14)
    tokens = TokenBatch.from_mask(ids, row(1, 1, 0, 0, 1, 1, 1), placeholder_ids=(900,))
    gates = [tokens.slots(depth).gate[0].int().tolist() for depth in (1, 2, 3)]
    assert gates == [[0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 0, 0, 0], [0] * 7]
    learnt = TokenBatch.from_mask(ids, torch.ones(1, 7), placeholder_ids=(900,))
    assert learnt.slots(1).gate[0].int().tolist() == [
        1,
        0,
        0,
        1,
        1,
        0,
        0,
    ]  # slot 0 reads 11 and predicts the placeholder


def test_no_token_of_another_document_enters() -> None:
    tokens = TokenBatch.from_rows([[([1, 2, 3, 4], [True] * 4), ([5, 6], [True] * 2)]], length=7)
    assert tokens.slots(1).enters[0].int().tolist() == [1, 1, 1, 0, 1, 0, 0]
    assert tokens.slots(2).enters[0].int().tolist() == [1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("mask", [[True], [True] * 4, []])
def test_a_document_whose_mask_is_shorter_or_longer_is_refused(mask: list[bool]) -> None:
    with pytest.raises(BatchError, match=f"got {len(mask)} for the 3 tokens of document 1 of row 0"):
        TokenBatch.from_rows([[([9], [True]), ([1, 2, 3], mask)]])


def test_rows_with_equal_stretches_share_a_segment() -> None:
    tokens = TokenBatch.from_rows(
        [[([1, 2, 3], [True] * 3)], [([4, 5], [True] * 2)], [([6], [True]), ([7, 8], [True] * 2)]]
    )
    assert tokens.segments == (Segment((0, 1), 0, 3), Segment((2,), 0, 1), Segment((2,), 1, 3))


def test_a_row_of_padding_only_is_in_no_segment() -> None:
    tokens = TokenBatch.from_rows([[([1, 2], [True] * 2)], []])
    assert tokens.segments == (Segment((0,), 0, 2),)
    assert not tokens.slots(1).gate.any()


def test_a_batch_without_rows_or_without_slots_has_neither_documents_nor_gates() -> None:
    for shape in ((0, 4), (2, 0)):
        tokens = TokenBatch.all_tokens(torch.zeros(shape, dtype=torch.int64))
        assert tokens.segments == ()
        assert not tokens.slots(1).gate.any()


def test_no_rows_are_a_batch_of_none() -> None:
    assert TokenBatch.from_rows([]).shape == (0, 0)


def test_rows_longer_than_asked_are_refused() -> None:
    assert TokenBatch.from_rows([[([1, 2, 3], [True] * 3)]], length=3).shape == (1, 3)
    with pytest.raises(BatchError, match="at most 2 tokens a row, got 3"):
        TokenBatch.from_rows([[([1, 2, 3], [True] * 3)]], length=2)


def test_ahead_fills_what_is_past_the_end_and_keeps_trailing_axes() -> None:
    values = torch.arange(6.0).view(1, 3, 2)
    assert ahead(values, 1, 0).tolist() == [[[2, 3], [4, 5], [0, 0]]]
    assert ahead(values, 2, 0).tolist() == [[[4, 5], [0, 0], [0, 0]]]
    for steps in (3, 4):
        assert ahead(values, steps, -1).tolist() == [[[-1, -1]] * 3]


def test_a_depth_is_compared_with_the_target_where_it_predicts_the_same_token() -> None:
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    tokens = TokenBatch.all_tokens(ids)
    states, rows = tokens.reached(ids[..., None].float(), 2), tokens.places(2)
    assert len(rows) == 2
    # The state of token x predicts the token behind x: slot 0 at depth 1 predicts 3, which is what the state of 2 predicts.
    assert states[rows[0], 0][:, :2].tolist() == [[2, 3], [6, 7]]
    assert states[rows[1], 0][:, :1].tolist() == [[3], [7]]
    for depth in rows:
        assert depth.shape == (2, 4)
        assert 0 <= int(depth.min()) <= int(depth.max()) < len(states)


def test_the_plan_names_slots_labels_and_target_rows() -> None:
    plan = TokenBatch.all_tokens(row(10, 11, 12, 13, 14, 15)).plan(2)
    assert [each.slots.tolist() for each in plan.depths] == [[0, 1, 2, 3], [0, 1, 2]]
    assert [each.labels.tolist() for each in plan.depths] == [[12, 13, 14, 15], [13, 14, 15]]
    assert [each.target_rows.tolist() for each in plan.depths] == [[0, 1, 2, 3], [1, 2, 3]]
    assert [list(each.known_rows) for each in plan.depths] == [[0, 1, 2, 3], [1, 2, 3]]
    assert plan.target_slots.tolist() == [1, 2, 3, 4]
    assert plan.full.tolist() == [0, 1, 2]
    assert plan.counts.tolist() == [4, 3]


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
