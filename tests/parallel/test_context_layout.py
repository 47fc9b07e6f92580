"""Context-parallel layouts: literal tables, and the law that nothing is lost, doubled or changed by a cut."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtp_zoo.batch import IGNORED, PADDING, TokenBatch, ahead
from mtp_zoo.context_layout import Layout, gather_order, pad_documents
from mtp_zoo.context_parallel import ShardedBatch, split
from mtp_zoo.errors import ParallelError

_ = IGNORED
LAYOUTS = get_args(Layout)


def packed(*lengths: int, first: int = 10) -> TokenBatch:
    """One row of documents whose tokens are numbered on from `first`, all of them learnt."""
    ids = iter(range(first, first + sum(lengths)))
    return TokenBatch.from_rows([[([next(ids) for _ in range(n)], [True] * n) for n in lengths]])


def padded_segments() -> TokenBatch:
    """Documents of 3, 5 and 1 tokens in rooms of 4, 8 and 4 slots; the token in slot t is 10 + t."""
    ids = 10 + torch.arange(16)[None]
    return TokenBatch.from_mask(
        ids,
        torch.ones_like(ids, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, 3, 8, 9]),
        cu_seqlens_padded=torch.tensor([0, 4, 12, 16]),
    )


def ranks(tokens: TokenBatch, size: int, layout: Layout, depths: int = 3) -> list[ShardedBatch]:
    return [split(tokens, depths, rank, size, layout) for rank in range(size)]


@pytest.mark.parametrize(
    ("layout", "size", "expected"),
    [
        ("zigzag", 1, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("zigzag", 2, [[0, 1, 6, 7], [2, 3, 4, 5]]),
        ("zigzag", 4, [[0, 7], [1, 6], [2, 5], [3, 4]]),
        ("contiguous", 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("contiguous", 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
def test_slots_of_one_document(layout: Layout, size: int, expected: list[list[int]]) -> None:
    assert [part.slot_ids[0].tolist() for part in ranks(packed(8), size, layout)] == expected


def test_zigzag_cuts_every_document_and_contiguous_cuts_the_row() -> None:
    tokens = packed(4, 8, 4)
    assert [part.slot_ids[0].tolist() for part in ranks(tokens, 2, "zigzag")] == [
        [0, 3, 4, 5, 10, 11, 12, 15],
        [1, 2, 6, 7, 8, 9, 13, 14],
    ]
    assert [part.slot_ids[0].tolist() for part in ranks(tokens, 2, "contiguous")] == [
        list(range(8)),
        list(range(8, 16)),
    ]


def test_padded_segments_on_two_ranks() -> None:
    """https://github.com/NVIDIA/Megatron-LM/pull/4495"""
    whole = padded_segments().slots(1)
    assert whole.labels[0].tolist() == [12, _, _, _, 16, 17, 18, _, _, _, _, _, _, _, _, _]
    first, second = ranks(padded_segments(), 2, "zigzag")
    assert first.slots(1).labels[0].tolist() == [12, _, 16, 17, _, _, _, _]
    assert second.slots(1).labels[0].tolist() == [_, _, 18, _, _, _, _, _]
    assert first.slots(1).input_ids[0].tolist() == [11, 14, 15, 16, 21, 22, 23, 0]
    assert second.slots(1).gate[0].tolist() == [False, False, True, False, False, False, False, False]
    assert first.doc_ids[0].tolist() == [0, PADDING, 1, 1, PADDING, PADDING, 2, PADDING]
    assert second.position_ids[0].tolist() == [1, 2, 2, 3, 4, 0, 0, 0]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("depth", "slots"), [(1, 4), (2, 2), (3, 1)])
def test_padded_segments_sum_to_the_whole(size: int, depth: int, slots: int) -> None:
    """https://github.com/NVIDIA/Megatron-LM/pull/4495"""
    tokens = padded_segments()
    parts = ranks(tokens, size, "zigzag")
    assert sum(int(part.slots(depth).gate.sum()) for part in parts) == slots
    assert sum(int(part.main_gate().sum()) for part in parts) == 6


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [2, 4])
def test_gathering_shifted_parts_is_shifting_the_whole(layout: Layout, size: int) -> None:
    """https://github.com/NVIDIA/Megatron-LM/pull/5946"""
    tokens = packed(8, 16, 8)
    parts = ranks(tokens, size, layout)
    whole = parts[0]
    for depth in (1, 2, 3):
        for name in ("input_ids", "labels", "gate"):
            gathered = whole.reassemble([getattr(part.slots(depth), name) for part in parts])
            assert torch.equal(gathered, getattr(tokens.slots(depth), name))
    mask = ahead(tokens.learn_mask, 1, True)  # a mask of the caller's own, filled with True at the end
    assert mask.dtype == torch.bool
    assert torch.equal(whole.reassemble([part.take(mask) for part in parts]), mask)


