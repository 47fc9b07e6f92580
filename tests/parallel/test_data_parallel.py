"""DDP and FSDP2 on two real ranks: gradients and an optimiser step are those of one process."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import mtp_zoo as mz
from mtp_zoo.batch import TokenBatch
from mtp_zoo.errors import ParallelError
from mtp_zoo.head import DraftHead
from mtp_zoo.objective import MTPObjective, step_counts
from mtp_zoo.parallel import gather_head, shard_head
from tests.exporting import make_base, snapshot, train
from tests.families.test_overfit import new_head
from tests.heads import tiny_head
from tests.parallel.batches import batch, distance, largest, row
from tests.parallel.ranks import on_ranks

DEPTHS = 3
EQUAL = 1e-6
"""Difference of two FP32 sums in another order, as a share of the largest entry; 2.5e-7 was measured."""

FEW, MANY = row(7), row(502, seed=1)  # 5 and 500 slots at depth 1
SHORT = row(2)  # too short for any depth
SILENT = row(30, seed=2, learnt=False)


@dataclass(frozen=True)
class Case:
    """What is trained on what.

    Attributes:
        ranks: for every rank its micro-batches, each a list of rows.
        family: of the head; None is the tiny one.
        depths: blocks of the head; 1 is recycled.
    """

    ranks: list[list[Any]]
    family: str | None = None
    depths: int = 1
    checkpointing: bool = False
    loss: Any = "kl"
    train_only: tuple[str, ...] = field(default=())
    spec: dict[str, Any] = field(default_factory=dict[str, Any])

    def head(self) -> DraftHead:
        torch.manual_seed(3)
        head = tiny_head(depths=self.depths, spec=self.spec) if self.family is None else new_head(self.family)
        if self.train_only:
            head.train_only(self.train_only)
        if self.checkpointing:
            head.gradient_checkpointing_enable()
        return head

    def batches(self, ranks: list[int], hidden: int) -> list[tuple[TokenBatch, Tensor]]:
        return [batch(rows, hidden=hidden) for rank in ranks for rows in self.ranks[rank]]


UNEVEN = [[[FEW]], [[MANY]]]
CASES = {
    "uneven": Case(UNEVEN),
    "uneven, distinct depths": Case(UNEVEN, depths=3),
    "uneven, checkpointing": Case(UNEVEN, checkpointing=True),
    "uneven, distinct depths, checkpointing": Case(UNEVEN, depths=3, checkpointing=True),
    "uneven, text only": Case(UNEVEN, loss="ce"),
    "a rank too short for any depth": Case([[[SHORT]], [[MANY]]]),
    "a rank that learns nothing, distinct depths": Case([[[SILENT]], [[MANY]]], depths=3),
    "no rank learns anything": Case([[[SILENT]], [[SHORT]]]),
    "accumulated": Case([[[FEW], [SHORT]], [[row(40, 12, seed=3)], [MANY]]]),
    "accumulated, distinct depths": Case([[[FEW], [SHORT]], [[row(40, 12, seed=3)], [MANY]]], depths=3),
    "attention only": Case(UNEVEN, train_only=("attention", "norms")),
    "own lm_heads": Case(UNEVEN, depths=2, spec={"private_head": "kept"}),
    "experts": Case([[[row(24)]], [[row(9, 30, seed=1)]]], family="qwen3_5_moe"),
    "latent attention and experts": Case([[[row(24)]], [[row(9, 30, seed=1)]]], family="deepseek_v3"),
}


@dataclass(frozen=True)
class Result:
    """What a run left: sums of the objective, gradients, weights behind one step, and names that train."""

    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    trained: list[str]


def optimiser_step(case: Case, wrap: str | None, ranks: list[int]) -> Result:
    head = case.head()
    if wrap == "fsdp":
        shard_head(head)
    objective = MTPObjective(head, depths=DEPTHS, loss=case.loss)
    run = DistributedDataParallel(objective) if wrap == "ddp" else objective
    optimizer = torch.optim.AdamW(head.trainable_parameters(), lr=1e-3)
    batches = case.batches(ranks, head.hidden_size)
    counts = step_counts([tokens for tokens, _ in batches], DEPTHS)
    factor = torch.distributed.get_world_size() if wrap == "ddp" else 1
    stats: list[Any] = []
    for number, (tokens, hidden) in enumerate(batches, start=1):
        last = number == len(batches)
        if wrap == "fsdp":
            head.set_requires_gradient_sync(last)
        with run.no_sync() if wrap == "ddp" and not last else contextlib.nullcontext():
            out = run(tokens, hidden, step_counts=counts)
            (out.loss * factor).backward()
        stats.append(out.stats)
    gradients = {name: whole(p.grad) for name, p in head.named_parameters() if p.grad is not None}
    optimizer.step()
    return Result(
        sum(stats[1:], stats[0]).all_reduce().metrics(),
        gradients,
        {name: whole(value).clone() for name, value in head.weights().items()},
        [name for name, p in head.named_parameters() if p.requires_grad],
    )


def whole(value: Any) -> Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()


def _steps(_rank: int) -> dict[tuple[str, str], Result]:
    rank = [torch.distributed.get_rank()]
    return {(wrap, name): optimiser_step(case, wrap, rank) for wrap in ("ddp", "fsdp") for name, case in CASES.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], Result]]:
    return on_ranks(_steps, tmp_path_factory.mktemp("steps"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_a_step_on_two_ranks_is_that_of_one_process(
    ranks: list[dict[tuple[str, str], Result]], wrap: str, name: str
) -> None:
    """https://github.com/huggingface/transformers/pull/34373"""
    one = optimiser_step(CASES[name], None, [0, 1])
    for rank in ranks:
        found = rank[wrap, name]
        assert found.trained == one.trained
        assert found.metrics == pytest.approx(one.metrics, rel=1e-4)
        if largest(one.gradients) == 0.0:
            assert largest(found.gradients) == 0.0
            assert found.gradients.keys() == one.gradients.keys()
        else:
            assert distance(found.gradients, one.gradients) < EQUAL
        assert distance(found.weights, one.weights) < EQUAL


