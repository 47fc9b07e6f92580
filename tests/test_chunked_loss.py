"""Chunks, shared target rows and the lm_head's gradient change nothing: the same numbers as the plain way."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from mtp_zoo.chunked_loss import DepthRows, chunked_loss
from mtp_zoo.logits import PLAIN, LogitRule
from mtp_zoo.losses import LOSSES, WHOLE, Comparison
from tests.plain_losses import plain_loss

VOCAB, HIDDEN, ROWS = 50, 16, 7

FP32 = 2e-6
"""Relative to the largest entry: sums over 50 tokens and 7 rows in another order (5e-7 seen)."""

BF16 = 2**-8
"""Relative to the largest entry: one rounding of a stored gradient to BF16."""

TARGET_ROWS = ([0, 1, 2, 3, 4, 5], [1, 2, 5, 6], [])
"""Rows of three depths: overlapping, with gaps, and a depth without slots."""

SCALES = (0.5, 0.25, 0.125)


def problem(dtype: torch.dtype = torch.float32, *, requires_grad: bool = True) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(len(rows), HIDDEN, generator=generator).to(dtype) for rows in TARGET_ROWS]
    labels = [torch.randint(0, 40, (len(rows),), generator=generator) for rows in TARGET_ROWS]
    target = torch.randn(ROWS, HIDDEN, generator=generator).to(dtype)
    weight = (torch.randn(VOCAB, HIDDEN, generator=generator) * 0.5).to(dtype)
    for leaf in (*states, target, weight) if requires_grad else ():
        leaf.requires_grad_()
    return {"states": states, "labels": labels, "target": target, "weight": weight}


def depth_rows(given: Mapping[str, Any], mix: Mapping[str, float]) -> list[DepthRows]:
    parts = zip(given["states"], given["labels"], TARGET_ROWS, SCALES, strict=True)
    return [DepthRows(s, y, torch.tensor(rows, dtype=torch.int64), mix, torch.tensor(a)) for s, y, rows, a in parts]


def lean(given: Mapping[str, Any], mix: Mapping[str, float], **options: Any) -> Tensor:
    return chunked_loss(depth_rows(given, mix), given["target"], given["weight"], **options)[0]


def plain(
    given: Mapping[str, Any],
    mix: Mapping[str, float],
    rule: LogitRule = PLAIN,
    comparison: Comparison = WHOLE,
) -> Tensor:
    total = torch.zeros(())
    for states, labels, rows, scale in zip(given["states"], given["labels"], TARGET_ROWS, SCALES, strict=True):
        target = given["target"].detach()[rows]
        values = plain_loss(mix, states, target, labels, given["weight"], rule, comparison)
        total = total + scale * values.sum()
    return total


def results(compute: Any, given: dict[str, Any], *args: Any, **options: Any) -> list[Tensor]:
    loss = compute(given, *args, **options)
    (loss * 0.25).backward()  # an outer factor, as a loss weight and mixed precision are
    grads = [leaf.grad for leaf in (*given["states"], given["weight"])]
    assert all(grad is not None for grad in grads)
    return [loss.detach(), *grads]  # type: ignore[list-item]


def assert_same(found: list[Tensor], expected: list[Tensor], limit: float = FP32) -> None:
    for mine, other in zip(found, expected, strict=True):
        atol = limit * max(1.0, float(other.abs().max())) if other.numel() else 0.0
        torch.testing.assert_close(mine, other, atol=atol, rtol=0)


@pytest.mark.parametrize("mix", [{name: 1.0} for name in LOSSES] + [{"kl": 0.9, "ce": 0.1}], ids=str)
@pytest.mark.parametrize("chunk", [1, 3, 7, 100, None])
def test_chunks_change_neither_loss_nor_gradients(mix: dict[str, float], chunk: int | None) -> None:
    assert_same(results(lean, problem(), mix, chunk_size=chunk), results(plain, problem(), mix))


@pytest.mark.parametrize("comparison", [Comparison(temperature=0.5), Comparison(top_k=4)], ids=str)
def test_comparisons_are_those_of_the_plain_way(comparison: Comparison) -> None:
    mix = {"kl": 1.0, "ce": 0.5}
    found = results(lean, problem(), mix, comparison=comparison, chunk_size=2)
    assert_same(found, results(plain, problem(), mix, comparison=comparison))


RULES = [LogitRule(scale=0.25), LogitRule(softcap=1.5), LogitRule(vocab_size=43), LogitRule(2.0, 3.0, 41)]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("loss", ["ce", "kl", "lk"])
def test_what_a_model_does_behind_its_lm_head_is_done(loss: str, rule: LogitRule) -> None:
    """Softcap and scale of the logits, and entries of a padded lm_head that are no tokens."""
    found = results(lean, problem(), {loss: 1.0}, rule=rule, chunk_size=3)
    assert_same(found, results(plain, problem(), {loss: 1.0}, rule))
    if rule.vocab_size is not None:
        assert (found[-1][rule.vocab_size :] == 0).all()
    else:
        assert float((results(plain, problem(), {loss: 1.0})[0] - found[0]).abs()) > 100 * FP32


def test_in_fp64_everything_is_the_plain_way_to_fp64s_last_digits() -> None:
    given, mix, rule = problem(torch.float64), {"ce": 1.0, "kl": 1.0}, LogitRule(0.8, 4.0, 45)
    leaves = (*given["states"], given["weight"])
    found = torch.autograd.grad(lean(given, mix, rule=rule, chunk_size=2), leaves)
    for mine, other in zip(found, torch.autograd.grad(plain(given, mix, rule), leaves), strict=True):
        torch.testing.assert_close(mine, other)


def test_states_pass_gradcheck_in_fp64() -> None:
    given = problem(torch.float64)
    weight = given["weight"].detach()

    def compute(first: Tensor, second: Tensor) -> Tensor:
        moved = {**given, "states": [first, second, given["states"][2]], "weight": weight}
        return lean(moved, {"kl": 1.0, "tv": 0.5}, rule=LogitRule(0.8, 4.0, 45), chunk_size=2)

    assert torch.autograd.gradcheck(compute, tuple(given["states"][:2]))


def test_bf16_inputs_are_summed_in_fp32() -> None:
    """Not a bit of what the same numbers give as FP32 is lost before the gradients are stored."""
    wide = problem(torch.bfloat16)
    for leaf in (*wide["states"], wide["target"], wide["weight"]):
        leaf.data = leaf.data.float()
    found, expected = (results(lean, given, {"kl": 1.0}) for given in (problem(torch.bfloat16), wide))
    assert_same(found[:1], expected[:1])
    assert {grad.dtype for grad in found[1:]} == {torch.bfloat16}
    assert_same([grad.float() for grad in found[1:]], expected[1:], limit=BF16)
    rounded = plain(problem(torch.bfloat16), {"kl": 1.0})  # logits rounded to BF16, as a plain product gives them
    assert abs(rounded - expected[0] * 1.0) > 100 * FP32


def test_each_depth_may_have_a_mix_of_its_own() -> None:
    given = problem()
    rows = [
        dataclasses.replace(depth, mix={loss: 1.0}) for depth, loss in zip(depth_rows(given, {}), LOSSES, strict=False)
    ]
    total, parts = chunked_loss(rows, given["target"], given["weight"])
    alone = [chunked_loss([row], given["target"], given["weight"]) for row in rows]
    torch.testing.assert_close(total, sum(loss for loss, _ in alone))
    for part, (_, (single,)) in zip(parts, alone, strict=True):
        torch.testing.assert_close(part.values, single.values)


def test_agreement_counts_first_choices_and_shared_probability() -> None:
    weight = torch.eye(3)
    states = torch.tensor([[9.0, 0, 0], [0, 9.0, 0]])
    targets = torch.tensor([[9.0, 0, 0], [9.0, 0, 0]])
    row = DepthRows(states, torch.tensor([0, 1]), torch.tensor([0, 1]), {"ce": 1.0}, torch.tensor(1.0))
    _, (found,) = chunked_loss([row], targets, weight)
    assert found.correct.tolist() == [True, True]
    assert found.matched is not None
    assert found.accepted is not None
    assert found.matched.tolist() == [True, False]
    torch.testing.assert_close(found.accepted, torch.minimum(states.softmax(-1), targets.softmax(-1)).sum(-1))


def test_without_a_target_cross_entropy_is_the_same_and_nothing_is_compared() -> None:
    given = problem()
    rows = [
        dataclasses.replace(row, target_rows=torch.arange(len(row.states))) for row in depth_rows(given, {"ce": 1.0})
    ]
    total, parts = chunked_loss(rows, None, given["weight"], chunk_size=2)
    torch.testing.assert_close(total, lean(given, {"ce": 1.0}))
    assert all(part.matched is None and part.accepted is None for part in parts)


def test_neither_the_target_nor_a_detached_lm_head_gets_a_gradient() -> None:
    """https://github.com/THUDM/slime/pull/709"""
    given = problem()
    weight = given["weight"]
    lean({**given, "weight": weight.detach()}, {"kl": 1.0, "ce": 1.0}).backward()
    assert given["states"][0].grad is not None
    assert given["target"].grad is None
    assert weight.grad is None


