"""Layers with a sliding window keep it in the chain: judged by the drafting loop with a KV cache and by a dense mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mtp_zoo import prefix_attention
from mtp_zoo.batch import TokenBatch
from mtp_zoo.blocks import BlockSource
from mtp_zoo.chain_attention import ChainState, ChainView, cache_mask
from mtp_zoo.chain_function import ChainFunction
from mtp_zoo.document_groups import group_documents
from mtp_zoo.head import DepthState, DraftHead
from tests.dense_chain import dense_chain
from tests.drafting import drafting_loop, entered, packed_batch, random_hidden, stacked
from tests.heads import HIDDEN, tiny_head

FP32_LOOP = 1e-5
"""States are of size 4; both ways differ by the order of FP32 sums (3e-6 seen)."""

FP32_GRADIENT = 2e-5
"""Relative to the largest gradient of a tensor."""

NO_GRADIENT = 1e-6
"""A softmax over one key does not depend on the query: what is left of such a gradient is rounding (2e-7 seen)."""

DEPTHS = 4

WINDOWS = (1, 2, 3, 5, 9, 100)
"""One entry; shorter than the depths; shorter than most documents; longer than some; longer than all."""

ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


def windowed_head(window: int, model: str = "qwen3", **kwargs: Any) -> DraftHead:
    """A head whose block is a transformers layer that hands a sliding window to its attention."""
    name = model.capitalize()
    qwen = {"layer_type": "sliding_attention", "fixed": {"use_sliding_window": True, "sliding_window": window}}
    block = BlockSource(
        module=model,
        config=f"{name}Config",
        layer=f"{name}DecoderLayer",
        norm=f"{name}RMSNorm",
        rotary=f"{name}RotaryEmbedding",
        pretrained=f"{name}PreTrainedModel",
        **(qwen if model == "qwen3" else {"layer_type": None, "fixed": {"sliding_window": window}}),
    )
    return tiny_head(block=block, **ROPE, **kwargs)


def run_lean(head: DraftHead, tokens: TokenBatch, hidden: Tensor) -> Tensor:
    return stacked(head(tokens, hidden, depths=DEPTHS))[entered(tokens, DEPTHS)]


def gradients(head: DraftHead, tokens: TokenBatch, rollout: Callable[[Tensor], list[DepthState]]) -> dict[str, Tensor]:
    """Values, and the gradients of a random projection of them."""
    real = entered(tokens, DEPTHS)
    hidden = random_hidden(tokens).requires_grad_()
    head.zero_grad()
    values = stacked(rollout(hidden))[real]
    (values * torch.randn(values.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    assert hidden.grad is not None
    return {
        "hidden": hidden.grad,
        **{name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None},
    }


@pytest.mark.parametrize("model", ["qwen3", "mistral"])
@pytest.mark.parametrize("window", WINDOWS)
def test_the_windowed_chain_equals_a_drafting_loop_with_a_cache(
    window: int, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_attention, "QUERY_BLOCK", 3)
    head, tokens = windowed_head(window, model), packed_batch()
    hidden = random_hidden(tokens)
    with torch.no_grad():
        lean = run_lean(head, tokens, hidden)
    for whole_cache in (False, True):
        loop = drafting_loop(head, tokens, hidden, DEPTHS, whole_cache=whole_cache)[entered(tokens, DEPTHS)]
        torch.testing.assert_close(lean, loop, atol=FP32_LOOP, rtol=0)


@pytest.mark.parametrize("window", WINDOWS)
def test_values_and_gradients_equal_the_dense_mask_with_the_band(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_attention, "QUERY_BLOCK", 5)
    head, tokens = windowed_head(window), packed_batch()
    hidden, real = random_hidden(tokens), entered(tokens, DEPTHS)
    with torch.no_grad():
        dense_values = stacked(dense_chain(head, tokens, hidden, DEPTHS, window))[real]
        torch.testing.assert_close(run_lean(head, tokens, hidden), dense_values, atol=FP32_LOOP, rtol=0)
    lean = gradients(head, tokens, lambda h: head(tokens, h, depths=DEPTHS))
    dense = gradients(head, tokens, lambda h: dense_chain(head, tokens, h, DEPTHS, window))
    assert lean.keys() == dense.keys()
    for name, grad in dense.items():
        limit = max(FP32_GRADIENT * float(grad.abs().max()), NO_GRADIENT)
        torch.testing.assert_close(lean[name], grad, atol=limit, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("reach", [None, 2, 0])
def test_the_gradient_of_the_merged_attention_passes_gradcheck(
    reach: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In FP64; nothing on the way may fall back to FP32."""
    monkeypatch.setattr(prefix_attention, "QUERY_BLOCK", 2)
    tokens = TokenBatch.from_rows([[([1, 2, 3], [True] * 3), ([4, 5], [True] * 2)]])
    prefix = [torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    own = [torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    documents = group_documents(tokens.segments, (1, 5), torch.device("cpu"))
    assert torch.autograd.gradcheck(
        lambda query, *rest: ChainFunction.apply(query, None, documents, 0.3, reach, *rest), (*prefix, *own)
    )


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        ("reach", lambda view, window: window),
        ("reach", lambda view, window: window - view.step),
        ("own", lambda view, window: slice(1, view.step)),
        ("own", lambda view, window: slice(max(1, view.step - window + 1), view.step)),
        ("own", lambda view, window: slice(max(1, view.step - window - 1), view.step)),
    ],
)
@torch.no_grad()
def test_a_window_that_does_not_move_with_the_depth_is_noticed(
    method: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, tokens = windowed_head(2), packed_batch()
    hidden, real = random_hidden(tokens), entered(tokens, DEPTHS)
    dense = stacked(dense_chain(head, tokens, hidden, DEPTHS, 2))[real]
    monkeypatch.setattr(ChainView, method, wrong)
    assert (run_lean(head, tokens, hidden) - dense).abs().max() > 0.05


def test_what_a_query_sees_under_a_window_of_three() -> None:
    table = {1: (3, []), 2: (2, [2]), 3: (1, [2, 3]), 4: (0, [2, 3, 4]), 5: (-1, [3, 4, 5])}
    for step, (slots, own) in table.items():
        view = ChainState(()).at(step)
        assert view.reach(3) == slots
        assert list(range(1, step + 1))[view.own(3)] == own
    assert ChainState(()).at(5).reach(None) is None
    assert [1, 2, 3, 4, 5][ChainState(()).at(5).own(None)] == [2, 3, 4, 5]


@torch.no_grad()
def test_without_a_window_the_same_layer_sees_more() -> None:
    head, tokens = windowed_head(3), packed_batch()
    hidden = random_hidden(tokens)
    narrow = run_lean(head, tokens, hidden)
    head.depths[0].block.self_attn.sliding_window = None
    assert (run_lean(head, tokens, hidden) - narrow).abs().max() > 0.05


def test_the_mask_over_a_cache() -> None:
    def cut(*args: Any) -> list[list[int]]:
        mask = cache_mask(*args, torch.device("cpu"))
        assert mask is not None
        return mask[0, 0].int().tolist()

    assert cut(None, 2, 5, 2) == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert cut(None, 1, 4, 3) == [[0, 1, 1, 1]]
    five = torch.ones(2, 5, dtype=torch.bool).tril(3)[None, None]
    assert cut(five, 2, 5, 3) == [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert cut(five, 2, 3, 2) == [[1, 1, 0], [0, 1, 1]], "the cache dropped two entries"
    assert cut(five, 2, 5, None) == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert cache_mask(None, 1, 3, 3, torch.device("cpu")) is None, "a single query that sees all needs no mask"


@torch.no_grad()
@pytest.mark.parametrize("whole_cache", [False, True])
def test_a_prefix_fed_in_pieces_gives_what_it_gives_in_one(whole_cache: bool) -> None:
    from transformers import DynamicCache

    head = windowed_head(3)
    tokens = TokenBatch.all_tokens(torch.arange(20, 31)[None])
    hidden, ids = random_hidden(tokens), tokens.slots(1).input_ids
    whole = head(tokens, hidden, depths=1)[0].normed
    cache = DynamicCache() if whole_cache else DynamicCache(config=head.factory.config)
    pieces = [
        head.draft_step(ids[:, part], hidden[:, part], tokens.position_ids[:, part], cache=cache).normed
        for part in (slice(0, 5), slice(5, 6), slice(6, 8), slice(8, 11))
    ]
    enters = tokens.slots(1).enters
    torch.testing.assert_close(torch.cat(pieces, 1)[enters], whole[enters], atol=FP32_LOOP, rtol=0)


@pytest.mark.parametrize("window", [2, 100])
def test_gradient_checkpointing_of_packed_documents_changes_no_gradient(window: int) -> None:
    """https://github.com/NVIDIA/Megatron-LM/pull/4593

    Documents reach the recomputed depth as a plain object among its keywords, the mask is None and the rotary pair is made
    inside; the gradient of the hidden states is among those compared.
    """
    tokens, found = packed_batch(), []
    for checkpointing in (False, True):
        head = windowed_head(window)
        if checkpointing:
            head.gradient_checkpointing_enable()
        found.append(gradients(head, tokens, lambda h, head=head: head(tokens, h, depths=DEPTHS)))
    plain, recomputed = found
    assert plain["hidden"].abs().max() > 0
    for name, grad in plain.items():
        torch.testing.assert_close(recomputed[name], grad, atol=0, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("rollout", ["chain", "sequence"])
def test_a_window_does_not_reach_into_the_document_before(rollout: Any) -> None:
    head, tokens = windowed_head(9), packed_batch()
    hidden = random_hidden(tokens)
    moved = hidden.clone()
    moved[0, :7] += 1.0
    before, after = (stacked(head(tokens, h, depths=3, rollout=rollout))[:, 0] for h in (hidden, moved))
    assert torch.equal(before[:, 7:], after[:, 7:])
    assert not torch.equal(before[:, :7], after[:, :7])


@torch.no_grad()
def test_the_sequence_rollout_keeps_the_window_at_every_depth() -> None:
    head = windowed_head(2)
    tokens = TokenBatch.all_tokens(torch.arange(20, 29)[None])
    hidden = random_hidden(tokens)
    moved = hidden.clone()
    moved[0, 0] += 1.0
    first, second = (stacked(head(tokens, h, depths=2, rollout="sequence"))[:, 0] for h in (hidden, moved))
    touched = (first - second).abs().amax(-1) > 0
    assert touched.int().tolist() == [[1, 1, 0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0, 0]]
    assert first.shape[-1] == HIDDEN
