"""Which way the loss of the third depth reaches what, for every set of cuts; and that a cut takes its own part, no more."""

from __future__ import annotations

import itertools
import json
import runpy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtp_zoo.batch import TokenBatch
from mtp_zoo.head import DraftHead
from mtp_zoo.objective import MTPObjective
from mtp_zoo.shared import SharedTensors
from tests.heads import HIDDEN, VOCAB, tiny_head
from tests.pages import ROOT

PARTS = 1e-6
"""Relative: the sum of two FP32 gradients, added in one buffer or apart."""

CUTS = {
    # detached: (embedding, lm_head, backbone) of an untied head, (the one tensor, backbone) of a tied one
    "": ("yes yes yes", "yes yes"),
    "embedding": ("no  yes yes", "yes yes"),
    "backbone": ("yes yes no ", "yes no "),
    "lm_head": ("yes no  yes", "yes yes"),
    "embedding backbone": ("no  yes no ", "yes no "),
    "embedding lm_head": ("no  no  yes", "no  yes"),
    "backbone lm_head": ("yes no  no ", "yes no "),
    "embedding backbone lm_head": ("no  no  no ", "no  no "),
}
"""Whether the depth-3 loss reaches each; the blocks of depths 1, 2 and 3 it always reaches."""


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts/gradient_map.py"))


def test_the_map_of_a_real_run_is_the_literal_one(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gradient_map.py", "--json"])
    assert script["main"]() == 0
    rows = json.loads(capsys.readouterr().out)
    found = {(row["head"], row["tied"], frozenset(row["detach"])): row for row in rows}
    assert len(found) == len(rows) == 32
    for head, (detach, (untied, tied)) in itertools.product(("recycled", "distinct"), CUTS.items()):
        cuts = frozenset(detach.split())
        blocks = {"block 1": True, "block 2": True, "block 3": True}
        embedding, lm_head, backbone = (word == "yes" for word in untied.split())
        expected = blocks | {"embedding": embedding, "lm_head": lm_head, "backbone": backbone}
        assert {name: found[head, False, cuts][name] is not None for name in expected} == expected
        one, backbone = (word == "yes" for word in tied.split())
        expected = blocks | {"embedding": one, "lm_head": one, "backbone": backbone}
        assert {name: found[head, True, cuts][name] is not None for name in expected} == expected


def gradients(
    blocks: int, tied: bool, detach: str, **options: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of the embedding, the lm_head and the target's states, from the depth-3 loss."""
    head = tiny_head(depths=blocks)
    embedding, lm_head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
    values = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(4)) * HIDDEN**-0.5
    embedding.weight = nn.Parameter(values.clone())
    lm_head.weight = embedding.weight if tied else nn.Parameter(values.clone())
    tokens = TokenBatch.all_tokens(torch.arange(20, 32)[None])
    hidden = torch.randn(1, 12, HIDDEN, generator=torch.Generator().manual_seed(5)).requires_grad_()
    objective = MTPObjective(
        head.attach(SharedTensors(embedding, lm_head)), weights=(0, 0, 1), detach=detach.split(), **options
    )
    objective(tokens, hidden).loss.backward()
    return embedding.weight.grad, lm_head.weight.grad, hidden.grad


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_a_cut_of_a_tied_tensor_leaves_exactly_the_other_paths_gradient(blocks: int, loss: str) -> None:
    from_embedding, from_lm_head, states = gradients(blocks, False, "", loss=loss)
    assert from_embedding is not None
    assert from_lm_head is not None
    assert states is not None
    expected = {"": from_embedding + from_lm_head, "embedding": from_lm_head, "lm_head": from_embedding}
    for detach, part in expected.items():
        tied, same, backbone = gradients(blocks, True, detach, loss=loss)
        assert tied is same
        torch.testing.assert_close(tied, part, atol=PARTS * float(part.abs().max()), rtol=0)
        assert torch.equal(backbone, states)  # type: ignore[arg-type]
    assert gradients(blocks, True, "embedding lm_head", loss=loss)[0] is None


@pytest.mark.parametrize("detach", ["backbone", "embedding backbone", "embedding backbone lm_head"])
def test_a_cut_backbone_gets_no_gradient_and_takes_none_from_the_others(detach: str) -> None:
    cut, whole = gradients(1, False, detach), gradients(1, False, detach.replace("backbone", ""))
    assert cut[2] is None
    assert whole[2] is not None
    for one, other in zip(cut[:2], whole[:2], strict=True):
        assert (one is None and other is None) or torch.equal(one, other)  # type: ignore[arg-type]


def test_one_recycled_block_gets_the_sum_over_its_uses() -> None:
    """https://github.com/areal-project/AReaL/pull/1670"""
    one, three = tiny_head(), tiny_head(depths=3)
    for depth in three.depths:
        depth.block.load_state_dict(one.depths[0].block.state_dict())
    three.depths[0].load_state_dict(one.depths[0].state_dict())
    three.attach(one.shared)
    tokens = TokenBatch.all_tokens(torch.arange(20, 32)[None])
    hidden = torch.randn(1, 12, HIDDEN, generator=torch.Generator().manual_seed(5))

    def block_gradients(head: DraftHead) -> list[dict[str, Tensor]]:
        MTPObjective(head, weights=(0, 0, 1), rollout="sequence")(tokens, hidden).loss.backward()
        return [{name: p.grad for name, p in depth.block.named_parameters()} for depth in head.depths]

    (recycled,), uses = block_gradients(one), block_gradients(three)
    for name, grad in recycled.items():
        assert all(use[name].abs().max() > 0 for use in uses)
        total = torch.stack([use[name] for use in uses]).sum(0)
        torch.testing.assert_close(grad, total, atol=1e-5 * float(total.abs().max()), rtol=0)


def test_the_table_says_what_the_list_says(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gradient_map.py"])
    assert script["main"]() == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│ recycled │ tied")]
    assert len(lines) == 8
    (isolated,) = (line for line in lines if "backbone, embedding, lm_head" in line)
    assert isolated.count(" - ") == 3
