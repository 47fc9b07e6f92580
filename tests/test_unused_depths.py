"""An objective of fewer depths than its head has: every parameter takes part, those that are not run with exact zeros."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mtp_zoo.objective import MTPObjective
from mtp_zoo.unused_parameters import freeze_unused, unused_parameters
from tests.heads import tiny_head
from tests.parallel.batches import batch, row
from tests.parallel.ranks import on_ranks

STEPS = 3


def steps_under_ddp(rank: int) -> dict[str, Tensor]:
    """Weights after some steps of a two-depth head whose objective runs one."""
    head = tiny_head(depths=2)
    module = DistributedDataParallel(MTPObjective(head, depths=1))
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    for step in range(STEPS):
        tokens, hidden = batch([row(8, seed=2 * step + rank)])
        module(tokens, hidden).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in head.named_parameters()}


def test_depths_that_are_not_run_do_not_stop_data_parallelism(tmp_path: Path) -> None:
    first, second = on_ranks(steps_under_ddp, tmp_path)
    before = dict(tiny_head(depths=2).named_parameters())
    for name, value in first.items():
        assert torch.equal(value, second[name])
        moved = not torch.equal(value, before[name])
        assert moved == name.startswith("depths.0."), name


@pytest.mark.parametrize("shared", ["not run", "frozen"])
def test_depths_that_are_not_run_get_zeros_unless_they_are_frozen(shared: str) -> None:
    head = tiny_head(depths=3)
    if shared == "frozen":
        freeze_unused(head, 1)
    tokens, hidden = batch([row(8)])
    MTPObjective(head, depths=1)(tokens, hidden).loss.backward()
    others = [parameter for name, parameter in head.named_parameters() if not name.startswith("depths.0.")]
    assert {id(each) for each in unused_parameters(head, 1)} == {id(each) for each in others}
    for parameter in others:
        assert (parameter.grad is None) if shared == "frozen" else not (parameter.grad is None or parameter.grad.any())


def test_an_evaluation_without_gradients_is_not_changed() -> None:
    tokens, hidden = batch([row(8)])
    with torch.no_grad():
        assert not MTPObjective(tiny_head(depths=2), depths=1)(tokens, hidden).loss.requires_grad
