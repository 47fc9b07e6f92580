"""What is computed in which dtype, and training in FP16 under a loss scale."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mtp_zoo.batch import TokenBatch
from mtp_zoo.chunked_loss import DepthRows, chunked_loss
from mtp_zoo.errors import PrecisionError
from mtp_zoo.head import DraftHead
from mtp_zoo.objective import MTPObjective
from mtp_zoo.shared import SharedTensors
from tests.heads import HIDDEN, VOCAB, tiny_head

SCALE = 65536.0
"""What GradScaler begins with."""

STEP = 1e6
"""Slots of a large step: 1 / STEP is a sixtieth of the smallest normal FP16 number."""

FP16 = 1e-3
"""Relative to the norm: one rounding to 11 bits (3e-4 seen)."""

LOW = {torch.float32: 1e-6, torch.bfloat16: 0.06, torch.float16: 0.008}
"""Of a loss against the one in FP32: roundings of a block's states to 8 or 11 bits, 4 depths' worth."""


def states_gradient(states: Tensor, weight: Tensor, labels: Tensor, scale: float) -> Tensor:
    """The gradient of one depth's cross-entropy over STEP slots, under a loss scale."""
    leaf = states.clone().requires_grad_()
    rows = DepthRows(leaf, labels, torch.arange(len(labels)), {"ce": 1.0}, torch.tensor(1 / STEP))
    (chunked_loss([rows], None, weight)[0] * scale).backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("scale", [32768.0, SCALE])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_loss_scale_reaches_the_gradient_before_it_is_rounded(dtype: torch.dtype, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    states, weight = (torch.randn(n, HIDDEN, generator=generator).to(dtype) for n in (40, VOCAB))
    labels = torch.randint(0, VOCAB, (40,), generator=generator)
    found = states_gradient(states, weight, labels, scale).double() / scale
    exact = states_gradient(states.double(), weight.double(), labels, 1.0)
    limit = FP16 if dtype == torch.float16 else 8 * FP16
    assert float((found - exact).norm() / exact.norm()) < limit


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_gradient_of_a_projection_is_summed_and_scaled_in_fp32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    states, weight = (torch.randn(n, HIDDEN, generator=generator).to(dtype) for n in (40, VOCAB))
    labels = torch.randint(0, VOCAB, (40,), generator=generator)

    def gradient(states: Tensor, weight: Tensor, scale: float) -> Tensor:
        leaf = weight.clone().requires_grad_()
        rows = DepthRows(states, labels, torch.arange(40), {"ce": 1.0}, torch.tensor(1 / STEP))
        (chunked_loss([rows], None, leaf)[0] * scale).backward()
        assert leaf.grad is not None
        return leaf.grad

    found = gradient(states, weight, SCALE).double() / SCALE
    exact = gradient(states.double(), weight.double(), 1.0)
    assert float((found - exact).norm() / exact.norm()) < (FP16 if dtype == torch.float16 else 8 * FP16)


def batch() -> tuple[TokenBatch, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCAB, (2, 12), generator=generator)
    return TokenBatch.all_tokens(ids), torch.randn(2, 12, HIDDEN, generator=generator)


def scaled_steps(parameters: list[nn.Parameter], loss: Any, steps: int = 4) -> tuple[float, list[Tensor]]:
    """The scale after some steps of an FP16 autocast loop, and the first step's unscaled gradients."""
    scaler, optimizer = (
        torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2),
        torch.optim.SGD(parameters, lr=1e-3),
    )
    first: list[Tensor] = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            value = loss()
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        first = first or [each.grad.clone() for each in parameters if each.grad is not None]
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), first


def test_an_fp16_loop_reaches_the_scale_of_plain_cross_entropy_with_its_gradients() -> None:
    """One depth of our objective, and torch's own cross-entropy on the same states and labels, both over STEP slots."""
    tokens, hidden = batch()
    slots, ours = tokens.slots(1), tiny_head()
    theirs = copy.deepcopy(ours)
    objective = MTPObjective(ours, depths=1, loss="ce")
    counts = torch.tensor([STEP])

    def plain() -> Tensor:
        state = theirs(tokens, hidden, depths=1)[0].normed[slots.gate]
        logits = state @ theirs.shared.lm_head_weight.T
        return cross_entropy(logits.float(), slots.labels[slots.gate], reduction="sum") / STEP

    scale, found = scaled_steps(list(ours.trainable_parameters()), lambda: objective(tokens, hidden, counts).loss)
    expected_scale, expected = scaled_steps(list(theirs.trainable_parameters()), plain)
    assert scale == expected_scale == 4 * SCALE, "grown twice, never cut"
    for mine, other in zip(found, expected, strict=True):
        assert float((mine - other).norm() / other.norm()) < 10 * FP16, "two roundings of FP16 logits and states apart"


def cast_head(model: torch.dtype, head: torch.dtype) -> DraftHead:
    """A head whose shared tensors are in the model's dtype and whose own are in another."""
    made = tiny_head().to(head)
    shared = made.shared
    return made.attach(
        SharedTensors(copy.deepcopy(shared.embedding).to(model), copy.deepcopy(shared.lm_head).to(model))
    )


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CONTEXTS = (None, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("context", CONTEXTS, ids=lambda each: f"autocast {each}")
@pytest.mark.parametrize("head", DTYPES, ids=lambda each: f"head {each}")
@pytest.mark.parametrize("model", DTYPES, ids=lambda each: f"model {each}")
def test_dtypes_of_model_head_and_autocast(model: torch.dtype, head: torch.dtype, context: torch.dtype | None) -> None:
    """The table of docs/conventions.md: dtypes of states, loss and gradients, and the loss against FP32."""
    tokens, hidden = batch()
    made = cast_head(model, head)
    objective = MTPObjective(made, depths=3, loss={"kl": 0.5, "ce": 0.5})
    leaf = hidden.to(model).requires_grad_()
    if context is not None and {head, context} == {torch.bfloat16, torch.float16}:
        with pytest.raises(PrecisionError), torch.autocast("cpu", context):
            objective(tokens, leaf)
        return
    with torch.autocast("cpu", context, enabled=context is not None):
        states = made(tokens, leaf, depths=1)
        out = objective(tokens, leaf)
    out.loss.backward()
    product = context or head
    assert states[0].normed.dtype in {head, product}, "norms return what enters them, or the dtype of their weight"
    assert out.loss.dtype == torch.float32
    assert {parameter.grad.dtype for parameter in made.trainable_parameters()} == {head}  # type: ignore[union-attr]
    assert leaf.grad is None, "the backbone is cut"
    exact = MTPObjective(cast_head(torch.float32, torch.float32), depths=3, loss={"kl": 0.5, "ce": 0.5})(tokens, hidden)
    lowest = max((LOW[each] for each in (model, head, product)), default=0.0)
    assert out.loss.item() == pytest.approx(exact.loss.item(), rel=lowest)
