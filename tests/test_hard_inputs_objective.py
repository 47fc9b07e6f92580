"""Batches that broke the objective of other trainers; each names the public report.

What hangs on one module alone is tested there, under the same links: rolls that wrap around, document masks and detaches at
every depth in tests/test_batch.py, tests/test_rollout.py and tests/test_gradient_map.py, shards in tests/parallel.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mtp_zoo.batch import IGNORED, TokenBatch
from mtp_zoo.errors import BatchError
from mtp_zoo.head import DepthState, DraftHead
from mtp_zoo.objective import MTPObjective, step_counts
from mtp_zoo.shared import SharedTensors
from tests.heads import HIDDEN, VOCAB, tiny_head

_ = IGNORED

FP32 = 1e-5
"""Relative: the same FP32 sums in another order."""


def states_of(tokens: TokenBatch) -> Tensor:
    """A state that depends on its token only, so that it is the same wherever the token lies."""
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9))[tokens.input_ids]


def step(*batches: TokenBatch, **options: Any) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one optimiser step over these micro-batches."""
    head = tiny_head()
    objective = MTPObjective(head, **options)
    counts = step_counts(batches, objective.depths, reduction=objective.reduction)
    total = 0.0
    for tokens in batches:
        loss = objective(tokens, states_of(tokens), step_counts=counts).loss
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in head.named_parameters() if p.grad is not None}


def assert_same(found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=FP32)
    assert found[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        torch.testing.assert_close(found[1][name], grad, atol=FP32 * float(grad.abs().max()), rtol=0)


# Documents padded in place: lengths 3, 5, 1 in rooms of 4, 8, 4 slots.

LENGTHS, ROOM = torch.tensor([0, 3, 8, 9]), torch.tensor([0, 4, 12, 16])


def padded_in_place() -> TokenBatch:
    ids = torch.arange(20, 36)[None]
    return TokenBatch.from_labels(ids, ids, cu_seqlens=LENGTHS, cu_seqlens_padded=ROOM)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_padded_segments_predict_what_a_plain_loop_says_and_nothing_on_padding(depth: int) -> None:
    """https://github.com/NVIDIA/Megatron-LM/pull/4495 and https://github.com/NVIDIA/Megatron-LM/pull/6205"""
    expected = [_] * 16
    for start, length in ((0, 3), (4, 5), (12, 1)):
        for t in range(start, start + length):
            if t + depth + 1 < start + length:
                expected[t] = 20 + t + depth + 1
    assert padded_in_place().slots(depth).labels[0].tolist() == expected


def test_padded_segments_train_as_their_documents_alone() -> None:
    """https://github.com/NVIDIA/Megatron-LM/pull/6205"""
    spans = ((20, 23), (24, 29), (32, 33))
    alone = [TokenBatch.all_tokens(torch.arange(first, last)[None]) for first, last in spans]
    assert_same(step(padded_in_place()), step(*alone))


def test_lengths_read_as_the_physical_layout_are_refused() -> None:
    """https://github.com/NVIDIA/Megatron-LM/pull/6205"""
    ids = torch.arange(16)[None]
    with pytest.raises(BatchError, match="end at slot 9 of 16: what is behind may be padding, or a document"):
        TokenBatch.from_labels(ids, ids, cu_seqlens=LENGTHS)


# A prompt of 70 %.


def prompted() -> TokenBatch:
    ids = torch.arange(40, 60)[None]
    return TokenBatch.from_labels(ids, torch.where(torch.arange(20) < 14, IGNORED, ids))


def test_ignored_labels_are_neither_in_the_mean_nor_in_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/modelscope/ms-swift/pull/8192 and https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/6103"""
    head, tokens = tiny_head(), prompted()
    seen: list[DepthState] = []
    run = head.run_depth

    def spy(*args: Any, **kwargs: Any) -> DepthState:
        seen.append(run(*args, **kwargs))
        seen[-1].normed.retain_grad()
        return seen[-1]

    monkeypatch.setattr(head, "run_depth", spy)
    loss = MTPObjective(head, depths=1, loss="ce")(tokens, states_of(tokens)).loss
    loss.backward()
    # Tokens 54 to 59 are to be learnt: depth 1 predicts them from slots 12 to 17.
    logits = head.shared.logits(seen[0].normed.detach()[0, 12:18])
    assert loss.item() == pytest.approx(functional.cross_entropy(logits, torch.arange(54, 60)).item(), rel=FP32)
    grad = seen[0].normed.grad
    assert grad is not None
    reached = (grad[0] != 0).any(-1).tolist()
    assert reached == [False] * 12 + [True] * 6 + [False] * 2


def test_no_mask_and_no_labels_never_mean_all_of_them() -> None:
    """https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/6103"""
    with pytest.raises(BatchError, match="nothing says which tokens are to be learnt"):
        TokenBatch.from_collated({"input_ids": torch.arange(5)[None], "attention_mask": torch.ones(1, 5)})


# Documents told apart by their positions only.


def test_a_shift_stops_where_positions_restart() -> None:
    """https://github.com/pytorch/torchtitan/pull/3392"""
    ids = torch.arange(50, 57)[None]
    by_position = TokenBatch.from_labels(ids, ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]]))
    by_length = TokenBatch.from_labels(ids, ids, cu_seqlens=torch.tensor([0, 3, 7]))
    for depth in (1, 2, 3):
        one, other = by_position.slots(depth), by_length.slots(depth)
        assert torch.equal(one.gate, other.gate)
        assert torch.equal(one.labels, other.labels)
    assert by_position.slots(1).labels[0].tolist() == [52, _, _, 55, 56, _, _]
    assert_same(step(by_position), step(by_length))


