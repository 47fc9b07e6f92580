"""What the tests of joint training share: a tiny checkpoint, the model that it holds, and its head."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtp_zoo as mz
from mtp_zoo.attach_state import HEAD, bindings_of
from mtp_zoo.head import DraftHead
from mtp_zoo.keymap import to_native
from tests.heads import VOCAB
from tests.tiny import tiny_config, tiny_tensors, write_checkpoint

SAME_SUM = 1e-5
"""Relative to the largest entry: one sum in another order, FP32 (9e-7 seen)."""

SAME_LOSS = 1e-6
"""The same FP32 sums, by way of another graph."""

SHIFTED = "labels[..., 1:]"


def make_checkpoint(directory: Path, *, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    """A Qwen3.5-shaped checkpoint with a head, at `directory`."""
    whole = tiny_config(dtype=str(dtype).removeprefix("torch."), **config)
    prefix = "model.language_model." if config.get("nested") else "model."
    tensors = tiny_tensors(whole, prefix=prefix)
    return write_checkpoint(directory, whole, {name: value.to(dtype) for name, value in tensors.items()})


def load_model(root: Path) -> Any:
    """The model of a checkpoint, in the dtype of its files, in training mode."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(root, dtype="auto").train()


def joint(root: Path, **options: Any) -> Any:
    """The model of a checkpoint with its head attached."""
    return mz.attach(load_model(root), **options)


def native_state(model: Any) -> dict[str, Tensor]:
    """The state dict of a joint model, its head under the names that checkpoints use."""
    head: DraftHead = model.mtp_head
    trunk = {name: value for name, value in model.state_dict().items() if not name.startswith(f"{HEAD}.")}
    return {**trunk, **to_native(bindings_of(head), head.state_dict())}


def twin(model: Any) -> tuple[Any, DraftHead]:
    """Model and head of a joint model, apart again and independent of it."""
    root = model.config._name_or_path
    alone = load_model(root)
    head = mz.load_head(root, target=alone)
    return alone, head


def ids(rows: int, length: int, seed: int = 0) -> Tensor:
    """Token ids, none of them padding."""
    return torch.randint(2, VOCAB - 8, (rows, length), generator=torch.Generator().manual_seed(seed))


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Gradients by parameter name, those that are there."""
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], relative: float = SAME_SUM) -> None:
    """Equal up to the order of sums; fails on a tensor that only one side has."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        limit = relative * float(value.abs().max())
        torch.testing.assert_close(found[name], value, atol=limit, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def clone(values: dict[str, Any]) -> dict[str, Any]:
    """The same batch, so that a call can't change it for the next."""
    return copy.deepcopy(values)


def step(model: Any, batch: dict[str, Tensor], run: Any = None) -> tuple[float, float, dict[str, Tensor]]:
    out = (model if run is None else run)(**batch)
    out.loss.backward()
    return out.loss.item(), out.mtp_loss.item(), gradients(model.mtp_head)


def assert_trained_alike(found: Any, expected: Any) -> None:
    assert found[:2] == pytest.approx(expected[:2], rel=SAME_LOSS)
    assert_same(found[2], expected[2])
