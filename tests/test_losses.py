"""Losses on literal distributions, and chunks that change nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mtp_zoo.errors import ObjectiveError
from mtp_zoo.losses import LOSSES, chunked_loss, parse_mix

FP32 = 1e-6
"""Relative; sums over 50 entries in another order."""

BF16_RATIO = 1.1
"""Chunked and plain losses in BF16 do the same arithmetic on each row; their errors against FP32 are alike."""


def log(*values: float) -> Tensor:
    return torch.tensor([values]).log()


def test_losses_on_a_literal_pair_of_distributions() -> None:
    q, p, label = log(0.5, 0.25, 0.25), log(0.25, 0.25, 0.5), torch.tensor([2])
    assert LOSSES["ce"](q, p, label).item() == pytest.approx(math.log(4))
    assert LOSSES["kl"](q, p, label).item() == pytest.approx(0.25 * math.log(0.5) + 0.5 * math.log(2))
    assert LOSSES["kl"](p, p, label).item() == pytest.approx(0, abs=FP32)


def test_forward_kl_is_not_the_reverse() -> None:
    q, p, label = log(0.9, 0.1), log(0.5, 0.5), torch.tensor([0])
    assert LOSSES["kl"](q, p, label).item() == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1))
    assert LOSSES["kl"](q, p, label).item() != pytest.approx(LOSSES["kl"](p, q, label).item())


@pytest.mark.parametrize(
    ("loss", "piece"), [("klx", "'klx': no such loss"), ({}, "no mix"), ({"ce": 0.0}, "'ce': expected a weight > 0")]
)
def test_a_loss_that_is_none_is_refused(loss: str | dict[str, float], piece: str) -> None:
    with pytest.raises(ObjectiveError, match=piece):
        parse_mix(loss)


def problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    states, targets = torch.randn(2, 7, 16, generator=generator)
    weight = torch.randn(50, 16, generator=generator) * 0.5
    return states.to(dtype), targets.to(dtype), torch.arange(7) * 3, weight.to(dtype)


def plain(states: Tensor, targets: Tensor, labels: Tensor, weight: Tensor, mix: dict[str, float]) -> Tensor:
    log_q = (states @ weight.T).float().log_softmax(-1)
    log_p = (targets @ weight.T).float().log_softmax(-1)
    return sum((w * LOSSES[name](log_q, log_p, labels).sum() for name, w in mix.items()), torch.zeros(()))


@pytest.mark.parametrize("mix", [{"ce": 1.0}, {"kl": 1.0}, {"kl": 0.9, "ce": 0.1}])
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunks_change_neither_loss_nor_gradient(mix: dict[str, float], chunk: int) -> None:
    states, targets, labels, weight = problem()
    results = []
    for compute in (
        lambda s: chunked_loss(s, targets, labels, weight, mix, chunk_size=chunk).total,
        lambda s: plain(s, targets, labels, weight, mix),
    ):
        leaf = states.clone().requires_grad_()
        loss = compute(leaf)
        (loss * 0.25).backward()  # an outer factor, as depth weights and step counts are
        results.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=FP32, atol=0)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=FP32 * 10, atol=FP32)


def test_bf16_chunks_are_as_near_to_fp32_as_plain_bf16() -> None:
    exact = plain(*problem(), {"kl": 1.0})
    rough = problem(torch.bfloat16)
    chunked_error = abs(chunked_loss(*rough, {"kl": 1.0}, chunk_size=2).total - exact)
    assert chunked_error <= BF16_RATIO * abs(plain(*rough, {"kl": 1.0}) - exact) + FP32


def test_agreement_counts_first_choices_and_shared_probability() -> None:
    weight = torch.eye(3)
    states = torch.tensor([[9.0, 0, 0], [0, 9.0, 0]])
    targets = torch.tensor([[9.0, 0, 0], [9.0, 0, 0]])
    found = chunked_loss(states, targets, torch.tensor([0, 1]), weight, {"ce": 1.0})
    assert found.correct.tolist() == [True, True]
    assert found.matched.tolist() == [True, False]
    overlap = torch.minimum(states.softmax(-1), targets.softmax(-1)).sum(-1)
    torch.testing.assert_close(found.accepted, overlap)


def test_neither_the_target_nor_the_lm_head_gets_a_gradient() -> None:
    """https://github.com/THUDM/slime/pull/709"""
    states, targets, labels, weight = problem()
    leaves = [tensor.clone().requires_grad_() for tensor in (states, targets, weight)]
    chunked_loss(leaves[0], leaves[1], labels, leaves[2], {"kl": 1.0, "ce": 1.0}).total.backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is None
    assert leaves[2].grad is None


def test_without_gradients_only_the_numbers_are_computed() -> None:
    states, targets, labels, weight = problem()
    with torch.no_grad():
        total = chunked_loss(states, targets, labels, weight, {"kl": 1.0}).total
    assert not total.requires_grad
    torch.testing.assert_close(total, plain(states, targets, labels, weight, {"kl": 1.0}), rtol=FP32 * 10, atol=0)
