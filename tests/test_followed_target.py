"""A head follows its target: embeddings and lm_heads that the target gets later are those that the head uses."""

from __future__ import annotations

import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mtp_zoo as mz
from mtp_zoo.errors import SharedTensorError
from tests.attaching import ids, load_model, make_checkpoint
from tests.heads import HIDDEN, VOCAB, tiny_head, tiny_target

GROWN = VOCAB + 12


def pair(tmp_path: Path, *, tied: bool) -> tuple[Any, mz.DraftHead]:
    root = make_checkpoint(tmp_path / "base", tied=tied)
    target = load_model(root).eval()
    return target, mz.load_head(root, target=target)


def loss(target: Any, head: mz.DraftHead, name: str, last: int = 3) -> float:
    batch = ids(2, 9)
    batch[:, -1] = last
    tokens = mz.TokenBatch.all_tokens(batch)
    with torch.no_grad():
        return mz.MTPObjective(head, depths=2, loss=name)(
            tokens, mz.target_states(target, tokens, head.spec)
        ).loss.item()


@pytest.mark.parametrize("loss_name", ["kl", "ce"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_target_that_is_resized_is_followed(tmp_path: Path, tied: bool, loss_name: str) -> None:
    """The losses are those of a head that is attached behind the resize; labels of new tokens have logits."""
    target, head = pair(tmp_path, tied=tied)
    before = loss(target, head, loss_name)
    torch.manual_seed(0)
    target.resize_token_embeddings(GROWN)
    assert head.shared.lm_head_weight.shape == (GROWN, HIDDEN)
    assert head.shared.embedding is target.get_input_embeddings()
    assert head.shared.tied is tied
    found = [loss(target, head, loss_name), loss(target, head, loss_name, last=VOCAB + 2)]
    head.attach(target)
    assert found == [loss(target, head, loss_name), loss(target, head, loss_name, last=VOCAB + 2)]
    assert found[0] != before


def test_one_that_can_t_be_used_is_refused_where_it_is_used(tmp_path: Path) -> None:
    target, head = pair(tmp_path, tied=False)
    target.lm_head = nn.Linear(HIDDEN, VOCAB, bias=True)
    with pytest.raises(SharedTensorError, match="no bias"):
        loss(target, head, "ce")


def test_the_target_is_not_kept_alive_and_what_was_borrowed_is() -> None:
    target, head = tiny_target(tied=False), tiny_head()
    head.attach(target)
    weight = target.lm_head.weight
    del target
    gc.collect()
    assert head.shared._target is not None
    assert head.shared._target() is None
    assert head.shared.lm_head.weight is weight


def test_a_pickle_holds_what_was_borrowed_and_not_the_target() -> None:
    target, head = tiny_target(tied=False), tiny_head()
    head.attach(target)
    copied = pickle.loads(pickle.dumps(head.shared))
    assert torch.equal(copied.lm_head_weight, target.lm_head.weight)
    assert copied._target is None
