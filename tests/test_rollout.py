"""The chain is what a server drafts with: judged by a token-by-token loop with a KV cache, and by a dense mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from mtp_zoo import prefix_attention
from mtp_zoo.batch import PADDING, TokenBatch
from mtp_zoo.errors import ObjectiveError
from mtp_zoo.objective import MTPObjective
from mtp_zoo.rollout import default_rollout, slot_positions
from mtp_zoo.spec import PerEngine
from tests.dense_chain import dense_chain
from tests.drafting import drafting_loop, entered, packed_batch, random_hidden, stacked
from tests.heads import HIDDEN, VOCAB, tiny_head

FP32_LOOP = 1e-5
"""States are of size 4; a loop and a batched pass differ by the order of FP32 sums (3e-6 seen)."""

FP32_GRADIENT = 2e-5
"""Relative to the largest gradient; the merged backward sums in another order than the dense one (1e-6 seen)."""

BF16_RATIO = 2.0
"""The lean chain may be at most this much further from FP32 than the dense one in the same precision."""


@pytest.mark.parametrize("kernel", ["flash", "portable"])
@pytest.mark.parametrize("position_rule", ["hidden", "token", "constant"])
@pytest.mark.parametrize("recycle", ["post_norm", "pre_norm"])
def test_the_chain_equals_a_drafting_loop_with_a_cache(
    kernel: str, position_rule: str, recycle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "portable":
        monkeypatch.setattr(prefix_attention, "choose_kernel", lambda *_: "blocks")
        monkeypatch.setattr(prefix_attention, "QUERY_BLOCK", 3)
    head = tiny_head(spec={"position_rule": position_rule, "recycle": PerEngine.same(recycle)})
    tokens = packed_batch()
    hidden = random_hidden(tokens)
    lean = stacked(head(tokens, hidden, depths=4))
    real = entered(tokens, 4)
    torch.testing.assert_close(lean[real], drafting_loop(head, tokens, hidden, 4)[real], atol=FP32_LOOP, rtol=0)


def test_the_sequence_rollout_is_not_what_a_server_drafts_beyond_depth_one() -> None:
    head, tokens = tiny_head(), packed_batch()
    hidden = random_hidden(tokens)
    sequence = stacked(head(tokens, hidden, depths=2, rollout="sequence"))
    loop = drafting_loop(head, tokens, hidden, 2)
    first, second = entered(tokens, 2)
    torch.testing.assert_close(sequence[0][first], loop[0][first], atol=FP32_LOOP, rtol=0)
    assert (sequence[1] - loop[1])[second].abs().max() > 0.05


def test_the_sequence_rollout_runs_every_depth_causally_at_the_targets_positions() -> None:
    head = tiny_head(depths=3)
    tokens = TokenBatch.all_tokens(torch.arange(20, 29)[None])
    hidden = random_hidden(tokens)
    assert default_rollout(head) == "sequence"
    states = head(tokens, hidden, depths=3)
    recycled = hidden
    for depth in (1, 2, 3):
        cache = DynamicCache(config=head.factory.config)
        ids = tokens.slots(depth).input_ids
        state = head.draft_step(ids, recycled, tokens.position_ids, cache=cache, depth=depth)
        enters = tokens.slots(depth).enters
        torch.testing.assert_close(states[depth - 1].normed[enters], state.normed[enters], atol=FP32_LOOP, rtol=0)
        recycled = state.recycled


@pytest.mark.parametrize("kernel", ["flash", "portable"])
def test_values_and_gradients_equal_the_dense_mask(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel == "portable":
        monkeypatch.setattr(prefix_attention, "choose_kernel", lambda *_: "blocks")
        monkeypatch.setattr(prefix_attention, "QUERY_BLOCK", 5)
    head, tokens = tiny_head(), packed_batch()
    real = entered(tokens, 4)
    # A plain sum of squares behind a norm has almost no gradient; a random projection has.
    direction = torch.randn(int(real.sum()), HIDDEN, generator=torch.Generator().manual_seed(1))
    found = []
    for rollout in (lambda h: head(tokens, h, depths=4), lambda h: dense_chain(head, tokens, h, 4)):
        hidden = random_hidden(tokens).requires_grad_()
        head.zero_grad()
        values = stacked(rollout(hidden))[real]
        (values * direction).sum().backward()
        assert hidden.grad is not None
        found.append((values.detach(), hidden.grad, {n: p.grad.clone() for n, p in head.named_parameters()}))
    (lean, lean_input, lean_grads), (dense, dense_input, dense_grads) = found
    torch.testing.assert_close(lean, dense, atol=FP32_LOOP, rtol=0)
    torch.testing.assert_close(lean_input, dense_input, atol=FP32_GRADIENT * float(dense_input.abs().max()), rtol=0)
    for name, grad in dense_grads.items():
        torch.testing.assert_close(
            lean_grads[name],
            grad,
            atol=FP32_GRADIENT * float(grad.abs().max()),
            rtol=0,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@torch.no_grad()
def test_bf16_is_as_near_to_fp32_as_the_dense_mask_in_bf16() -> None:
    exact, rough = tiny_head(), tiny_head().to(torch.bfloat16)
    tokens = packed_batch()
    hidden = random_hidden(tokens)
    real = entered(tokens, 3)
    judge = stacked(dense_chain(exact, tokens, hidden, 3))[real]

    def error(states: list[Any]) -> float:
        return float((stacked(states)[real].float() - judge).norm())

    assert error(rough(tokens, hidden, depths=3)) < BF16_RATIO * error(dense_chain(rough, tokens, hidden, 3))


@pytest.mark.parametrize("rollout", ["chain", "sequence"])
def test_another_document_of_the_row_changes_not_one_bit(rollout: Any) -> None:
    """https://github.com/vllm-project/speculators/issues/621"""
    head, tokens = tiny_head(), packed_batch()
    hidden = random_hidden(tokens)
    ids = tokens.input_ids.clone()
    ids[0, :7] = (ids[0, :7] + 1) % VOCAB
    other = TokenBatch(ids, tokens.learn_mask, tokens.doc_ids, tokens.position_ids)
    moved = hidden.clone()
    moved[0, :7] += 1.0
    before = stacked(head(tokens, hidden, depths=3, rollout=rollout))[:, 0, 7:]
    after = stacked(head(other, moved, depths=3, rollout=rollout))[:, 0, 7:]
    assert torch.equal(before, after)


