"""What lies on padding and in a placeholder's own row of the embedding moves neither the loss nor a gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mtp_zoo.batch import PADDING, TokenBatch
from mtp_zoo.head import DraftHead
from mtp_zoo.objective import MTPObjective
from mtp_zoo.targets import target_states
from tests.heads import HIDDEN, tiny_head, tiny_target

PAD = 0
"""Id of padding; no document holds it."""

TEXT = list(range(20, 29))

LAYOUTS: dict[str, TokenBatch] = {
    "right": TokenBatch.all_tokens(
        torch.tensor([[*TEXT, PAD, PAD, PAD], [*TEXT[:5], *[PAD] * 7]]),
        torch.tensor([[1] * 9 + [0] * 3, [1] * 5 + [0] * 7]),
    ),
    "left": TokenBatch.all_tokens(
        torch.tensor([[PAD, PAD, PAD, *TEXT], [*[PAD] * 7, *TEXT[:5]]]),
        torch.tensor([[0] * 3 + [1] * 9, [0] * 7 + [1] * 5]),
    ),
    "packed": TokenBatch.from_rows([[(TEXT[:4], [True] * 4), (TEXT, [True] * 9)]], length=16, pad_id=PAD),
}


def measured(tokens: TokenBatch, on_padding: float, head: DraftHead, **options: Any) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients, also that on the states, with one value in every padded entry."""
    hidden = torch.randn(*tokens.shape, HIDDEN, generator=torch.Generator().manual_seed(3))
    hidden[tokens.doc_ids == PADDING] = on_padding
    hidden.requires_grad_()
    head.zero_grad()
    out = MTPObjective(head, detach=(), **options)(tokens, hidden)
    out.loss.backward()
    assert hidden.grad is not None
    grads = {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}
    assert all(math.isfinite(value) for value in out.metrics.values())
    return out.loss.item(), {**grads, "hidden": hidden.grad}


def assert_equal(found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert found[0] == expected[0]
    assert math.isfinite(found[0])
    for name, grad in expected[1].items():
        torch.testing.assert_close(found[1][name], grad, atol=0, rtol=0, msg=name)


@pytest.mark.parametrize("loss", ["ce", "kl", "reverse_kl", "tv", "lk"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_on_padding_may_be_anything(layout: str, loss: str) -> None:
    head = tiny_head()
    expected = measured(LAYOUTS[layout], 0.0, head, loss=loss)
    for value in (math.nan, math.inf, 1e30):
        assert_equal(measured(LAYOUTS[layout], value, head, loss=loss), expected)


@pytest.mark.parametrize("depths", [1, 3], ids=["chain", "sequence"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_padding_tokens_embedding_may_be_anything(layout: str, depths: int) -> None:
    head = tiny_head(depths=depths)
    expected = measured(LAYOUTS[layout], 0.0, head)
    with torch.no_grad():
        head.shared.embedding.weight[PAD] = math.nan
    assert_equal(measured(LAYOUTS[layout], 0.0, head), expected)


@pytest.mark.parametrize("depths", [1, 3], ids=["chain", "sequence"])
def test_a_placeholders_own_embedding_moves_no_loss(depths: int) -> None:
    head, image = tiny_head(depths=depths), 9
    ids = torch.tensor([[10, 11, image, image, 12, 13, 14, 15]])
    tokens = TokenBatch.from_mask(ids, torch.tensor([[1, 1, 0, 0, 1, 1, 1, 1]]), placeholder_ids=[image])
    expected = measured(tokens, 0.0, head)
    with torch.no_grad():
        head.shared.embedding.weight[image] += 5
    assert_equal(measured(tokens, 0.0, head), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_targets_states_are_zero_on_padding_and_finite_whatever_padding_embeds_to(layout: str) -> None:
    target, spec, tokens = tiny_target(), tiny_head().spec, LAYOUTS[layout]
    expected = target_states(target, tokens, spec)
    with torch.no_grad():
        target.get_input_embeddings().weight[PAD] = math.nan
    found = target_states(target, tokens, spec)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    assert not found[tokens.doc_ids == PADDING].any()