def test_no_slot_at_all_is_a_loss_of_zero_with_gradients_of_zero() -> None:
    states, weight = torch.ones(3, HIDDEN, requires_grad=True), torch.ones(VOCAB, HIDDEN, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    total, _ = chunked_loss([DepthRows(states[:0], none, none, {"ce": 1.0}, torch.tensor(1.0))], states[:0], weight)
    total.backward()
    assert total.item() == 0
    for leaf in (states, weight):
        assert leaf.grad is not None
        assert (leaf.grad == 0).all()


def test_without_gradients_only_the_numbers_are_computed() -> None:
    given = problem()
    with torch.no_grad():
        total = lean(given, {"kl": 1.0})
    assert not total.requires_grad
    torch.testing.assert_close(total, plain(given, {"kl": 1.0}).detach(), rtol=1e-5, atol=0)


def test_autocast_decides_the_dtype_of_the_products() -> None:
    """As it does for the model's own lm_head; sums stay FP32."""
    given = problem()
    halved = problem()
    for leaf in (*halved["states"], halved["target"], halved["weight"]):
        leaf.data = leaf.data.bfloat16().float()
    with torch.autocast("cpu", torch.bfloat16):
        found = lean(given, {"kl": 1.0})
    torch.testing.assert_close(found, lean(halved, {"kl": 1.0}))
