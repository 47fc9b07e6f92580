"""The objective: means, masks, weights, metrics and what gets a gradient."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor, nn

from mtp_zoo.batch import IGNORED, TokenBatch, ahead
from mtp_zoo.chunked_loss import DepthLoss, DepthRows
from mtp_zoo.errors import NotAttachedError, ObjectiveError
from mtp_zoo.head import DraftHead
from mtp_zoo.objective import MTPObjective, step_counts
from tests.heads import HIDDEN, VOCAB, tiny_head
from tests.parallel.ranks import on_ranks

EQUAL = 1e-5
"""Relative to the largest gradient: the same sums in another order, FP32 (6e-7 seen)."""


def documents(*lengths: int, seed: int = 0) -> list[tuple[list[int], list[bool]]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randint(0, VOCAB, (n,), generator=generator).tolist(), [True] * n) for n in lengths]


def hidden_of(tokens: TokenBatch) -> Tensor:
    """A state that depends on its token only, so that it is the same however documents are laid out."""
    table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9))
    return table[tokens.input_ids]


def batch(*rows: list[tuple[list[int], list[bool]]]) -> tuple[TokenBatch, Tensor]:
    tokens = TokenBatch.from_rows(rows)
    return tokens, hidden_of(tokens)


def gradients(head: DraftHead) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        limit = EQUAL * float(grad.abs().max())
        torch.testing.assert_close(found[name], grad, atol=limit, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def run(batches: list[tuple[TokenBatch, Tensor]], **options: Any) -> tuple[float, dict[str, Tensor]]:
    """One optimiser step over micro-batches, with the step's global counts."""
    head = tiny_head()
    objective = MTPObjective(head, **options)
    counts = step_counts((tokens for tokens, _ in batches), objective.depths, reduction=objective.reduction)
    total = 0.0
    for tokens, hidden in batches:
        loss = objective(tokens, hidden, step_counts=counts).loss
        loss.backward()
        total += loss.item()
    return total, gradients(head)


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_the_loss_is_the_weighted_sum_of_each_depths_mean(loss: str) -> None:
    head = tiny_head()
    tokens, hidden = batch(documents(9), documents(6, seed=1))
    weight = head.shared.lm_head_weight
    out = MTPObjective(head, depths=2, loss=loss, weights=(1.0, 0.5))(tokens, hidden)
    states = head(tokens, hidden, depths=2)
    expected = 0.0
    for depth, alpha in ((1, 1.0), (2, 0.5)):
        losses = []
        for b, length in ((0, 9), (1, 6)):
            for t in range(length - depth - 1):
                log_q = (weight @ states[depth - 1].normed[b, t]).log_softmax(-1)
                log_p = (weight @ hidden[b, t + depth]).log_softmax(-1)
                label = tokens.input_ids[b, t + depth + 1]
                losses.append(-log_q[label] if loss == "ce" else (log_p.exp() * (log_p - log_q)).sum())
        expected += alpha * torch.stack(losses).mean().item()
    assert out.loss.item() == pytest.approx(expected, rel=1e-5)


def test_default_weights_fall_by_beta_and_sum_to_one() -> None:
    assert MTPObjective(tiny_head(), depths=3).weights == pytest.approx([1 / 1.96, 0.6 / 1.96, 0.36 / 1.96])
    assert MTPObjective(tiny_head(), depths=2, beta=1.0).weights == [0.5, 0.5]


def test_prompt_tokens_are_not_learnt() -> None:
    """https://github.com/modelscope/ms-swift/pull/8192"""
    ids = torch.arange(40, 50)[None]
    labels = torch.where(torch.arange(10) < 7, IGNORED, ids)
    tokens = TokenBatch.from_labels(ids, labels)
    head = tiny_head()
    out = MTPObjective(head, depths=1, loss="ce")(tokens, hidden_of(tokens))
    state = head(tokens, hidden_of(tokens), depths=1)[0].normed[0]
    losses = [-(head.shared.logits(state[t]).log_softmax(-1))[ids[0, t + 2]] for t in (5, 6, 7)]
    assert out.loss.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


def test_the_same_text_tiled_has_the_same_loss() -> None:
    """https://github.com/NVIDIA/Megatron-LM/issues/1532"""
    document = documents(8)
    once, _ = run([batch(document)])
    tiled, _ = run([batch(document * 8)])
    assert tiled == pytest.approx(once, rel=1e-5)