def test_only_the_second_rank_has_something_to_learn() -> None:
    """https://github.com/modelscope/mcore-bridge/pull/104"""
    ids = torch.arange(8)[None]
    learn = torch.zeros(1, 8, dtype=torch.bool)
    learn[0, 5:7] = True  # predicted from slots 3 and 4, which zigzag puts on rank 1
    first, second = ranks(TokenBatch.from_mask(ids, learn), 2, "zigzag", depths=1)
    assert not first.slots(1).gate.any()
    assert second.slots(1).labels[0].tolist() == [_, 5, 6, _]


def test_a_batch_without_anything_to_learn_has_none_on_any_rank() -> None:
    """https://github.com/modelscope/mcore-bridge/pull/104"""
    ids = torch.arange(8)[None]
    for part in ranks(TokenBatch.from_mask(ids, torch.zeros(1, 8, dtype=torch.bool)), 2, "zigzag"):
        assert not part.slots(1).gate.any()
        assert not part.main_gate().any()


def test_documents_that_do_not_divide_say_by_how_much_to_pad() -> None:
    with pytest.raises(ParallelError, match=r"multiples of 4 slots") as caught:
        split(packed(4, 7, 1), 1, 0, 2)
    assert caught.value.problems == (
        "row 0, slots 4 to 10: 7 slots, pad by 1",
        "row 0, slots 11 to 11: 1 slots, pad by 3",
    )
    assert "pad_documents(tokens, 4)" in caught.value.remedy
    split(pad_documents(packed(4, 7, 1), 4), 1, 0, 2)


def test_rows_that_do_not_divide_say_by_how_much_to_pad() -> None:
    with pytest.raises(ParallelError, match="multiple of 4 slots, got 10") as caught:
        split(packed(4, 6), 1, 0, 4, "contiguous")
    assert "by 2 slots" in caught.value.remedy


def test_padding_in_front_is_a_room_of_its_own() -> None:
    tokens = TokenBatch.from_mask(
        torch.arange(12)[None], torch.ones(1, 12), attention_mask=torch.tensor([[0] * 4 + [1] * 8])
    )
    first, second = ranks(tokens, 2, "zigzag")
    assert first.slot_ids[0].tolist() == [0, 3, 4, 5, 10, 11]
    assert second.slot_ids[0].tolist() == [1, 2, 6, 7, 8, 9]


def test_padding_documents_lays_them_out_anew() -> None:
    out = pad_documents(TokenBatch.from_rows([[([1, 2, 3], [True] * 3), ([4], [False])], []]), 4)
    assert out.input_ids.tolist() == [[1, 2, 3, 0, 4, 0, 0, 0], [0] * 8]
    assert out.doc_ids.tolist() == [[0, 0, 0, PADDING, 1, PADDING, PADDING, PADDING], [PADDING] * 8]
    assert out.learn_mask.tolist() == [[True] * 3 + [False] * 5, [False] * 8]
    assert out.position_ids.tolist() == [[0, 1, 2, 0, 0, 0, 0, 0], [0] * 8]


def test_padding_documents_keeps_positions_and_placeholders() -> None:
    tokens = TokenBatch.from_mask(
        torch.tensor([[0, 7, 8, 9]]),
        torch.ones(1, 4),
        torch.tensor([[0, 1, 1, 1]]),
        position_ids=torch.tensor([[0, 64, 65, 66]]),
        placeholder_ids=(8,),
    )
    out = pad_documents(tokens, 2)
    assert out.input_ids.tolist() == [[7, 8, 9, 0]]
    assert out.position_ids.tolist() == [[64, 65, 66, 0]]
    assert out.placeholders is not None
    assert out.placeholders.tolist() == [[False, True, False, False]]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((0, 0, 2), "depths: expected a whole number from 1 to 256, got 0"),
        ((1, 2, 2), "rank and size: expected 0 <= rank < size, or a group, got 2 and 2"),
        ((1,), "rank and size: expected 0 <= rank < size, or a group, got None and None"),
        ((1, 0, 2, "ring"), "layout: expected one of ['zigzag', 'contiguous'], got 'ring'"),
    ],
)
def test_a_split_that_is_none_is_refused(arguments: tuple[Any, ...], problem: str) -> None:
    with pytest.raises(ParallelError) as caught:
        split(packed(8), *arguments)
    assert caught.value.problems == (problem,)


def test_a_part_is_not_split_again() -> None:
    with pytest.raises(ParallelError, match="some arguments can't be used") as caught:
        split(split(packed(8), 1, 0, 2), 1, 0, 2)
    assert caught.value.problems == ("tokens: expected a whole batch, got one that is split",)


def test_a_part_knows_no_depth_that_it_was_not_split_for() -> None:
    with pytest.raises(ParallelError, match="split for depths 1 to 2"):
        split(packed(8), 2, 0, 2).slots(3)


