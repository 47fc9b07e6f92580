"""A joint model under torch's distributed checkpoint: saved to a folder and loaded again, alone and on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard

import mtp_zoo as mz
from tests.parallel.ranks import on_ranks

CHECKPOINT = Path(__file__).parents[2] / "mtp_zoo/demo/assets/tiny-qwen3_5"


def trained(steps: int, *, sharded: bool) -> tuple[Any, torch.optim.Optimizer]:
    """A joint model and its AdamW after some steps on one batch."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model = mz.attach(AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).train())
    for module in (*model.model.layers, model.mtp_head, model) if sharded else ():
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        move(model, optimizer)
    return model, optimizer


def move(model: Any, optimizer: torch.optim.Optimizer) -> None:
    ids = torch.randint(2, 1000, (2, 24), generator=torch.Generator().manual_seed(0))
    optimizer.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def whole(model: Any) -> dict[str, Tensor]:
    """Every parameter, gathered."""
    values = {name: value.detach() for name, value in model.named_parameters()}
    return {name: v.full_tensor() if hasattr(v, "full_tensor") else v.clone() for name, v in values.items()}


def round_trip(folder: Path, *, sharded: bool) -> list[str]:
    """Names whose value one step after a load is not that of the run that went on; a load is into a fresh model."""
    model, optimizer = trained(2, sharded=sharded)
    weights, moments = get_state_dict(model, optimizer)
    assert set(dict(model.named_parameters())) <= weights.keys()
    save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    move(model, optimizer)

    again, other = trained(0, sharded=sharded)
    weights, moments = get_state_dict(again, other)
    load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(again, other, model_state_dict=weights, optim_state_dict=moments)
    move(again, other)
    expected, found = whole(model), whole(again)
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


def _sharded(_rank: int, folder: Path) -> list[str]:
    return round_trip(folder / "checkpoint", sharded=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_joint_run_goes_on_from_a_distributed_checkpoint(tmp_path: Path) -> None:
    assert round_trip(tmp_path / "checkpoint", sharded=False) == []


@pytest.mark.slow
def test_a_sharded_joint_run_goes_on_from_a_distributed_checkpoint(tmp_path: Path) -> None:
    assert on_ranks(_sharded, tmp_path, tmp_path) == [[], []]