def test_packed_documents_equal_documents_alone() -> None:
    docs = documents(9, 4, 7)
    packed = run([batch(docs)])
    apart = run([batch([docs[0]], [docs[1]], [docs[2]])])
    assert packed[0] == pytest.approx(apart[0], rel=1e-5)
    assert_same(packed[1], apart[1])


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_micro_batches_of_unequal_size_equal_one_big_batch(loss: str) -> None:
    """https://github.com/huggingface/transformers/pull/34191"""
    few, many = documents(5), documents(40, 12, seed=1)
    nothing = [(ids, [False] * len(ids)) for ids, _ in documents(10, seed=2)]
    cut = run([batch(few), batch(many), batch(nothing)], loss=loss)
    whole = run([batch(few, many, nothing)], loss=loss)
    assert cut[0] == pytest.approx(whole[0], rel=1e-5)
    assert_same(cut[1], whole[1])


def test_the_mean_of_micro_batch_means_is_another_gradient() -> None:
    few, many = documents(5), documents(40, 12, seed=1)
    cut = run([batch(few), batch(many)], reduction="micro_batch")
    whole = run([batch(few, many)])
    assert cut[0] / 2 != pytest.approx(whole[0], rel=1e-3)


def test_main_token_reduction_divides_every_depth_by_the_targets_own_slots() -> None:
    tokens, hidden = batch(documents(10))
    out = MTPObjective(tiny_head(), depths=2, weights=(1, 1), reduction="main_tokens")(tokens, hidden)
    assert out.loss.item() == pytest.approx(float(out.stats.loss.sum()) / 9, rel=1e-5)
    by_depth = MTPObjective(tiny_head(), depths=2, weights=(1, 1))(tokens, hidden)
    assert by_depth.loss.item() == pytest.approx(float((out.stats.loss / torch.tensor([8, 7])).sum()), rel=1e-5)


@pytest.mark.parametrize("depths", [1, 3])
def test_nothing_to_learn_is_zero_with_zero_gradients(depths: int) -> None:
    """https://github.com/modelscope/mcore-bridge/pull/104"""
    head = tiny_head(depths=depths)
    ids = torch.arange(12)[None]
    tokens = TokenBatch.from_labels(ids, torch.full_like(ids, IGNORED))
    out = MTPObjective(head, depths=3)(tokens, hidden_of(tokens))
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert all(p.grad is not None and bool((p.grad == 0).all()) for p in head.parameters())
    assert out.metrics["mtp/slots_1"] == 0
    assert all(math.isfinite(value) for value in out.metrics.values())


def test_a_depth_without_slots_leaves_the_others_alone() -> None:
    head = tiny_head(depths=3)
    out = MTPObjective(head, depths=3)(*batch(documents(3)))
    out.loss.backward()
    assert out.metrics["mtp/slots_1"] == 1
    assert out.metrics["mtp/slots_2"] == 0
    block = {depth: head.depths[depth].block.mlp.down_proj.weight.grad for depth in (0, 1, 2)}
    assert block[0].abs().max() > 0
    assert block[1].abs().max() == block[2].abs().max() == 0


def test_a_deep_loss_reaches_the_blocks_before_it_and_nothing_of_the_target() -> None:
    """https://github.com/areal-project/AReaL/pull/1670"""
    for depths in (1, 3):
        head = tiny_head(depths=depths)
        tokens, hidden = batch(documents(12))
        hidden.requires_grad_()
        head.shared.embedding.requires_grad_()
        head.shared.lm_head.requires_grad_()
        MTPObjective(head, depths=3, weights=(0, 0, 1))(tokens, hidden).loss.backward()
        for depth in head.depths:
            assert depth.block.mlp.down_proj.weight.grad.abs().max() > 0
        assert hidden.grad is None
        assert head.shared.embedding.weight.grad is None
        assert head.shared.lm_head.weight.grad is None


