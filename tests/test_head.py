"""The head as a module: what it stores, what it borrows, how depths share their parts."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mtp_zoo.errors import FamilyDefinitionError, SharedTensorError
from mtp_zoo.head import DraftModule
from mtp_zoo.shared import SharedTensors
from mtp_zoo.spec import PerEngine
from tests.heads import VOCAB, tiny_head

LAYER_TENSORS = 11
FUSION_TENSORS = 4


def test_a_head_is_a_draft_module() -> None:
    assert isinstance(tiny_head(), DraftModule)


@pytest.mark.parametrize("depths", [1, 3])
def test_parts_that_depths_share_are_stored_once(depths: int, tmp_path: Path) -> None:
    head = tiny_head(depths=depths)
    stored = head.state_dict()
    assert stored.keys() == head.weights().keys()
    assert len(stored) == FUSION_TENSORS + depths * LAYER_TENSORS
    save_file(stored, tmp_path / "head.safetensors")  # refuses two names for one tensor
    twin = tiny_head(depths=depths, seed=1)
    twin.load_state_dict(load_file(tmp_path / "head.safetensors"))
    assert all(torch.equal(twin.weights()[name], value) for name, value in head.weights().items())


def test_shared_parts_stay_shared_when_the_head_is_copied_or_cast() -> None:
    head = copy.deepcopy(tiny_head(depths=2)).to(torch.bfloat16)
    assert head.depths[1].eh_proj is head.depths[0].eh_proj
    assert head.depths[1].eh_proj.weight.dtype == torch.bfloat16
    assert head.depths[1].block is not head.depths[0].block


def test_a_target_of_another_width_is_refused() -> None:
    wide = SharedTensors(nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB, bias=False))
    with pytest.raises(SharedTensorError, match="expected hidden size 64, got 32"):
        tiny_head().attach(wide)


@pytest.mark.parametrize(
    "spec",
    [
        {"fuse_order": "sum"},
        {"hidden_tap": "streams"},
        {"recycle": PerEngine(vllm="streams", sglang="post_norm", train="post_norm")},
    ],
)
def test_conventions_that_this_module_can_not_follow_are_refused(spec: dict[str, object]) -> None:
    with pytest.raises(FamilyDefinitionError, match="one stream"):
        tiny_head(spec=spec)
