"""A jointly trained model under DDP and FSDP2 on two real ranks: gradients are those of one process."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mtp_zoo as mz
from mtp_zoo.attach_gradients import HeadGradientWarning
from mtp_zoo.errors import AttachError, ParallelError
from mtp_zoo.objective import DETACH
from tests.parallel.batches import distance
from tests.parallel.ranks import on_ranks

CHECKPOINT = Path(__file__).parents[2] / "mtp_zoo/demo/assets/tiny-qwen3_5"
EQUAL = 1e-6
"""Difference of two FP32 sums in another order, as a share of the largest entry; 8e-8 was measured."""

CUTS = {"isolated": DETACH, "lm_head cut": frozenset({"lm_head"}), "nothing cut": frozenset()}
APART = "fsdp, lm_head in a group of its own"
REFUSED = (APART, "nothing cut")
STEPS = [each for each in itertools.product(("ddp", "fsdp", APART), CUTS) if each != REFUSED]


def joint_model(detach: frozenset[str], *, untied: bool) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).train()
    if untied:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    return mz.attach(model, mz.load_head(CHECKPOINT, dtype=torch.float32), detach=detach)


def shard(model: Any, *, apart: bool) -> Any:
    """FSDP2 as torch does it, over trunk and head alike: the mean over ranks."""
    groups = [*model.model.layers, *(depth.block for depth in model.mtp_head.depths), model.mtp_head]
    for module in (*groups, *((model.lm_head,) if apart else ()), model):
        fully_shard(module)
    return model


def gradients(wrap: str, cut: str, rows: slice, *, sharded: bool) -> dict[str, Tensor]:
    model = joint_model(CUTS[cut], untied=wrap == APART)
    ids = torch.randint(2, 1000, (4, 24), generator=torch.Generator().manual_seed(0))[rows]
    run = model
    if wrap == "ddp" and sharded:
        run = DistributedDataParallel(model)
    elif sharded:
        shard(model, apart=wrap == APART)
    run(input_ids=ids, labels=ids).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {n: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for n, grad in found.items()}


def _every_wrap(rank: int) -> dict[tuple[str, str], Any]:
    rows = slice(2 * rank, 2 * rank + 2)
    found: dict[tuple[str, str], Any] = {each: gradients(*each, rows, sharded=True) for each in STEPS}
    try:
        gradients(*REFUSED, rows, sharded=True)
    except ParallelError as error:
        found[REFUSED] = str(error)
    return found


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    return on_ranks(_every_wrap, tmp_path_factory.mktemp("joint"))[0]


@pytest.mark.slow
@pytest.mark.parametrize(("wrap", "cut"), STEPS)
def test_a_joint_step_on_two_ranks_is_that_of_one_process(
    rank: dict[tuple[str, str], Any], wrap: str, cut: str
) -> None:
    assert distance(rank[wrap, cut], gradients(wrap, cut, slice(0, 4), sharded=False)) < EQUAL


@pytest.mark.slow
def test_an_lm_head_that_is_sharded_by_itself_is_not_lent_with_its_gradient(rank: dict[tuple[str, str], Any]) -> None:
    """The gathered weight's gradient would stay this rank's own, and nothing would say so."""
    assert "FSDP2 would not reduce the gradient" in rank[REFUSED]


def _first_steps(rank: int) -> dict[str, list[list[str]]]:
    """What the first step warns of under each wrapper: as it is, and where a gradient of the head was taken away."""
    ids = torch.randint(2, 1000, (2, 24), generator=torch.Generator().manual_seed(rank))
    found: dict[str, list[list[str]]] = {}
    for wrap, cleared in itertools.product(("ddp", "fsdp"), (False, True)):
        model = joint_model(DETACH, untied=False)
        run = DistributedDataParallel(model) if wrap == "ddp" else shard(model, apart=False)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        run(input_ids=ids, labels=ids).loss.backward()
        if cleared:
            model.mtp_head.depths[0].eh_proj.weight.grad = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", HeadGradientWarning)
            optimiser.step()
        found.setdefault(wrap, []).append([str(w.message) for w in caught if w.category is HeadGradientWarning])
    return found


@pytest.mark.slow
def test_the_first_step_on_ranks_names_missing_gradients_and_no_others(tmp_path: Path) -> None:
    for found in on_ranks(_first_steps, tmp_path):
        for plain, cleared in found.values():
            assert plain == []
            assert [text.partition(", ")[2] for text in cleared] == ["depths.0.eh_proj.weight: no gradient"]


def switched(rank: int, *, wrap_again: bool) -> float:
    """How far a rank's trunk gradient in `joint` is from the mean, under a wrapper that was made in `mtp_only`."""
    model = joint_model(DETACH, untied=False)
    model.mtp.mode = "mtp_only"
    ids = torch.randint(2, 1000, (2, 24), generator=torch.Generator().manual_seed(rank))
    run = DistributedDataParallel(model)
    run(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()
    model.mtp.mode = "joint"
    run = DistributedDataParallel(model) if wrap_again else run
    run(input_ids=ids, labels=ids).loss.backward()
    own = model.model.layers[0].mlp.up_proj.weight.grad
    mean = own.clone()
    torch.distributed.all_reduce(mean)
    return float((mean / 2 - own).norm() / own.norm())


def _switches(rank: int) -> tuple[str, float]:
    try:
        return str(switched(rank, wrap_again=False)), switched(rank, wrap_again=True)
    except AttachError as error:
        return str(error), switched(rank, wrap_again=True)


@pytest.fixture(scope="module")
def switches(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, float]]:
    return on_ranks(_switches, tmp_path_factory.mktemp("switch"))


@pytest.mark.slow
def test_a_mode_that_is_switched_under_ddp_is_refused(switches: list[tuple[str, float]]) -> None:
    assert all("gradients of the others would not be reduced" in refusal for refusal, _ in switches)


@pytest.mark.slow
def test_a_model_that_is_wrapped_again_trains_equally_on_all_ranks(switches: list[tuple[str, float]]) -> None:
    assert max(apart for _, apart in switches) < EQUAL
