"""Laws of the objective: it equals a plain loop, and nothing that must not matter does.

The head runs in FP32, as its norms do in any case; everything behind it runs in FP64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtp_zoo.batch import TokenBatch
from mtp_zoo.head import DraftHead
from mtp_zoo.logits import LogitRule
from mtp_zoo.objective import MTPObjective, step_counts
from tests import oracle_objective
from tests.heads import HIDDEN, VOCAB, tiny_head
from tests.oracle_objective import Options, Text, objective

LOSS = 5e-6
"""The same FP32 states from sums in another order (2e-7 seen); a slot too many or too few moves a loss by 1e-2."""

GRADIENT = 2e-4
"""Relative to the largest gradient of a tensor, for the same reason (2e-5 seen)."""

NOTHING = 1e-2
"""A tensor whose gradient is this much smaller than the head's largest may hold nothing but rounding, as that of a key that
no other key competes with."""

TOKENS = VOCAB - 5
"""Ids that texts hold; the last ones are for a padded vocabulary."""

MIXES: list[dict[str, float]] = [
    *({name: 1.0} for name in ("ce", "kl", "reverse_kl", "tv", "lk")),
    {"kl": 0.7, "ce": 0.2, "lk": 0.1},
]


@cache
def head_of(depths: int) -> DraftHead:
    """One head of this many blocks for all laws; none of them moves its weights."""
    head = tiny_head(depths=depths)
    head.shared.lm_head.double()
    return head


def text(learn: Sequence[bool], seed: int) -> Text:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, TOKENS, (len(learn),), generator=generator).tolist()
    return Text(ids, learn, torch.randn(len(learn), HIDDEN, generator=generator, dtype=torch.float64))


def batch(rows: Sequence[Sequence[Text]], pad: int = 0) -> tuple[TokenBatch, Tensor]:
    length = max(sum(len(each.ids) for each in row) for row in rows) + pad
    tokens = TokenBatch.from_rows([[(each.ids, each.learn) for each in row] for row in rows], length=length)
    hidden = torch.zeros(*tokens.shape, HIDDEN, dtype=torch.float64)
    for number, row in enumerate(rows):
        states = torch.cat([each.hidden for each in row])
        hidden[number, : len(states)] = states
    return tokens, hidden


def gradients(head: DraftHead) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in head.named_parameters()}


def measured(
    micro_batches: Sequence[tuple[TokenBatch, Tensor]], blocks: int = 1, **options: Any
) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    """Loss, metrics and gradients of one optimiser step."""
    head = head_of(blocks)
    head.zero_grad()
    ours = MTPObjective(head, **options)
    counts = step_counts((tokens for tokens, _ in micro_batches), ours.depths, reduction=ours.reduction)
    total, stats = 0.0, None
    for tokens, hidden in micro_batches:
        out = ours(tokens, hidden, step_counts=counts)
        out.loss.backward()
        total += out.loss.item()
        stats = out.stats if stats is None else stats + out.stats
    assert stats is not None
    return total, stats.metrics(), gradients(head)


def assert_equal(found: tuple[float, Mapping[str, float], dict[str, Tensor]], expected: Any) -> None:
    assert found[0] == pytest.approx(expected[0], rel=LOSS, abs=LOSS)
    assert found[1] == pytest.approx(expected[1], rel=LOSS, abs=LOSS)
    largest = max(float(grad.abs().max()) for grad in expected[2].values())
    for name, grad in expected[2].items():
        limit = GRADIENT * max(float(grad.abs().max()), NOTHING * largest)
        torch.testing.assert_close(found[2][name], grad, atol=limit, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


learn_masks = st.lists(st.sampled_from([True, True, True, False]), min_size=1, max_size=8)
rows_of_masks = st.lists(st.lists(learn_masks, min_size=1, max_size=3), min_size=1, max_size=2)


def texts_of(rows: Sequence[Sequence[Sequence[bool]]]) -> list[list[Text]]:
    return [[text(learn, seed=100 * r + d) for d, learn in enumerate(row)] for r, row in enumerate(rows)]


def judged(options: Options, blocks: int, texts: Sequence[Text]) -> Any:
    head = head_of(blocks)
    head.zero_grad()
    result = objective(head, texts, options)
    if result.loss.requires_grad:
        result.loss.backward()
    return float(result.loss.detach()), result.metrics, gradients(head)


@settings(max_examples=30)
@given(
    rows=rows_of_masks,
    mixes=st.lists(st.sampled_from(MIXES), min_size=1, max_size=3),
    shape=st.sampled_from([(1, "chain"), (1, "sequence"), (3, "sequence")]),
    temperature=st.sampled_from([1.0, 0.7, 2.0]),
    top_k=st.sampled_from([None, 1, 5]),
    reduction=st.sampled_from(["global", "main_tokens", "micro_batch"]),
    pad=st.integers(0, 2),
    chunk=st.sampled_from([None, 1, 3]),
)
def test_the_objective_equals_a_plain_loop(
    rows: list[list[list[bool]]],
    mixes: list[dict[str, float]],
    shape: tuple[int, Any],
    temperature: float,
    top_k: int | None,
    reduction: Any,
    pad: int,
    chunk: int | None,
) -> None:
    blocks, rollout = shape
    texts = texts_of(rows)
    weights = [1.0, 0.5, 0.25][: len(mixes)]
    options = Options(mixes, weights, rollout, temperature, top_k, reduction)
    found = measured(
        [batch(texts, pad)],
        blocks,
        depths=len(mixes),
        loss=mixes,
        weights=weights,
        rollout=rollout,
        temperature=temperature,
        top_k=top_k,
        reduction=reduction,
        chunk_size=chunk,
    )
    assert_equal(found, judged(options, blocks, [each for row in texts for each in row]))


SHAPES = {"chain": (1, "chain"), "sequence, one block": (1, "sequence"), "sequence, three blocks": (3, "sequence")}

LEARNT = [[True] * 8, [False, False, True, True, False, True], [True, True, True]]


@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_loss_and_rollout_equals_a_plain_loop(mix: dict[str, float], shape: str) -> None:
    blocks, rollout = SHAPES[shape]
    texts = [text(learn, seed) for seed, learn in enumerate(LEARNT)]
    found = measured([batch([texts])], blocks, loss=mix, weights=(1, 2, 3), rollout=rollout, temperature=0.8, top_k=7)
    assert_equal(found, judged(Options([mix] * 3, (1, 2, 3), rollout, 0.8, 7), blocks, texts))


def test_placeholders_and_what_models_do_behind_the_lm_head_equal_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [text([True] * 9, 0), text([True] * 5, 1)]
    marked = {texts[0].ids[3], texts[1].ids[2]}
    tokens, hidden = batch([texts])
    tokens = TokenBatch.from_mask(
        tokens.input_ids, tokens.learn_mask, seq_idx=tokens.doc_ids, placeholder_ids=sorted(marked)
    )
    monkeypatch.setattr(head_of(1).shared, "rule", LogitRule(scale=0.5, softcap=3.0, vocab_size=TOKENS))
    options = Options(
        [{"kl": 1.0}] * 3, (1, 1, 1), placeholders=frozenset(marked), scale=0.5, softcap=3.0, vocab_size=TOKENS
    )
    found = measured([(tokens, hidden)], weights=(1, 1, 1))
    # The loop reads zeros where the batch has a placeholder; what its own row held until here has moved nothing.
    weight = head_of(1).shared.embedding.weight
    kept = weight.detach().clone()
    monkeypatch.setattr(weight, "data", kept.index_fill(0, torch.tensor(sorted(marked)), 0.0))
    assert_equal(found, judged(options, 1, texts))


def late(each: Text, t: int, k: int, _: Any = ()) -> bool:
    return t + k + 2 < len(each.ids) and each.learn[t + k + 2]


def early(each: Text, t: int, k: int, _: Any = ()) -> bool:
    return t + k + 1 < len(each.ids) and each.learn[t + k]


def unmasked(each: Text, t: int, k: int, _: Any = ()) -> bool:
    return t + k + 1 < len(each.ids)


@pytest.mark.parametrize("gate", [late, early, unmasked])
def test_a_loop_with_another_gate_is_told_apart(gate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [text(LEARNT[1], 0)]
    monkeypatch.setattr(oracle_objective, "counts", gate)
    with pytest.raises(AssertionError):
        assert_equal(measured([batch([texts])], depths=1), judged(Options([{"kl": 1.0}], (1,)), 1, texts))


@pytest.mark.parametrize(
    "other",
    [{"temperature": 1.1}, {"top_k": 5}, {"rollout": "sequence"}, {"reduction": "main_tokens"}, {"weights": (1, 1)}],
)
def test_a_loop_with_other_options_is_told_apart(other: dict[str, Any]) -> None:
    texts = [text(LEARNT[0], 0)]
    options = replace(Options([{"kl": 1.0}] * 2, (1, 0.5)), **other)
    with pytest.raises(AssertionError):
        assert_equal(measured([batch([texts])], depths=2, weights=(1, 0.5)), judged(options, 1, texts))


# What must not matter


options = st.fixed_dictionaries(
    {"loss": st.sampled_from(MIXES), "rollout": st.sampled_from(["chain", "sequence"]), "depths": st.integers(1, 3)}
)


@settings(max_examples=15)
@given(rows=rows_of_masks, options=options)
def test_packed_documents_equal_one_document_at_a_time(rows: list[list[list[bool]]], options: dict[str, Any]) -> None:
    texts = texts_of(rows)
    alone = [batch([[each]]) for row in texts for each in row]
    assert_equal(measured([batch(texts)], **options), measured(alone, **options))


@settings(max_examples=15)
@given(rows=rows_of_masks, options=options, order=st.randoms(use_true_random=False))
def test_the_order_of_documents_does_not_matter(
    rows: list[list[list[bool]]], options: dict[str, Any], order: Any
) -> None:
    texts = texts_of(rows)
    mixed = [each for row in texts for each in row]
    order.shuffle(mixed)
    cut = order.randint(1, len(mixed))
    moved = [part for part in (mixed[:cut], mixed[cut:]) if part]
    assert_equal(measured([batch(moved, pad=2)], **options), measured([batch(texts)], **options))


@settings(max_examples=10)
@given(learn=learn_masks, times=st.integers(2, 4), options=options)
def test_the_same_text_several_times_has_the_same_mean(learn: list[bool], times: int, options: dict[str, Any]) -> None:
    """https://github.com/NVIDIA/Megatron-LM/issues/1532"""
    once = text(learn, 0)
    found = measured([batch([[once] * times])], **options)
    slots = {name: value / times for name, value in found[1].items() if "slots" in name}
    assert_equal((found[0], found[1] | slots, found[2]), measured([batch([[once]])], **options))


@pytest.mark.parametrize("rollout", ["chain", "sequence"])
@pytest.mark.parametrize("reduction", ["global", "main_tokens"])
def test_micro_batches_of_3_and_50_and_no_slots_equal_one_batch(rollout: Any, reduction: Any) -> None:
    """https://github.com/huggingface/transformers/pull/34191"""
    few, many, none = text([True] * 5, 0), [text([True] * n, n) for n in (30, 24)], text([False] * 7, 3)
    parts = [batch([[few]]), batch([many]), batch([[none]])]
    assert [int(tokens.slots(1).gate.sum()) for tokens, _ in parts] == [3, 50, 0]
    whole = batch([[few, none], many])
    options: dict[str, Any] = {"loss": {"kl": 0.5, "ce": 0.5}, "rollout": rollout, "reduction": reduction}
    assert_equal(measured(parts, **options), measured([whole], **options))