@pytest.mark.slow
def test_a_rank_without_slots_still_gives_every_gradient(ranks: list[dict[tuple[str, str], Result]]) -> None:
    """https://github.com/modelscope/mcore-bridge/pull/104"""
    for wrap in ("ddp", "fsdp"):
        found = ranks[0][wrap, "no rank learns anything"]
        assert found.gradients.keys() == set(found.trained)
        assert all(bool((gradient == 0).all()) for gradient in found.gradients.values())


def _exports(rank: int, base: str, out: str) -> None:
    """Rank 0 exports a head under DDP, all ranks one that is sharded, and rank 0 the same once it is gathered."""
    head = train(mz.load_head(base))
    wrapped = DistributedDataParallel(MTPObjective(head))
    if rank == 0:
        mz.export(wrapped.module.head, base, f"{out}/ddp")
    head = shard_head(train(mz.load_head(base)))
    mz.export(head, base, f"{out}/sharded")
    plain = gather_head(head)
    assert (plain is None) == (rank != 0)
    if plain is not None:
        mz.export(plain, base, f"{out}/gathered")


@pytest.mark.slow
def test_one_process_ddp_and_fsdp_export_the_same_bytes(tmp_path: Path) -> None:
    """https://github.com/verl-project/verl/pull/925"""
    base = make_base(tmp_path / "base")
    mz.export(train(mz.load_head(base)), base, tmp_path / "one")
    on_ranks(_exports, tmp_path / "ranks", str(base), str(tmp_path))
    expected = {name: content for name, (_, content) in snapshot(tmp_path / "one").items()}
    for wrap in ("ddp", "sharded", "gathered"):
        assert {name: content for name, (_, content) in snapshot(tmp_path / wrap).items()} == expected


def test_a_gathered_plain_head_is_a_copy(tmp_path: Path) -> None:
    head = mz.load_head(make_base(tmp_path / "base"), trainable=("attention",))
    plain = gather_head(head)
    assert plain is not None
    assert plain.origin == head.origin
    assert {n for n, p in plain.named_parameters() if p.requires_grad} == {
        n for n, p in head.named_parameters() if p.requires_grad
    }
    before = {name: value.clone() for name, value in head.state_dict().items()}
    train(plain)
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())
    assert not torch.equal(plain.state_dict()["depths.0.enorm.weight"], before["depths.0.enorm.weight"])


def test_a_head_is_not_sharded_without_ranks_or_with_floats_of_several_dtypes() -> None:
    head = tiny_head()
    head.depths[0].norm.bfloat16()
    with pytest.raises(ParallelError, match="Sharding the qwen3_5 head") as caught:
        shard_head(head)
    assert caught.value.problems == (
        "torch.distributed: expected a process group, found none",
        "parameters: expected one dtype, found torch.bfloat16, torch.float32",
    )


BF16 = 2e-2
"""Share of the largest gradient by which compute in BF16 moves it; 7e-3 was measured."""


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_sharded_head_computes_in_bf16_on_fp32_weights(checkpointing: bool) -> None:
    tokens, hidden = batch([row(20, 9)])
    plain, head = tiny_head(), tiny_head()
    shard_head(head, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    if checkpointing:
        head.gradient_checkpointing_enable()
    for each in (plain, head):
        MTPObjective(each, depths=DEPTHS)(tokens, hidden).loss.backward()
    found = {name: whole(p.grad) for name, p in head.named_parameters()}
    assert all(gradient.dtype == torch.float32 for gradient in found.values())
    assert 1e-4 < distance(found, {name: whole(p.grad) for name, p in plain.named_parameters()}) < BF16


@pytest.mark.usefixtures("world_of_one")
def test_a_head_is_sharded_once() -> None:
    with pytest.raises(ParallelError, match="it can't be done") as caught:
        shard_head(shard_head(tiny_head()))
    assert caught.value.problems == ("parameters: expected plain tensors, found sharded ones",)