def test_a_part_holds_no_whole_documents() -> None:
    with pytest.raises(ParallelError, match="other ranks hold parts"):
        _ = split(packed(8), 2, 0, 2).segments


def test_tensors_of_other_batches_are_refused() -> None:
    part = split(packed(8), 1, 0, 2)
    with pytest.raises(ParallelError, match=r"expected a whole batch, \[1, 8\]"):
        part.take(torch.zeros(1, 4))
    with pytest.raises(ParallelError, match="expected 2 parts") as caught:
        part.reassemble([torch.zeros(1, 4), torch.zeros(1, 3)])
    assert caught.value.problems == ("part 1: [1, 3]",)


def test_target_states_of_other_ranks_need_a_group() -> None:
    part = split(packed(8), 1, 0, 2)
    with pytest.raises(ParallelError, match="split without a group"):
        part.reached(torch.zeros(1, 4, 2), 1)


def test_a_batch_on_one_rank_finds_its_target_states_itself() -> None:
    tokens, states = packed(8, 4), torch.randn(1, 12, 2)
    part = split(tokens, 2, 0, 1)
    found, rows = part.reached(states, 2), part.places(2)
    for depth in (1, 2):
        gate = tokens.slots(depth).gate
        assert torch.equal(found[rows[depth - 1]][gate], ahead(states, depth, 0.0)[gate])


def test_moving_a_part_moves_all_of_it() -> None:
    part = split(packed(8), 2, 0, 2)
    moved = part.to("meta")
    held = [moved.input_ids, moved.learn_mask, moved.doc_ids, moved.position_ids]
    held += [moved.main, moved.order, moved.order_doc_ids]
    held += [tensor for slots in moved.depths for tensor in (slots.input_ids, slots.labels, slots.gate, slots.enters)]
    assert {tensor.device.type for tensor in held} == {"meta"}
    assert moved.host is part


rows_of_documents = st.lists(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=0, max_size=4), min_size=1, max_size=3
)


@settings(max_examples=60)
@given(rows=rows_of_documents, size=st.sampled_from([1, 2, 4]), layout=st.sampled_from(LAYOUTS))
def test_all_ranks_together_hold_what_a_plain_loop_finds(
    rows: list[list[list[bool]]], size: int, layout: Layout
) -> None:
    unique = iter(range(1, 10_000))
    documents = [[([next(unique) for _ in learn], learn) for learn in row] for row in rows]
    longest = max(sum(map(len, row)) for row in rows)
    tokens = pad_documents(TokenBatch.from_rows(documents, length=longest + 1), 2 * size)
    parts, whole = ranks(tokens, size, layout, depths=4), ranks(tokens, 1, layout, depths=4)
    for depth in range(1, 5):
        assert _open_slots(parts, depth) == _plain_loop(documents, depth, 2 * size)
        assert _everything(parts, depth) == _everything(whole, depth)
    states = torch.arange(tokens.input_ids.numel()).view(*tokens.shape, 1)
    assert torch.equal(parts[0].reassemble([part.take(states) for part in parts]), states)
    assert sum(int(part.main_gate().sum()) for part in parts) == int(tokens.main_gate().sum())


def _everything(parts: list[ShardedBatch], depth: int) -> Counter[tuple[int, ...]]:
    """(row, hidden slot, document, position, input id, label, gate) of every slot of every rank."""
    found: Counter[tuple[int, ...]] = Counter()
    for part in parts:
        slots = part.slots(depth)
        row = torch.arange(part.shape[0])[:, None].expand(part.shape)
        columns: tuple[Tensor, ...] = (row, part.slot_ids, part.doc_ids, part.position_ids)
        columns = (*columns, slots.input_ids, slots.labels, slots.gate)
        found.update(zip(*(column.flatten().tolist() for column in columns), strict=True))
    return found


def _open_slots(parts: list[ShardedBatch], depth: int) -> Counter[tuple[int, int, int, int]]:
    return Counter(
        (row, slot, token, label)
        for row, slot, _doc, _position, token, label, gate in _everything(parts, depth).elements()
        if gate
    )


def _plain_loop(
    rows: list[list[tuple[list[int], list[bool]]]], depth: int, multiple: int
) -> Counter[tuple[int, int, int, int]]:
    """(row, hidden slot, input id, label) of every slot that counts."""
    found: Counter[tuple[int, int, int, int]] = Counter()
    for row, documents in enumerate(rows):
        start = 0
        for ids, learn in documents:
            for t in range(len(ids)):
                if t + depth + 1 < len(ids) and learn[t + depth + 1]:
                    found[row, start + t, ids[t + depth], ids[t + depth + 1]] += 1
            start += len(ids)
            while start % multiple:
                start += 1
    return found


def test_the_order_of_a_gather_is_rank_by_rank() -> None:
    assert gather_order(packed(8), 2, "zigzag").tolist() == [[0, 1, 6, 7, 2, 3, 4, 5]]
