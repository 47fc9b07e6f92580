from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtp_zoo.errors import ResumeError
from mtp_zoo.head import DraftHead
from mtp_zoo.loader import load_head
from mtp_zoo.training import checkpoints
from mtp_zoo.training.checkpoints import (
    clear_partial,
    complete_checkpoints,
    restore_checkpoint,
    rng_state,
    save_checkpoint,
)
from mtp_zoo.training.config import OptimizerConfig
from mtp_zoo.training.optimizer import make_optimizer

Pair = tuple[DraftHead, torch.optim.Optimizer]


def trained(base: Path, steps: int = 2) -> Pair:
    """A head whose optimiser has made some steps on made-up gradients."""
    head = load_head(base, dtype=torch.float32)
    optimizer = make_optimizer(head, OptimizerConfig())
    for _ in range(steps):
        for parameter in head.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return head, optimizer


def save(folder: Path, pair: Pair, step: int = 2, keep: int = 2) -> Path:
    return save_checkpoint(folder, step, *pair, rng=[rng_state()], run="this", keep=keep, base="a-model")


def moments(pair: Pair) -> dict[str, torch.Tensor]:
    head, optimizer = pair
    return {f"{n}.{key}": value for n, p in head.named_parameters() for key, value in optimizer.state[p].items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_restored_run_has_the_same_weights_moments_and_random_numbers(base: Path, tmp_path: Path) -> None:
    pair = trained(base)
    path = save(tmp_path, pair, step=7)
    drawn = torch.rand(3)
    fresh = trained(base, steps=0)
    assert restore_checkpoint(path, *fresh, rank=0, run="this") == 7
    assert torch.equal(torch.rand(3), drawn)
    assert same(fresh[0].weights(), pair[0].weights())
    assert same(moments(fresh), moments(pair))


def test_a_checkpoint_that_lacks_tensors_is_refused_and_names_them(base: Path, tmp_path: Path) -> None:
    """Weights absent from a partial load kept their initial values: https://github.com/NVIDIA/Megatron-LM/pull/6271"""
    path = save(tmp_path, trained(base))
    edit(path / "head.safetensors", drop="depths.0.norm.weight")
    edit(path / "optimizer.safetensors", drop="depths.0.eh_proj.weight.exp_avg", add="stray")
    fresh = trained(base, steps=0)
    before = {name: value.clone() for name, value in fresh[0].weights().items()}
    random = torch.get_rng_state()
    with pytest.raises(ResumeError) as caught:
        restore_checkpoint(path, *fresh, rank=0, run="this")
    assert sorted(map(str, caught.value.problems)) == [
        "head: missing depths.0.norm.weight",
        "optimizer: missing depths.0.eh_proj.weight.exp_avg",
        "optimizer: unexpected stray",
    ]
    assert same(fresh[0].weights(), before)
    assert not fresh[1].state
    assert torch.equal(torch.get_rng_state(), random)


def edit(file: Path, *, drop: str, add: str | None = None) -> None:
    tensors = load_file(file)
    del tensors[drop]
    if add:
        tensors[add] = torch.zeros(1)
    save_file(tensors, file)


def test_a_tensor_of_another_shape_or_dtype_is_refused(base: Path, tmp_path: Path) -> None:
    path = save(tmp_path, trained(base))
    tensors = load_file(path / "head.safetensors")
    tensors["depths.0.norm.weight"] = torch.zeros(3)
    tensors["depths.0.enorm.weight"] = tensors["depths.0.enorm.weight"].bfloat16()
    save_file(tensors, path / "head.safetensors")
    with pytest.raises(ResumeError) as caught:
        restore_checkpoint(path, *trained(base, steps=0), rank=0, run="this")
    assert sorted(map(str, caught.value.problems)) == [
        "head: depths.0.enorm.weight: expected torch.float32 [64], got torch.bfloat16 [64]",
        "head: depths.0.norm.weight: expected torch.float32 [64], got torch.float32 [3]",
    ]


def test_a_checkpoint_of_another_run_is_refused(base: Path, tmp_path: Path) -> None:
    path = save(tmp_path, trained(base))
    with pytest.raises(ResumeError, match="belongs to another run"):
        restore_checkpoint(path, *trained(base, steps=0), rank=0, run="that")


@pytest.mark.parametrize("file", ["head.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"])
def test_an_unreadable_file_is_refused_by_name(base: Path, tmp_path: Path, file: str) -> None:
    path = save(tmp_path, trained(base))
    (path / file).write_bytes(b"half of")
    with pytest.raises(ResumeError, match=file):
        restore_checkpoint(path, *trained(base, steps=0), rank=0, run="this")
    (path / file).unlink()
    with pytest.raises(ResumeError, match=file):
        restore_checkpoint(path, *trained(base, steps=0), rank=0, run="this")


def test_only_the_newest_checkpoints_are_kept(base: Path, tmp_path: Path) -> None:
    pair = trained(base)
    for step in (1, 999_999, 1_000_000):
        save(tmp_path, pair, step=step)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-999999", "step-1000000"]


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_save_that_dies_leaves_the_old_checkpoints_and_nothing_that_looks_complete(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    pair = trained(base)
    save(tmp_path, pair, step=1)
    calls = 0

    def dying(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise KeyboardInterrupt
        save_file(*args, **kwargs)

    monkeypatch.setattr(checkpoints, "save_file", dying)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, pair, step=2, keep=1)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-000001"]
    assert restore_checkpoint(tmp_path / "step-000001", *trained(base, steps=0), rank=0, run="this") == 2 - 1


def test_what_a_killed_save_left_is_no_checkpoint_and_is_cleared(base: Path, tmp_path: Path) -> None:
    path = save(tmp_path, trained(base), step=1)
    partial = tmp_path / ".step-000002.mtp-zoo-partial"
    partial.mkdir()
    (partial / "head.safetensors").write_bytes((path / "head.safetensors").read_bytes())
    assert complete_checkpoints(tmp_path) == [path]
    clear_partial(tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def test_the_state_file_says_step_and_run(base: Path, tmp_path: Path) -> None:
    path = save(tmp_path, trained(base), step=12)
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    assert (path.name, state["step"], state["run"]) == ("step-000012", 12, "this")