def test_states_before_the_final_norm_pass_it_on_their_way_to_the_targets_distribution() -> None:
    tokens, hidden = batch(documents(12))
    head = tiny_head(spec={"hidden_tap": "pre_norm"})
    norm = nn.LayerNorm(HIDDEN)
    head.shared.final_norm = norm
    before = MTPObjective(head, depths=2, loss="kl")(tokens, hidden).loss
    # The same head on the same states; only the states in front of the target's lm_head may differ.
    plain = MTPObjective(tiny_head(), depths=2, loss="kl")
    assert plain(tokens, hidden).loss.item() != pytest.approx(before.item(), rel=1e-3)
    states = head(tokens, hidden, depths=2)
    expected = 0.0
    for depth, alpha in zip((1, 2), plain.weights, strict=True):
        gate = tokens.slots(depth).gate
        log_q = head.shared.logits(states[depth - 1].normed[gate]).log_softmax(-1)
        log_p = head.shared.logits(norm(ahead(hidden, depth, 0.0)[gate])).log_softmax(-1)
        expected += alpha * (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()
    assert before.item() == pytest.approx(expected, rel=1e-4)


def test_a_missing_final_norm_is_refused() -> None:
    head = tiny_head(spec={"hidden_tap": "pre_norm"})
    with pytest.raises(ObjectiveError, match="no final norm"):
        MTPObjective(head)(*batch(documents(6)))


def test_metrics_are_sums_over_counts_and_add_up() -> None:
    objective = MTPObjective(tiny_head(), depths=2)
    first, second = batch(documents(5)), batch(documents(30, seed=1))
    together = batch(documents(5), documents(30, seed=1))
    added = (objective(*first).stats + objective(*second).stats).metrics()
    whole = objective(*together).metrics
    assert added == pytest.approx(whole, rel=1e-5)
    assert whole["mtp/slots_1"] == 3 + 28


def test_a_head_that_copies_the_target_matches_it_and_is_accepted_everywhere() -> None:
    """States of the target are made so that h[t+1] is the embedding of x[t+1]; the head hands the embedding on."""
    head = tiny_head()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        head.depths[0].eh_proj.weight[:, :HIDDEN] = torch.eye(HIDDEN)
    tokens = TokenBatch.all_tokens(torch.arange(20, 36)[None])
    hidden = nn.functional.rms_norm(head.shared.embed(tokens.input_ids), (HIDDEN,), eps=1e-6)
    metrics = MTPObjective(head, depths=3, loss="kl")(tokens, hidden).metrics
    for depth in (1, 2, 3):
        assert metrics[f"mtp/match_{depth}"] == 1.0
        assert metrics[f"mtp/loss_{depth}"] == pytest.approx(0, abs=1e-5)
        assert metrics[f"mtp/accept_{depth}"] == pytest.approx(1, abs=1e-4)
    assert metrics["mtp/accept_length"] == 4.0
    assert metrics["mtp/accept_length_sampled"] == pytest.approx(4, abs=1e-3)


def test_expected_accept_length_counts_leading_matches_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from mtp_zoo import objective as module

    flags = ([True, True, False], [True, False])
    shared = ([0.5, 1.0, 0.25], [0.5, 0.5])

    def fake(depths: list[DepthRows], *args: Any, **kwargs: Any) -> tuple[Tensor, list[DepthLoss]]:
        parts = [
            DepthLoss(torch.zeros(len(rows.states)), matched := torch.tensor(flag), matched, torch.tensor(share))
            for rows, flag, share in zip(depths, flags, shared, strict=True)
        ]
        return torch.zeros(()), parts

    monkeypatch.setattr(module, "chunked_loss", fake)
    # Five tokens: depth 1 has slots 0, 1, 2 and depth 2 has slots 0, 1. Slots with both: 0 (yes, yes) and 1 (yes, no).
    metrics = MTPObjective(tiny_head(), depths=2)(*batch(documents(5))).metrics
    assert metrics["mtp/accept_length"] == 1 + (2 + 1) / 2
    assert metrics["mtp/accept_length_sampled"] == pytest.approx(1 + ((0.5 + 0.25) + (1.0 + 0.5)) / 2)
    assert metrics["mtp/match_1"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    "options",
    [
        {"depths": 0},
        {"weights": (1,)},
        {"weights": (1, -1, 1)},
        {"reduction": "mean"},
        {"chunk_size": 0},
        {"temperature": 0.0},
        {"top_k": 0},
        {"detach": {"head"}},
        {"agreement": False, "loss": "kl"},
        {"loss": ["ce", "kl"]},
    ],
    ids=str,
)
def test_an_objective_that_makes_no_sense_is_refused(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # users run without the tests' own type checks
    with pytest.raises(ObjectiveError):
        MTPObjective(tiny_head(), **options)


def test_a_head_without_its_target_is_refused_before_any_loss() -> None:
    """https://github.com/vllm-project/speculators/pull/452"""
    head = tiny_head()
    head._shared = None
    with pytest.raises(NotAttachedError, match="not attached"):
        MTPObjective(head)(*batch(documents(6)))


def _rank_step(rank: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    # Rank 0 has 3 + 0 slots at depth 1, rank 1 has 118.
    mine = [batch(documents(5)), batch(documents(120, seed=1))][rank]
    head = tiny_head()
    objective = MTPObjective(head)
    out = objective(*mine, step_counts=step_counts([mine[0]], 3))
    out.loss.backward()
    for parameter in head.parameters():
        torch.distributed.all_reduce(parameter.grad)
    return gradients(head), out.stats.all_reduce().metrics()


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    """https://github.com/huggingface/transformers/pull/34373"""
    ranks = on_ranks(_rank_step, tmp_path)
    both = batch(documents(5), documents(120, seed=1))
    _, expected = run([both])
    expected_metrics = MTPObjective(tiny_head())(*both).metrics
    for found, metrics in ranks:
        assert_same(found, expected)
        assert metrics == pytest.approx(expected_metrics, rel=1e-4)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0), (0, 0)])
