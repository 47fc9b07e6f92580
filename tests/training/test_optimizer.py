from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mtp_zoo.loader import load_head
from mtp_zoo.training.config import OptimizerConfig
from mtp_zoo.training.optimizer import learning_rate, make_optimizer


def test_the_rate_rises_linearly_and_falls_along_a_cosine() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=4, min_lr_ratio=0.0)
    rates = [round(learning_rate(step, 8, config), 3) for step in range(1, 9)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 0.854, 0.5, 0.146, 0.0]


def test_the_rate_ends_at_its_floor_and_needs_no_warm_up() -> None:
    config = OptimizerConfig(lr=2.0, warmup_steps=0, min_lr_ratio=0.1)
    rates = [learning_rate(step, 10, config) for step in range(1, 11)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(0.2)
    assert learning_rate(1, 1, config) == pytest.approx(0.2)
    assert learning_rate(3, 3, OptimizerConfig(lr=1.0, warmup_steps=10)) == 0.3


def test_matrices_decay_and_vectors_do_not(base: Path) -> None:
    head = load_head(base, dtype=torch.float32)
    optimizer = make_optimizer(head, OptimizerConfig(weight_decay=0.5))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decay[id(p)] for name, p in head.named_parameters()} == {
        name: 0.0 if name.endswith("norm.weight") else 0.5 for name, _ in head.named_parameters()
    }
