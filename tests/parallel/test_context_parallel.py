"""Context parallel on two real ranks: the sum over ranks is what one process computes on the whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from mtp_zoo import context_attention
from mtp_zoo.batch import TokenBatch
from mtp_zoo.context_layout import Layout, pad_documents
from mtp_zoo.context_parallel import split
from mtp_zoo.errors import MTPZooError, ParallelError
from mtp_zoo.head import DraftHead
from mtp_zoo.objective import MTPObjective, step_counts
from mtp_zoo.parallel import shard_head
from mtp_zoo.stats import MTPStats
from tests.families.test_overfit import new_head
from tests.heads import tiny_head
from tests.parallel.batches import batch, distance, largest, row
from tests.parallel.ranks import on_ranks

EQUAL = 1e-6
"""Difference of two FP32 sums in another order, as a share of the largest entry; 3e-7 was measured."""

SINGLE = [row(32)]
PACKED = [row(7, 18, 1), row(16, 9, seed=1)]
LATE = [[(list(range(8)), [False] * 5 + [True, True, False])]]  # slots 3 and 4 count: zigzag puts them on rank 1
SILENT = [row(16, learnt=False)]


@dataclass(frozen=True)
class Case:
    """What runs on two ranks; `family` None is the tiny head."""

    rows: Any
    layout: Layout = "zigzag"
    depths: int = 1
    loss: Any = "kl"
    agreement: bool = True
    blocks: int = 1
    rollout: Any = None
    checkpointing: bool = False
    family: str | None = None
    sharded: bool = False

    def head(self) -> DraftHead:
        torch.manual_seed(3)
        head = tiny_head(depths=self.blocks) if self.family is None else new_head(self.family)
        if self.checkpointing:
            head.gradient_checkpointing_enable()
        return head

    def batch(self, hidden: int) -> tuple[TokenBatch, Tensor]:
        tokens, _ = batch(self.rows, hidden=hidden)
        tokens = pad_documents(tokens, 4)
        states = torch.randn(*tokens.shape, hidden, generator=torch.Generator().manual_seed(4))
        return tokens, states


CASES = {
    "one document": Case(SINGLE),
    "one document, contiguous": Case(SINGLE, "contiguous"),
    "packed": Case(PACKED),
    "packed, contiguous": Case(PACKED, "contiguous"),
    "text only": Case(PACKED, loss="ce", agreement=False),
    "mixed losses": Case(PACKED, loss={"kl": 0.5, "tv": 0.25, "ce": 0.25}),
    "chain": Case(PACKED, depths=3),
    "chain, contiguous": Case(PACKED, "contiguous", depths=3),
    "chain, checkpointing": Case(PACKED, depths=3, checkpointing=True),
    "distinct depths": Case(PACKED, depths=3, blocks=3),
    "one block in sequence": Case(PACKED, depths=3, rollout="sequence"),
    "only rank 1 has slots": Case(LATE),
    "no rank has slots": Case(SILENT, depths=2),
    "experts": Case(PACKED, depths=2, family="qwen3_5_moe"),
    "experts, partial rotation": Case(PACKED, depths=2, family="glm4_moe"),
    "latent attention": Case(PACKED, depths=2, family="deepseek_v3"),
    "with FSDP2 over the same ranks": Case(PACKED, depths=3, sharded=True),
}
INDEXERS = ("deepseek_v32", "glm_moe_dsa")


@dataclass(frozen=True)
class Result:
    """Loss, sums and gradients of one rank, or of one process."""

    loss: float
    stats: MTPStats
    gradients: dict[str, Tensor]


def run(case: Case, group: Any) -> Result:
    head = case.head()
    if case.sharded and group is not None:
        shard_head(head)
    objective = MTPObjective(head, depths=case.depths, loss=case.loss, agreement=case.agreement, rollout=case.rollout)
    tokens, hidden = case.batch(head.hidden_size)
    if group is not None:
        part = split(tokens, case.depths, layout=case.layout, group=group)
        tokens, hidden = part, part.take(hidden)
    out = objective(tokens, hidden, step_counts=step_counts([tokens], case.depths))
    out.loss.backward()
    gradients = {name: p.grad for name, p in head.named_parameters() if p.grad is not None}
    if case.sharded and group is not None:  # FSDP2 summed them: each rank counts half
        gradients = {name: grad.full_tensor() / 2 for name, grad in gradients.items()}
    return Result(out.loss.item(), out.stats, gradients)


def refused(case: Case, group: Any) -> str:
    try:
        run(case, group)
    except MTPZooError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def target_states(group: Any) -> tuple[Tensor, list[Tensor]]:
    """What `reached` and `places` find for the gated slots of this rank, at three depths of packed rows."""
    tokens, hidden = Case(PACKED).batch(8)
    part = split(tokens, 3, group=group)
    states, rows = part.reached(part.take(hidden), 3), part.places(3)
    return part.slot_ids, [torch.where(part.slots(k + 1).gate[..., None], states[rows[k]], 0.0) for k in range(3)]


def _everything(_rank: int) -> dict[str, Any]:
    group = torch.distributed.group.WORLD
    found: dict[str, Any] = {name: run(case, group) for name, case in CASES.items()}
    found |= {family: refused(Case(PACKED, family=family), group) for family in INDEXERS}
    return {**found, "target states": target_states(group)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(_everything, tmp_path_factory.mktemp("context"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_sum_to_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    one, (first, second) = run(CASES[name], None), [rank[name] for rank in ranks]
    assert first.loss + second.loss == pytest.approx(one.loss, rel=1e-5)
    assert (first.stats + second.stats).metrics() == pytest.approx(one.stats.metrics(), rel=1e-4)
    assert first.gradients.keys() == second.gradients.keys() == one.gradients.keys()
    both = {key: first.gradients[key] + second.gradients[key] for key in one.gradients}
    if largest(one.gradients) > 0:
        assert distance(both, one.gradients) < EQUAL
    else:
        assert largest(both) == 0.0


@pytest.mark.slow
def test_a_rank_without_slots_has_finite_gradients(ranks: list[dict[str, Any]]) -> None:
    """https://github.com/modelscope/mcore-bridge/pull/104"""
    first, second = (rank["only rank 1 has slots"] for rank in ranks)
    assert (first.stats.slots.tolist(), second.stats.slots.tolist()) == ([0], [2])
    assert first.loss == 0.0
    assert all(bool(grad.isfinite().all()) for grad in first.gradients.values())
    # Its keys and values were seen from rank 1, its queries were not asked for.
    assert float(first.gradients["depths.0.block.self_attn.v_proj.weight"].abs().max()) > 0
    assert float(first.gradients["depths.0.block.mlp.up_proj.weight"].abs().max()) == 0


