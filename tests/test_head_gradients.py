"""The first step of an optimiser says which tensors of the head would not train."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtp_zoo.attach_gradients import HeadGradientWarning
from tests.attaching import ids, joint, make_checkpoint

FIRST = "depths.0.eh_proj.weight"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gradients") / "base")


@pytest.fixture
def model(root: Path) -> Any:
    return joint(root)


@pytest.fixture
def batch() -> dict[str, Tensor]:
    return {"input_ids": ids(2, 8), "labels": ids(2, 8)}


@pytest.fixture(autouse=True)
def _nothing_else_warns() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def test_a_step_with_all_gradients_says_nothing(model: Any, batch: dict[str, Tensor]) -> None:
    optimiser = sgd(model)
    for _ in range(3):
        model(**batch).loss.backward()
        model(**batch).loss.backward()
        optimiser.step()
        optimiser.zero_grad()


def test_an_mtp_loss_that_was_left_out_is_named_once(model: Any, batch: dict[str, Tensor]) -> None:
    optimiser = sgd(model)
    out = model(**batch)
    (out.loss - model.mtp.mtp_lambda * out.mtp_loss).backward()
    for parameter in model.mtp_head.parameters():
        parameter.grad = None
    with pytest.warns(HeadGradientWarning, match=f"{FIRST}: no gradient") as caught:
        optimiser.step()
    assert str(caught[0].message).count("no gradient") == len(list(model.mtp_head.parameters()))
    optimiser.step()


def test_a_gradient_that_is_not_finite_is_named_alone(model: Any, batch: dict[str, Tensor]) -> None:
    optimiser = sgd(model)
    model(**batch).loss.backward()
    model.mtp_head.depths[0].eh_proj.weight.grad[0, 0] = float("nan")
    with pytest.warns(HeadGradientWarning) as caught:
        optimiser.step()
    assert str(caught[0].message).count(";") == 0
    assert f"{FIRST}: a gradient that is not finite" in str(caught[0].message)


def test_an_optimiser_from_before_the_head_is_named_at_its_second_step(root: Path, batch: dict[str, Tensor]) -> None:
    model = joint(root)
    old = torch.optim.SGD([p for name, p in model.named_parameters() if not name.startswith("mtp_head.")], lr=0.01)
    model(**batch).loss.backward()
    old.step()
    with pytest.warns(HeadGradientWarning, match=f"{FIRST}: in no optimiser that steps"):
        old.step()


def test_a_head_may_be_spread_over_optimisers(model: Any, batch: dict[str, Tensor]) -> None:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    for parameters in (matrices, rest) * 2:
        model(**batch).loss.backward()
        torch.optim.SGD(parameters, lr=0.01).step()


def test_a_step_that_a_scaler_leaves_out_is_no_first_step(model: Any, batch: dict[str, Tensor]) -> None:
    optimiser, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0**127)
    scaler.scale(model(**batch).loss).backward()
    scaler.step(optimiser)
    scaler.update()
    optimiser.zero_grad()
    model(**batch).loss.backward()
    model.mtp_head.depths[0].eh_proj.weight.grad = None
    with pytest.warns(HeadGradientWarning, match=f"{FIRST}: no gradient"):
        optimiser.step()
