"""No forward or backward of the objective waits for the device: on one whose values nobody can read, it runs."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtp_zoo.batch import TokenBatch
from mtp_zoo.head import DraftHead
from mtp_zoo.host_copies import to_host
from mtp_zoo.objective import MTPObjective, step_counts
from mtp_zoo.shared import SharedTensors
from mtp_zoo.stats import MTPStats
from tests.heads import HIDDEN, VOCAB, tiny_head

UNREADABLE = "meta"
"""Tensors of this device have shapes and no values: `.item()`, `.tolist()`, `.cpu()`, `nonzero` and masks as index raise."""

BATCHES = {
    "one document": TokenBatch.all_tokens(torch.arange(20, 44).view(2, 12)),
    "packed, padded, with placeholders": TokenBatch.from_mask(
        torch.arange(20, 44).view(2, 12),
        torch.ones(2, 12),
        seq_idx=torch.tensor([[0] * 7 + [1] * 3 + [-1] * 2, [-1] * 4 + [0] * 8]),
        placeholder_ids=(22, 40),
    ),
    "left padding": TokenBatch.all_tokens(torch.arange(24)[None], (torch.arange(24) > 6).int()[None]),
    "nothing to learn": TokenBatch.from_mask(torch.arange(12)[None], torch.zeros(1, 12)),
}


@pytest.fixture(autouse=True)
def no_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast does not know this device; asking it raises."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    monkeypatch.setattr(torch, "autocast", lambda *_args, **_kwargs: contextlib.nullcontext())


@pytest.fixture
def unreadable() -> DraftHead:
    return on_device(tiny_head())


def on_device(head: DraftHead) -> DraftHead:
    shared = SharedTensors(nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False))
    for module in (head, shared.embedding, shared.lm_head):
        module.to(UNREADABLE)
    return head.attach(shared)


def states() -> Tensor:
    return torch.zeros(2, 12, HIDDEN, device=UNREADABLE)


@pytest.mark.parametrize(
    "reading",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.unique(),
        lambda x: bool((x > 0).any()),
        lambda x: int(x.max()),
    ],
)
def test_the_device_refuses_whatever_waits_for_it(reading: Any) -> None:
    with pytest.raises((NotImplementedError, RuntimeError)):
        reading(torch.ones(3, device=UNREADABLE))


@pytest.mark.parametrize("options", [{}, {"loss": "ce", "agreement": False}, {"loss": "tv", "top_k": 5, "detach": ()}])
@pytest.mark.parametrize("reduction", ["global", "main_tokens", "micro_batch"])
@pytest.mark.parametrize("name", BATCHES)
def test_a_step_reads_nothing_from_the_device(
    name: str, reduction: Any, options: dict[str, Any], unreadable: DraftHead
) -> None:
    tokens = BATCHES[name].to(UNREADABLE)
    objective = MTPObjective(unreadable, depths=3, reduction=reduction, **options)
    hidden = torch.zeros(*tokens.shape, HIDDEN, device=UNREADABLE)
    counts = step_counts([tokens, tokens], 3, reduction=reduction)
    out = objective(tokens, hidden, step_counts=counts)
    out.loss.backward()
    total = out.stats + objective(tokens, hidden).stats
    assert isinstance(total, MTPStats)
    assert total.means()["mtp/loss_3"].device.type == UNREADABLE
    assert all(parameter.grad is not None for parameter in unreadable.parameters())


def test_a_head_of_several_depths_and_a_limited_context_read_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    head = on_device(tiny_head(depths=3))
    monkeypatch.setattr(type(head.factory), "context_limit", 64)
    tokens = BATCHES["packed, padded, with placeholders"].to(UNREADABLE)
    MTPObjective(head, depths=3)(tokens, states()).loss.backward()


def test_the_host_keeps_what_a_moved_batch_was_built_from() -> None:
    tokens = BATCHES["one document"]
    moved = tokens.to(UNREADABLE)
    assert moved.host is tokens
    assert moved.to("cpu") is tokens
    assert [list(each.known_rows) for each in moved.plan(2).depths] == [
        each.target_rows.tolist() for each in tokens.plan(2).depths
    ]


def test_whole_numbers_on_a_device_come_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []

    def copied(value: Tensor) -> Tensor:
        copies.append(value.numel())
        return torch.arange(value.numel())

    monkeypatch.setattr(Tensor, "cpu", copied)
    shapes = {"ids": (2, 3), "mask": (2, 3), "bounds": (2,)}
    given: dict[str, Tensor | None] = {name: torch.zeros(s, device="meta").long() for name, s in shapes.items()}
    found = to_host({**given, "none": None})
    assert copies == [14]
    assert found["mask"] is not None
    assert found["mask"].tolist() == [[6, 7, 8], [9, 10, 11]]
    assert found["none"] is None


def test_a_batch_that_is_built_from_a_device_asks_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `attach` builds one in every call: ids, labels and mask of one row of four slots, the last padding."""
    answers = iter([torch.tensor([5, 6, 7, 0, -100, 6, 7, -100, 1, 1, 1, 0])])
    monkeypatch.setattr(Tensor, "cpu", lambda value: value if value.device.type == "cpu" else next(answers))
    on_device = [torch.zeros(1, 4, dtype=torch.int64, device=UNREADABLE) for _ in range(3)]
    tokens = TokenBatch.from_labels(*on_device)
    assert tokens.input_ids.device.type == UNREADABLE
    assert tokens.host.slots(1).labels.tolist() == [[7, -100, -100, -100]]
    assert [each.known_rows for each in tokens.plan(2).depths] == [[0], []]