@pytest.mark.slow
def test_target_states_come_from_whatever_rank_holds_them(ranks: list[dict[str, Any]]) -> None:
    tokens, hidden = Case(PACKED).batch(8)
    for depth in (1, 2, 3):
        gate = tokens.slots(depth).gate
        for rank in ranks:
            slots, states = rank["target states"]
            for (b, i), slot in zip(torch.ones_like(slots).nonzero().tolist(), slots.flatten().tolist(), strict=True):
                expected = hidden[b, slot + depth] if gate[b, slot] else torch.zeros(8)
                assert torch.equal(states[depth - 1][b, i], expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", INDEXERS)
def test_attention_that_picks_its_keys_is_refused_by_name(ranks: list[dict[str, Any]], family: str) -> None:
    for rank in ranks:
        assert rank[family].startswith("ParallelError: Running ")
        assert "the indexer of sparse attention" in rank[family]


def test_a_split_batch_without_its_ranks_is_refused() -> None:
    tokens, hidden = Case(SINGLE).batch(tiny_head().hidden_size)
    part = split(tokens, 1, 0, 2)
    with pytest.raises(ParallelError, match="Attending over a split batch"):
        MTPObjective(tiny_head(), depths=1)(part, part.take(hidden))


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"sliding_window": 4}, "a sliding window"),
        ({"softcap": 30.0}, "soft-capped scores"),
        ({"s_aux": torch.zeros(1)}, "attention sinks"),
        ({"dropout": 0.1}, "dropout"),
    ],
)
def test_what_the_attention_does_not_do_is_refused_by_name(asked: dict[str, Any], named: str) -> None:
    view = split(Case(SINGLE).batch(8)[0], 1, 0, 2).chain_state().at(1)
    states = torch.zeros(1, 2, 16, 8)
    with pytest.raises(ParallelError, match=f"its attention has {named}"):
        context_attention.context_attention(None, states, states, states, None, mtp_chain=view, **asked)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("step", [1, 3])
def test_the_block_mask_attends_as_the_dense_one(monkeypatch: pytest.MonkeyPatch, layout: Layout, step: int) -> None:
    """The kernel for CUDA, uncompiled: grouped heads, values of another width."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    eager = context_attention._Compiled(flex_attention, create_block_mask)
    monkeypatch.setattr(context_attention, "_compiled", lambda: eager)
    tokens, _ = Case(PACKED).batch(8)
    part = split(tokens, 1, 1, 2, layout)
    local, keys = part.shape[1], tokens.shape[1] + (step - 1) * part.shape[1]
    query, key, value = torch.randn(2, 4, local, 16), torch.randn(2, 2, keys, 16), torch.randn(2, 2, keys, 8)
    found = context_attention._flex(query, key, value, part.chain_state().at(step), 0.3)
    expected = context_attention._dense(query, key, value, part.chain_state().at(step), 0.3)
    torch.testing.assert_close(found, expected, atol=EQUAL * float(expected.abs().max()), rtol=0)


def test_a_query_sees_its_document_and_its_own_deeper_keys() -> None:
    """Two documents in 4 + 4 slots, rank 0 of 2 (slots 0 3 4 7), keys in the order 0 3 4 7 | 1 2 5 6 | own 0 3 4 7."""
    tokens = TokenBatch.from_rows([[(list(range(4)), [True] * 4), (list(range(4)), [True] * 4)]])
    places = split(tokens, 2, 0, 2).chain_state().places
    mask = context_attention._dense_mask(places, 12)[0, 0].int().tolist()
    assert mask == [
        [1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 1, 0, 0, 0, 1, 0, 0],
        [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0],
        [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 1],
    ]


def test_a_torch_without_the_collective_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch.distributed.tensor.experimental._context_parallel", None)
    with pytest.raises(ParallelError, match="has no context-parallel gather"):
        context_attention._torch_gather()
