"""Losses on literal distributions, and their gradients against numerical ones."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from mtp_zoo.errors import ObjectiveError
from mtp_zoo.losses import DIVERGENCES, LOSSES, Comparison, Side, ce, mixed, parse_losses, parse_mix

FP32 = 1e-6
"""Sums over a few entries in another order."""

HALVES = ((0.5, 0.25, 0.25), (0.25, 0.25, 0.5))
"""A head's distribution and a target's, over three tokens; min of both sums to 0.75."""

NEAR, FAR = (0.9, 0.1), (0.5, 0.5)


def side(*values: float) -> Side:
    return Side(torch.tensor([values], dtype=torch.float64).log())


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("kl", 0.25 * math.log(0.25 / 0.5) + 0.5 * math.log(0.5 / 0.25)),
        ("reverse_kl", 0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.5)),
        ("tv", 0.25),
        ("lk", -math.log(0.75)),
    ],
)
def test_divergences_on_a_literal_pair_of_distributions(loss: str, expected: float) -> None:
    q, p = (side(*values) for values in HALVES)
    assert DIVERGENCES[loss](q, p)[0].item() == pytest.approx(expected)
    assert DIVERGENCES[loss](p, p)[0].item() == pytest.approx(0, abs=1e-12)


def test_cross_entropy_is_of_the_label() -> None:
    assert ce(side(*HALVES[0]), torch.tensor([2]))[0].item() == pytest.approx(math.log(4))


@pytest.mark.parametrize(("loss", "other"), [("kl", "reverse_kl"), ("reverse_kl", "kl")])
def test_each_kl_is_the_other_with_the_sides_exchanged(loss: str, other: str) -> None:
    q, p = side(*NEAR), side(*FAR)
    value = DIVERGENCES[loss](q, p)[0].item()
    assert value == pytest.approx(DIVERGENCES[other](p, q)[0].item())
    assert value != pytest.approx(DIVERGENCES[loss](p, q)[0].item())


def problem() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    head, target = 2 * torch.randn(2, 6, 9, generator=generator, dtype=torch.float64)
    return head, target, torch.tensor([0, 3, 8, 1, 1, 5])


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, logits: Tensor, target: Tensor, labels: Tensor, mix: Mapping[str, float], how: Comparison
    ) -> Tensor:  # type: ignore[override]
        head, other = Side(logits.detach()), Side(target)
        value, grad = mixed(mix, head, (head.at(how.temperature), other.at(how.temperature)), labels, how)
        ctx.save_for_backward(grad)
        return value.sum()

    @staticmethod
    def backward(ctx, outer: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.saved_tensors[0] * outer, None, None, None, None


MIXES = [{name: 1.0} for name in LOSSES] + [{"kl": 0.9, "ce": 0.1}, {"tv": 0.5, "reverse_kl": 0.2, "lk": 2.0}]
COMPARISONS = [Comparison(), Comparison(temperature=0.7), Comparison(top_k=3), Comparison(temperature=1.6, top_k=1)]


@pytest.mark.parametrize("how", COMPARISONS, ids=str)
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_gradients_are_those_of_finite_differences(mix: dict[str, float], how: Comparison) -> None:
    head, target, labels = problem()
    assert torch.autograd.gradcheck(lambda z: _Mixed.apply(z, target, labels, mix, how), head.requires_grad_())


def test_a_wrong_gradient_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same check fails where a gradient is that of another loss."""
    head, target, labels = problem()
    monkeypatch.setitem(DIVERGENCES, "tv", lambda q, p: (DIVERGENCES["kl"](q, p)[0], q.probs - 0.9 * p.probs))
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(
            lambda z: _Mixed.apply(z, target, labels, {"tv": 1.0}, Comparison()), head.requires_grad_()
        )


