"""A rank whose batch has no rows takes part in every collective of the others, and adds nothing."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from mtp_zoo.batch import TokenBatch
from mtp_zoo.objective import MTPObjective, step_counts
from mtp_zoo.parallel import shard_head, unsharded
from tests.heads import HIDDEN, VOCAB, tiny_head
from tests.parallel.ranks import on_ranks

SAME_SUM = 1e-6
"""Relative to the largest entry: the same sums, of which one is zero."""


def rows(count: int) -> TokenBatch:
    return TokenBatch.all_tokens(torch.randint(0, VOCAB, (count, 8), generator=torch.Generator().manual_seed(3)))


def gradients(tokens: TokenBatch, *, sharded: bool) -> dict[str, Tensor]:
    head = tiny_head()
    if sharded:
        shard_head(head)
    states = torch.randn(*tokens.shape, HIDDEN, generator=torch.Generator().manual_seed(4))
    objective = MTPObjective(head, depths=2)
    objective(tokens, states, step_counts=step_counts([tokens], 2)).loss.backward()
    return {name: unsharded(p.grad) for name, p in head.named_parameters() if p.grad is not None}


def _step(rank: int) -> dict[str, Tensor]:
    return gradients(rows(2 if rank == 0 else 0), sharded=True)


def test_a_sharded_head_steps_where_one_rank_has_no_rows(tmp_path: Path) -> None:
    expected = gradients(rows(2), sharded=False)
    for found in on_ranks(_step, tmp_path / "ranks"):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=SAME_SUM * float(value.abs().max()), rtol=0)