def test_a_batch_without_slots_has_loss_0_and_gradients_of_0(shape: tuple[int, int]) -> None:
    head = tiny_head()
    tokens = TokenBatch.all_tokens(torch.zeros(shape, dtype=torch.int64))
    out = MTPObjective(head, depths=2)(tokens, torch.zeros(*shape, HIDDEN))
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert out.metrics["mtp/slots_1"] == 0
    assert all(not grad.any() for grad in gradients(head).values())
    assert gradients(head).keys() == {name for name, p in head.named_parameters() if p.requires_grad}


def test_a_label_outside_the_vocabulary_is_refused() -> None:
    tokens, hidden = batch(documents(6))
    objective = MTPObjective(tiny_head(), depths=1, loss="ce")
    beyond = TokenBatch.all_tokens(tokens.input_ids.clone().index_fill_(1, torch.tensor([4]), VOCAB))
    with pytest.raises(ObjectiveError, match=f"expected labels below {VOCAB}, .* got {VOCAB}"):
        objective(beyond, hidden)
    prompt = TokenBatch.from_mask(beyond.input_ids, beyond.input_ids < VOCAB)
    assert prompt.largest_label < VOCAB


def test_counts_of_another_number_of_depths_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    tokens, hidden = batch(documents(6))
    for counts in (torch.ones(1), torch.ones(3), torch.tensor(4.0)):
        with pytest.raises(ObjectiveError, match=r"expected step_counts of shape \[2\]"):
            MTPObjective(tiny_head(), depths=2)(tokens, hidden, step_counts=counts)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"beta": -0.6}, "beta"),
        ({"beta": math.nan}, "beta"),
        ({"beta": math.inf}, "beta"),
        ({"beta": -1, "depths": 2}, "beta"),
        ({"weights": [1.0, math.nan, 1.0]}, "depth weights"),
        ({"weights": [0.0, 0.0, 0.0]}, "depth weights"),
        ({"depths": 2.5}, "depths"),
        ({"depths": True}, "depths"),
        ({"detach": "backbone"}, "detach"),
        ({"detach": False}, "detach"),
        ({"rollout": "chian"}, "rollout"),
        ({"loss": {"ce": math.inf}}, "'ce'"),
        ({"loss": 3}, "loss"),
    ],
    ids=str,
)
def test_a_bad_argument_is_named_before_anything_runs(
    options: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # users run without the tests' own type checks
    with pytest.raises(ObjectiveError, match=name):
        MTPObjective(tiny_head(), **options)


def test_large_betas_do_not_overflow() -> None:
    assert MTPObjective(tiny_head(), depths=3, beta=1e200).weights == [0.0, 1e-200, 1.0]
    assert MTPObjective(tiny_head(), depths=3, beta=0).weights == [1.0, 0.0, 0.0]