def test_depth_two_reads_what_depth_one_put_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/vllm-project/vllm/pull/36531"""
    for depths in (1, 3):
        head, tokens = tiny_head(depths=depths), packed_batch()
        seen: list[Tensor] = []
        original = head.run_depth

        def spy(depth: int, embeddings: Tensor, hidden: Tensor, *args: Any, _run: Any = original, **kwargs: Any) -> Any:
            seen.append(hidden)  # noqa: B023 - called inside this turn of the loop
            return _run(depth, embeddings, hidden, *args, **kwargs)

        monkeypatch.setattr(head, "run_depth", spy)
        hidden = random_hidden(tokens)
        states = head(tokens, hidden, depths=3)
        real = tokens.doc_ids != PADDING
        assert torch.equal(seen[0][real], hidden[real])
        assert not seen[0][~real].any()
        assert seen[1] is states[0].recycled
        assert seen[2] is states[1].recycled


def test_gradient_checkpointing_changes_no_gradient() -> None:
    """https://github.com/NVIDIA/Megatron-LM/pull/4765"""
    tokens = packed_batch()
    grads = []
    for checkpointing in (False, True):
        head = tiny_head()
        if checkpointing:
            head.gradient_checkpointing_enable()
        hidden = random_hidden(tokens).requires_grad_()
        head(tokens, hidden, depths=3)[2].normed.sum(-1).sin().sum().backward()
        grads.append([hidden.grad, *(p.grad for p in head.parameters())])
    for plain, recomputed in zip(*grads, strict=True):
        torch.testing.assert_close(recomputed, plain, atol=0, rtol=0)


@pytest.mark.parametrize("rollout", ["chain", "sequence"])
def test_checkpointing_keeps_the_gradient_that_flows_into_an_open_backbone(rollout: Any) -> None:
    """https://github.com/NVIDIA/Megatron-LM/pull/4765"""
    tokens, found = packed_batch(), []
    for checkpointing in (False, True):
        head = tiny_head()
        if checkpointing:
            head.gradient_checkpointing_enable()
        hidden = random_hidden(tokens).requires_grad_()
        objective = MTPObjective(head, depths=3, loss="kl", rollout=rollout, detach={"embedding", "lm_head"})
        objective(tokens, hidden).loss.backward()
        assert hidden.grad is not None
        found.append(hidden.grad)
    assert found[0].abs().max() > 0
    torch.testing.assert_close(found[1], found[0], atol=0, rtol=0)


def test_positions_advance_as_the_family_says() -> None:
    start = torch.tensor([[7]])
    table = {"hidden": [7, 8, 9], "token": [8, 9, 10], "constant": [7, 7, 7]}
    for rule, expected in table.items():
        head = tiny_head(spec={"position_rule": rule})
        assert [int(slot_positions(head, start, depth)) for depth in (1, 2, 3)] == expected


def test_zeroing_the_first_embedding_follows_the_engine() -> None:
    zero_in_vllm = PerEngine(vllm=True, sglang=False, train=False)
    head = tiny_head(spec={"zero_first_embedding": zero_in_vllm})
    tokens = TokenBatch.all_tokens(torch.arange(20, 26)[None])
    hidden = random_hidden(tokens)
    states = {}
    for engine in (None, "vllm", "sglang"):
        head.engine = engine
        states[engine] = head(tokens, hidden, depths=1)[0].normed
    assert torch.equal(states[None], states["sglang"])
    assert not torch.allclose(states[None], states["vllm"])
    shared = head.shared.embed
    head.shared.embed = lambda ids, **kwargs: shared(ids, **kwargs) * (ids != 21)[..., None]  # type: ignore[method-assign] - 21 enters slot 0
    head.engine = "sglang"
    assert torch.equal(head(tokens, hidden, depths=1)[0].normed, states["vllm"])


@pytest.mark.parametrize(("depths", "rollout", "shape"), [(0, None, (4, 12)), (1, "tree", (4, 12)), (1, None, (4, 11))])
def test_what_can_not_be_rolled_out_is_refused(depths: int, rollout: Any, shape: tuple[int, int]) -> None:
    with pytest.raises(ObjectiveError, match="Rolling out"):
        tiny_head()(packed_batch(), torch.zeros(*shape, HIDDEN), depths=depths, rollout=rollout)


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_chain_on_a_device_equals_the_cpu() -> None:
    head, tokens = tiny_head(), packed_batch()
    hidden = random_hidden(tokens)
    expected = stacked(head(tokens, hidden, depths=3))
    head.to("cuda")
    head.shared.embedding.to("cuda")
    head.shared.lm_head.to("cuda")
    real = tokens.doc_ids != PADDING
    found = stacked(head(tokens.to("cuda"), hidden.to("cuda"), depths=3)).cpu()
    torch.testing.assert_close(found[:, real], expected[:, real], atol=1e-4, rtol=0)
