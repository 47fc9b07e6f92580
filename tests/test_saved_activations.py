"""What a joint step saves for its backward pass may be recomputed or kept elsewhere: each tensor is asked for once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mtp_zoo as mz
from tests.attaching import assert_trained_alike, ids, load_model, make_checkpoint, step

Saving = Callable[[Any, dict[str, Tensor]], Any]
"""Runs a joint step in a way of keeping activations; gives loss, MTP loss and the head's gradients."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kinds = ["full_attention", "full_attention"]
    return make_checkpoint(tmp_path_factory.mktemp("saved") / "base", layer_types=kinds)


@pytest.fixture(scope="module")
def batch() -> dict[str, Tensor]:
    return {"input_ids": ids(2, 12), "labels": ids(2, 12)}


def recomputed(model: Any, batch: dict[str, Tensor]) -> Any:
    """Non-reentrant checkpointing of the whole model, which hands a tensor back a single time."""
    return step(model, batch, lambda **call: checkpoint(model, use_reentrant=False, **call))


def kept_elsewhere(model: Any, batch: dict[str, Tensor]) -> Any:
    """As offloading of activations does: a tensor comes back from its place when it is asked for, then is dropped there."""
    kept: dict[int, Tensor] = {}
    asked: Counter[int] = Counter()

    def pack(tensor: Tensor) -> int:
        kept[len(kept)] = tensor
        return len(kept) - 1

    def unpack(place: int) -> Tensor:
        asked[place] += 1
        return kept[place]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        result = step(model, batch)
    assert set(asked.values()) == {1}
    return result


@pytest.mark.parametrize("saving", [recomputed, kept_elsewhere])
@pytest.mark.parametrize(
    "options",
    [{}, {"depths": 3}, {"depths": 2, "loss": "kl", "detach": ()}],
    ids=["one depth", "three depths", "kl, nothing cut"],
)
def test_a_joint_step_asks_once_for_what_it_saved(
    saving: Saving, options: dict[str, Any], root: Path, batch: dict[str, Tensor]
) -> None:
    expected = step(mz.attach(load_model(root), **options), batch)
    assert_trained_alike(saving(mz.attach(load_model(root), **options), batch), expected)
