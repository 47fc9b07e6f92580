"""mz.trainer_class: what transformers' Trainer does with the head of a joint model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

import mtp_zoo as mz
from tests.attaching import joint, load_model, make_checkpoint, weights
from tests.test_attach_trainers import collate, rows, trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and accelerate warn of names that will change

CLIP = 0.01
"""A gradient norm that both parts exceed."""

AVERAGE = 1e-6
"""Relative: one sum of FP32 losses, in FP64, in another order."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("integration") / "base")


def run(model: Any, place: Path, **options: Any) -> Any:
    kind = mz.trainer_class(Trainer) if hasattr(model, "mtp") else Trainer
    made = trainer(model, place, kind=kind, **options)
    made.train()
    return made


def test_no_norm_of_the_head_is_decayed(root: Path, tmp_path: Path) -> None:
    model = joint(root)
    made = trainer(model, tmp_path, kind=mz.trainer_class(Trainer), weight_decay=0.1, optim="adamw_torch")
    decayed, kept = made.create_optimizer().param_groups
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    head = [parameter for parameter in decayed["params"] if named[id(parameter)].startswith("mtp_head.")]
    assert head
    assert all(parameter.ndim > 1 for parameter in head)
    assert kept["weight_decay"] == 0.0
    assert {"mtp_head.depths.0.enorm.weight", "mtp_head.depths.0.hnorm.weight"} <= {
        named[id(p)] for p in kept["params"]
    }


@pytest.mark.parametrize("optimizer", ["sgd", "adamw_torch"])
def test_a_clipped_step_moves_the_trunk_as_it_would_alone(optimizer: str, root: Path, tmp_path: Path) -> None:
    options = {"optim": optimizer, "max_grad_norm": CLIP, "max_steps": 2, "gradient_accumulation_steps": 2}
    together, alone = joint(root), load_model(root)
    run(together, tmp_path / "joint", **options)
    run(alone, tmp_path / "alone", **options)
    found, before = weights(together), weights(load_model(root))
    for name, value in weights(alone).items():
        assert torch.equal(found[name], value), name
    assert any(not torch.equal(found[name], value) for name, value in before.items())


def test_the_head_is_clipped_too(root: Path, tmp_path: Path) -> None:
    model = joint(root)
    before = weights(model.mtp_head)
    run(model, tmp_path, max_grad_norm=CLIP)
    step = torch.stack([(value - before[name]).norm() for name, value in weights(model.mtp_head).items()]).norm()
    assert float(step) == pytest.approx(
        0.1 * CLIP, rel=1e-3
    )  # the learning rate times the norm, rounded in FP32 weights


@pytest.mark.parametrize(
    "between", [{}, {"eval_strategy": "steps", "eval_steps": 1}], ids=["alone", "evaluated between"]
)
def test_logs_of_training_hold_sums_over_counts(between: dict[str, Any], root: Path, tmp_path: Path) -> None:
    """Rows of 3, 12, 7 and 18 learnt tokens: a mean of the micro-batches' means is another number."""
    model = joint(root)
    made = run(
        model, tmp_path, gradient_accumulation_steps=2, max_steps=2, logging_steps=2, learning_rate=0.0, **between
    )
    expected = joint(root)(**collate(rows())).metrics
    logged = next(entry for entry in made.state.log_history if "loss" in entry)
    for name in ("mtp/loss_1", "mtp/acc_1", "mtp/slots_1"):
        assert logged[name] == pytest.approx(float(expected[name]), rel=AVERAGE), name


def test_evaluation_reports_the_own_loss_and_the_heads_metrics(root: Path, tmp_path: Path) -> None:
    model, alone = joint(root), load_model(root)
    options = {"per_device_eval_batch_size": 1}
    found = trainer(model, tmp_path / "joint", kind=mz.trainer_class(Trainer), **options).evaluate()
    expected = trainer(alone, tmp_path / "alone", **options).evaluate()
    assert found["eval_loss"] == expected["eval_loss"]
    metrics = joint(root).eval()(**collate(rows())).metrics
    assert found["eval_mtp/loss_1"] == pytest.approx(float(metrics["mtp/loss_1"]), rel=AVERAGE)
    assert found["eval_mtp/slots_1"] == float(metrics["mtp/slots_1"])


def test_what_is_no_trainer_is_refused() -> None:
    with pytest.raises(mz.MTPZooError, match="Trainer"):
        mz.trainer_class(dict)