def test_a_chunk_that_starts_at_a_later_position_is_refused_until_its_document_is_named() -> None:
    """https://github.com/pytorch/torchtitan/pull/3392"""
    ids, positions = torch.arange(50, 57)[None], torch.tensor([[0, 1, 2, 64, 65, 66, 67]])
    with pytest.raises(BatchError, match="a later chunk of another document begins there, or one document has a gap"):
        TokenBatch.from_labels(ids, ids, position_ids=positions)
    numbers = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    tokens = TokenBatch.from_labels(ids, ids, position_ids=positions, seq_idx=numbers)
    assert tokens.slots(1).labels[0].tolist() == [52, _, _, 55, 56, _, _]
    assert torch.equal(tokens.position_ids, positions)


# Micro-batches of 3, 50 and no slots.


def uneven() -> list[TokenBatch]:
    generator = torch.Generator().manual_seed(1)
    lengths = (5, 52, 9)
    ids = [torch.randint(0, VOCAB, (1, n), generator=generator) for n in lengths]
    batches = [TokenBatch.from_labels(each, each) for each in ids[:2]]
    return [*batches, TokenBatch.from_labels(ids[2], torch.full_like(ids[2], IGNORED))]


def test_accumulated_micro_batches_are_one_batch_and_their_means_are_not() -> None:
    """https://github.com/huggingface/transformers/pull/34191 and https://github.com/ml-explore/mlx-lm/pull/1544"""
    parts = uneven()
    assert [int(tokens.slots(1).gate.sum()) for tokens in parts] == [3, 50, 0]
    rows = [[(tokens.input_ids[0].tolist(), tokens.learn_mask[0].tolist())] for tokens in parts]
    whole = TokenBatch.from_rows(rows)
    assert_same(step(*parts, loss="ce"), step(whole, loss="ce"))
    means, _grads = step(*parts, loss="ce", reduction="micro_batch")
    assert means / len(parts) != pytest.approx(step(whole, loss="ce")[0], rel=1e-2)


def test_sums_and_counts_of_micro_batches_add_up_to_those_of_one_batch() -> None:
    """https://github.com/ml-explore/mlx-lm/pull/1544"""
    parts, objective = uneven(), MTPObjective(tiny_head(), loss="ce")
    assert step_counts(parts, 3).tolist() == [53, 51, 49]
    with torch.no_grad():
        first, second, none = (objective(tokens, states_of(tokens)).stats for tokens in parts)
    together = first + second + none
    assert together.slots.tolist() == [53, 51, 49]
    assert together.metrics()["mtp/loss_1"] == pytest.approx(float(first.loss[0] + second.loss[0]) / 53)


def test_a_batch_without_a_slot_gives_zeros_and_leaves_the_step_finite() -> None:
    """https://github.com/modelscope/mcore-bridge/pull/104"""
    nothing = uneven()[2]
    for loss in ("ce", "kl", "reverse_kl", "tv", "lk"):
        value, grads = step(nothing, loss=loss)
        assert value == 0.0
        assert len(grads) == len(list(tiny_head().parameters()))
        assert all(bool((grad == 0).all()) for grad in grads.values())
    out = MTPObjective(tiny_head())(nothing, states_of(nothing))
    assert all(math.isfinite(value) for value in out.metrics.values())


# Isolation from the target


class FunctionalProjection(torch.nn.Module):
    """An lm_head that is no nn.Linear: a weight that the model's code projects with by hand."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)


@pytest.mark.parametrize("projection", ["nn.Linear", "functional"])
def test_the_isolated_loss_moves_neither_lm_head_nor_embedding(projection: str) -> None:
    """https://github.com/THUDM/slime/pull/709"""
    head: DraftHead = tiny_head()
    if projection == "functional":
        weight = head.shared.lm_head.weight.detach().clone()
        head.attach(SharedTensors(head.shared.embedding, FunctionalProjection(weight)))
    weights = [head.shared.embedding.weight, head.shared.lm_head.weight]
    tokens = prompted()
    hidden = states_of(tokens).requires_grad_()
    # The model's own loss is there as well, and its gradient is all that the shared weights get.
    own = functional.cross_entropy(functional.linear(hidden[0], weights[1]), tokens.input_ids[0])
    alone = torch.autograd.grad(own, [weights[1], hidden], retain_graph=True)
    (own + MTPObjective(head)(tokens, hidden).loss).backward()
    assert torch.equal(weights[1].grad, alone[0])
    assert torch.equal(hidden.grad, alone[1])  # type: ignore[arg-type]
    assert weights[0].grad is None


# Columns that a collator adds for the tokens ahead


@pytest.mark.parametrize("shape", [(1, 9), (1, 9, 9), (1, 1, 9, 9), (1, 1, 6, 9)])
@pytest.mark.parametrize("name", ["attention_mask", "labels", "position_ids"])
def test_look_ahead_columns_are_refused_by_name(name: str, shape: tuple[int, ...]) -> None:
    """https://github.com/PaddlePaddle/PaddleFleet/pull/1646"""
    ids = torch.arange(6)[None]
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids, name: torch.ones(shape, dtype=torch.int64)}
    with pytest.raises(BatchError, match=rf"expected {name} \[batch, seq\] = \[1, 6\], got"):
        TokenBatch.from_collated(inputs)