@pytest.mark.parametrize("name", sorted(DIVERGENCES))
def test_temperature_divides_both_sides_and_not_cross_entropy(name: str) -> None:
    head, target, labels = problem()
    sides, how = (Side(head / 2), Side(target / 2)), Comparison(temperature=2.0)
    value, grad = mixed({name: 1.0}, Side(head), sides, labels, how)
    plain_value, plain_grad = DIVERGENCES[name](*sides)
    torch.testing.assert_close(value, plain_value)
    torch.testing.assert_close(grad, plain_grad / 2)
    assert torch.equal(mixed({"ce": 1.0}, Side(head), sides, labels, how)[0], ce(Side(head), labels)[0])


@pytest.mark.parametrize("name", sorted(DIVERGENCES))
def test_top_k_compares_the_targets_best_tokens_and_the_rest_as_one(name: str) -> None:
    q, p = (0.1, 0.2, 0.3, 0.4), (0.4, 0.3, 0.2, 0.1)
    found, _ = mixed({name: 1.0}, side(*q), (side(*q), side(*p)), torch.tensor([0]), Comparison(top_k=2))
    expected, _ = DIVERGENCES[name](side(0.1, 0.2, 0.7), side(0.4, 0.3, 0.3))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", sorted(DIVERGENCES))
def test_top_k_of_the_whole_vocabulary_is_the_whole_comparison(name: str) -> None:
    head, target, labels = problem()
    for k in (9, 50):
        found = mixed({name: 1.0}, Side(head), (Side(head), Side(target)), labels, Comparison(top_k=k))
        for mine, plain in zip(found, DIVERGENCES[name](Side(head), Side(target)), strict=True):
            torch.testing.assert_close(mine, plain)


@pytest.mark.parametrize("name", sorted(DIVERGENCES))
@pytest.mark.parametrize("k", [1, 8])
def test_a_remainder_of_nothing_is_no_number_of_its_own(name: str, k: int) -> None:
    """A target that leaves nothing for the tail, and a head that leaves nothing either."""
    sure = Side(torch.tensor([[300.0, *[0.0] * 8]]))
    for head in (sure, Side(torch.zeros(1, 9))):
        value, grad = mixed({name: 1.0}, head, (head, sure), torch.tensor([0]), Comparison(top_k=k))
        assert torch.isfinite(value).all()
        assert torch.isfinite(grad).all()


@pytest.mark.parametrize("name", sorted(DIVERGENCES))
def test_distributions_without_a_common_token_give_finite_numbers(name: str) -> None:
    head, target = Side(torch.tensor([[200.0, 0.0]])), Side(torch.tensor([[0.0, 200.0]]))
    value, grad = DIVERGENCES[name](head, target)
    assert torch.isfinite(value).all()
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize(
    ("loss", "piece"),
    [("klx", "'klx': no such loss"), ({}, "no mix"), ({"ce": 0.0}, "'ce': expected a finite weight > 0")],
)
def test_a_loss_that_is_none_is_refused(loss: str | dict[str, float], piece: str) -> None:
    with pytest.raises(ObjectiveError, match=piece):
        parse_mix(loss)


def test_losses_are_one_for_all_depths_or_one_a_depth() -> None:
    assert parse_losses("kl", 2) == ({"kl": 1.0}, {"kl": 1.0})
    assert parse_losses({"kl": 0.9, "ce": 0.1}, 1) == ({"kl": 0.9, "ce": 0.1},)
    assert parse_losses(["ce", {"lk": 2.0}], 2) == ({"ce": 1.0}, {"lk": 2.0})
    with pytest.raises(ObjectiveError, match="one for each of 3 depths, got 2"):
        parse_losses(["ce", "kl"], 3)


INF = float("inf")


@pytest.mark.parametrize("name", sorted(DIVERGENCES))
def test_a_token_that_both_sides_exclude_changes_no_loss(name: str) -> None:
    q, p = [0.1, 0.2, 0.7], [0.5, 0.3, 0.2]
    value, grad = DIVERGENCES[name](side(*q), side(*p))
    longer = [Side(torch.cat([each.logits, torch.full((1, 1), -INF)], dim=1)) for each in (side(*q), side(*p))]
    more, wide = DIVERGENCES[name](*longer)
    torch.testing.assert_close(more, value)
    torch.testing.assert_close(wide, torch.cat([grad, grad.new_zeros(1, 1)], dim=1))
