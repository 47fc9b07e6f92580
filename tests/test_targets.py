"""Target states: each document as if it were alone, whatever row it lies in."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mtp_zoo.batch import PADDING, TokenBatch
from mtp_zoo.context_parallel import split
from mtp_zoo.errors import FamilyDefinitionError, ObjectiveError
from mtp_zoo.objective import MTPObjective
from mtp_zoo.targets import tap_of, target_states
from tests.heads import VOCAB, tiny_head, tiny_target

FP32 = 2e-5
"""The same sums over another padded length (6e-6 seen on states of size 3)."""


def ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def document(length: int, seed: int = 0) -> tuple[list[int], list[bool]]:
    return ids(length, seed), [True] * length


def test_states_are_the_last_hidden_state_behind_the_final_norm() -> None:
    target = tiny_target()
    tokens = TokenBatch.all_tokens(torch.tensor([ids(9)]))
    states = target_states(target, tokens, tiny_head().spec)
    logits = target(input_ids=tokens.input_ids).logits
    torch.testing.assert_close(target.lm_head(states), logits, atol=FP32, rtol=0)


def test_packed_and_padded_documents_equal_documents_alone() -> None:
    target, spec = tiny_target(), tiny_head().spec
    docs = [document(70, 1), document(5, 2), document(23, 3)]
    alone = [target_states(target, TokenBatch.from_rows([[doc]]), spec)[0] for doc in docs]
    packed = TokenBatch.from_rows([docs, [docs[2]]], length=110)
    states = target_states(target, packed, spec)
    for start, length, expected in ((0, 70, alone[0]), (70, 5, alone[1]), (75, 23, alone[2])):
        torch.testing.assert_close(states[0, start : start + length], expected, atol=FP32, rtol=0)
    torch.testing.assert_close(states[1, :23], alone[2], atol=FP32, rtol=0)
    assert bool((states[packed.doc_ids == PADDING] == 0).all())


def test_running_the_packed_row_as_it_is_would_leak() -> None:
    """The same row, taken for one document, gives the second document other states."""
    target, spec = tiny_target(), tiny_head().spec
    docs = [document(20, 1), document(20, 2)]
    apart = target_states(target, TokenBatch.from_rows([docs]), spec)
    as_one = TokenBatch.from_rows([[(docs[0][0] + docs[1][0], [True] * 40)]])
    assert (target_states(target, as_one, spec) - apart)[0, 20:].abs().max() > 100 * FP32


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing(side: str) -> None:
    target, spec = tiny_target(), tiny_head().spec
    text = ids(11)
    row, mask = ([0] * 5 + text, [0] * 5 + [1] * 11) if side == "left" else (text + [0] * 5, [1] * 11 + [0] * 5)
    padded = TokenBatch.all_tokens(torch.tensor([row]), torch.tensor([mask]))
    alone = target_states(target, TokenBatch.all_tokens(torch.tensor([text])), spec)[0]
    found = target_states(target, padded, spec)[0]
    torch.testing.assert_close(found[5:] if side == "left" else found[:11], alone, atol=FP32, rtol=0)


def test_a_batch_of_padding_only_has_zero_states() -> None:
    tokens = TokenBatch.all_tokens(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4))
    assert target_states(tiny_target(), tokens, tiny_head().spec).abs().sum() == 0


def test_no_graph_is_kept() -> None:
    target = tiny_target().requires_grad_(True)
    assert not target_states(target, TokenBatch.all_tokens(torch.tensor([ids(4)])), tiny_head().spec).requires_grad


def test_a_tap_before_the_final_norm_gives_the_state_that_the_norm_reads() -> None:
    target, head = tiny_target(), tiny_head()
    with torch.no_grad():
        target.model.norm.weight.normal_()
    tokens = TokenBatch.all_tokens(torch.tensor([ids(9)]))
    post = target_states(target, tokens, head.spec)
    pre = target_states(target, tokens, dataclasses.replace(head.spec, hidden_tap="pre_norm"))
    assert (pre - post).abs().max() > 0.1
    torch.testing.assert_close(target.model.norm(pre), post, atol=0, rtol=0)
    assert torch.equal(target_states(target, tokens, head.spec), post), "the norm must be back in place"


def test_several_residual_streams_are_refused() -> None:
    spec = dataclasses.replace(tiny_head().spec, hidden_tap="streams")
    with pytest.raises(FamilyDefinitionError, match="residual streams"):
        target_states(tiny_target(), TokenBatch.all_tokens(torch.tensor([[1, 2]])), spec)


def test_states_of_another_tap_are_refused_by_the_objective() -> None:
    target, head = tiny_target(), tiny_head()
    tokens = TokenBatch.all_tokens(torch.tensor([ids(9)]))
    objective = MTPObjective(head, depths=2)
    other = target_states(target, tokens, dataclasses.replace(head.spec, hidden_tap="pre_norm"))
    with pytest.raises(ObjectiveError, match="at the head's tap 'post_norm', got states at 'pre_norm'"):
        objective(tokens, other)
    objective(tokens, target_states(target, tokens, head.spec))
    objective(tokens, other.clone())  # nothing says where a plain tensor comes from


def test_a_part_of_a_split_batch_remembers_the_tap() -> None:
    tokens = TokenBatch.all_tokens(torch.tensor([ids(8)]))
    states = target_states(tiny_target(), tokens, dataclasses.replace(tiny_head().spec, hidden_tap="pre_norm"))
    assert tap_of(split(tokens, 1, 0, 2).take(states)) == "pre_norm"
