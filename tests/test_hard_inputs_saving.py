"""Heads that vanish, freeze, thaw or come apart while a model is trained and saved: cases reported against other tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file

import mtp_zoo as mz
from mtp_zoo.errors import HeadMismatchError, HeadNotFoundError, NotAttachedError
from mtp_zoo.objective import MTPObjective
from tests.attaching import ids, joint, load_model, make_checkpoint
from tests.exporting import same, stored, train
from tests.tiny import write_checkpoint

TOKENS = ids(2, 12)
NATIVE = "mtp.norm.weight"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("joint") / "base")


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def trainable(model: torch.nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("mode", ["joint", "mtp_only"])
def test_what_trains_survives_loading_switching_and_wrapping(
    mode: Any, root: Path, tmp_path: Path, accelerator: Accelerator
) -> None:
    """https://github.com/vllm-project/speculators/pull/593"""
    joint(root).save_pretrained(tmp_path / "out")
    model = mz.attach(load_model(tmp_path / "out"), mode=mode)
    head = {f"mtp_head.{name}" for name, _ in model.mtp_head.named_parameters()}
    expected = head if mode == "mtp_only" else {name for name, _ in model.named_parameters()}
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    assert trainable(model) == expected
    model, optimiser = accelerator.prepare(model.eval().train(), optimiser)
    assert trainable(accelerator.unwrap_model(model)) == expected
    accelerator.backward(model(input_ids=TOKENS, labels=TOKENS).loss)
    optimiser.step()
    state = optimiser.state_dict()["state"].values()
    held = sum(entry["exp_avg"].numel() for entry in state)
    named = dict(accelerator.unwrap_model(model).named_parameters())
    assert held == sum(named[name].numel() for name in expected)


def test_what_is_borrowed_is_no_parameter_of_the_head(root: Path) -> None:
    """https://github.com/vllm-project/speculators/pull/593: the head's own optimiser never sees the embedding."""
    model = joint(root)
    borrowed = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    assert not borrowed & {id(parameter) for parameter in model.mtp_head.parameters()}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in borrowed]
    assert names == ["model.embed_tokens.weight"]


def test_plain_and_gathered_state_dicts_give_the_same_bytes(tmp_path: Path) -> None:
    """https://github.com/verl-project/verl/pull/925: a merger that took every tensor for a shard"""
    model = joint(make_checkpoint(tmp_path / "base", tied=False))
    train(model.mtp_head)
    gathered = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    named = {
        **{name: value for name, value in gathered.items() if not name.startswith("mtp.")},
        **{f"mtp_head.{name}": value.clone() for name, value in model.mtp_head.state_dict().items()},
    }
    for place, state in (("own", None), ("gathered", gathered), ("named", named)):
        model.save_pretrained(tmp_path / place, state_dict=state)
    bytes_of = {
        place: {path.name: path.read_bytes() for path in sorted((tmp_path / place).glob("*.safetensors"))}
        for place in ("own", "gathered", "named")
    }
    assert bytes_of["own"] == bytes_of["gathered"] == bytes_of["named"]
    assert "model_mtp_head.safetensors" in bytes_of["own"]


@pytest.mark.parametrize("strict", [True, False])
def test_resuming_from_a_head_with_a_hole_names_the_hole(strict: bool, root: Path) -> None:
    """https://github.com/NVIDIA/Megatron-LM/pull/6271: absent weights kept their initial values in silence"""
    model = joint(root)
    state = model.state_dict()
    del state["mtp_head.depths.0.norm.weight"]
    before = model.mtp_head.depths[0].norm.weight.clone()
    with pytest.raises(HeadMismatchError, match=r"mtp_head\.depths\.0\.norm\.weight: missing"):
        model.load_state_dict(state, strict=strict)
    assert torch.equal(model.mtp_head.depths[0].norm.weight, before)


def test_trainer_refuses_to_resume_from_a_head_with_a_hole(root: Path, tmp_path: Path) -> None:
    """https://github.com/NVIDIA/Megatron-LM/pull/6271, through transformers' own way of loading shards"""
    from transformers.trainer_utils import load_sharded_checkpoint

    joint(root).save_pretrained(tmp_path / "out")
    path = tmp_path / "out" / "model_mtp_head.safetensors"
    save_file({name: value for name, value in load_file(path).items() if name != NATIVE}, path)
    with pytest.raises(HeadMismatchError, match=r"mtp\.norm\.weight"):
        load_sharded_checkpoint(joint(root), str(tmp_path / "out"), strict=False)


def test_a_merged_checkpoint_without_a_head_gets_the_pristine_one(root: Path, tmp_path: Path) -> None:
    """https://github.com/modelscope/ms-swift/issues/9802: transformers drops the head, and the engine finds none"""
    merged = load_model(root)
    with torch.no_grad():
        for parameter in merged.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    merged.save_pretrained(tmp_path / "merged")
    with pytest.raises(HeadNotFoundError):
        mz.load_head(tmp_path / "merged")
    head = mz.load_head(root)
    report = mz.export(head, base=tmp_path / "merged", out=tmp_path / "out")
    (notice,) = report.notices
    assert str(root) in notice
    assert str(tmp_path / "merged") in notice
    assert "acceptance" in notice
    found = mz.load_head(tmp_path / "out", target=merged)
    assert same(found.state_dict(), head.state_dict(), head.state_dict())
    assert mz.export(found, base=tmp_path / "out", out=tmp_path / "again").notices == ()
    # What the notice asks for can be had of the result as it is.
    measured = mz.replay(merged.eval(), found, [TOKENS[0, :5].tolist()], k=2, max_new_tokens=8)
    assert measured.verify_steps > 0
    # Attached to the merged model and saved, it is one checkpoint as well.
    mz.attach(load_model(tmp_path / "merged"), root).save_pretrained(tmp_path / "joint")
    assert same(stored(tmp_path / "joint"), stored(tmp_path / "out"), stored(tmp_path / "out"))


@pytest.mark.parametrize("tied", [True, False])
def test_tensors_that_share_memory_are_stored_once_and_stay_tied(tied: bool, tmp_path: Path) -> None:
    """https://github.com/safetensors/safetensors/issues/98"""
    base = make_checkpoint(tmp_path / "base", tied=tied)
    model = joint(base)
    depth = model.mtp_head.depths[0]
    wide = torch.randn(2 * depth.eh_proj.weight.shape[1], depth.eh_proj.weight.shape[0])
    depth.eh_proj.weight = torch.nn.Parameter(wide[::2].T)  # a transposed slice of something larger
    assert not depth.eh_proj.weight.is_contiguous()
    depth.hnorm.weight = torch.nn.Parameter(depth.enorm.weight.detach()[:])  # a view of another weight
    model.save_pretrained(tmp_path / "out")
    found = stored(tmp_path / "out")
    assert torch.equal(found["mtp.fc.weight"], wide[::2].T)
    assert torch.equal(found["mtp.pre_fc_norm_hidden.weight"], found["mtp.pre_fc_norm_embedding.weight"])
    assert ("lm_head.weight" in found) == (not tied)
    size = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    headers = 16_384  # names and shapes of 42 tensors
    assert size < sum(value.nbytes for value in found.values()) + headers
    again = joint(tmp_path / "out")
    assert again.mtp_head.shared.tied is tied
    assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied


def test_a_head_on_the_meta_device_computes_no_loss_before_it_borrows(root: Path) -> None:
    """https://github.com/vllm-project/speculators/pull/452: lazily borrowed weights that were never filled"""
    head = mz.load_head(root, device="meta")
    tokens = mz.TokenBatch.all_tokens(TOKENS)
    with pytest.raises(NotAttachedError, match="not attached"):
        MTPObjective(head, depths=1, loss="ce")(tokens, torch.zeros(*TOKENS.shape, head.hidden_size))


def test_tiny_steps_are_kept_where_the_head_has_master_weights(tmp_path: Path) -> None:
    """https://github.com/huggingface/transformers/issues/36567: the config's dtype became that of the weights that train"""
    base = make_checkpoint(tmp_path / "base", dtype=torch.bfloat16)
    moved: dict[torch.dtype, bool] = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = joint(base, head=mz.load_head(base, dtype=dtype), mode="mtp_only")
        weight = model.mtp_head.depths[0].eh_proj.weight
        before = weight.detach().clone()
        optimiser = torch.optim.SGD(model.mtp_head.parameters(), lr=1e-6)
        for _ in range(100):
            model(input_ids=TOKENS, labels=TOKENS).loss.backward()
            optimiser.step()
            optimiser.zero_grad()
        large = before.abs() > 0.05  # of smaller ones, BF16 resolves steps that are smaller, too
        moved[dtype] = not torch.equal(weight.detach()[large], before[large])
    assert moved == {torch.float32: True, torch.bfloat16: False}


def test_a_trunk_alone_says_what_it_lacks(root: Path, tmp_path: Path) -> None:
    """https://github.com/NVIDIA/Megatron-LM/pull/6271: absent weights are no reason for random ones"""
    tensors = {name: value for name, value in stored(root).items() if not name.startswith("mtp.")}
    write_checkpoint(tmp_path / "trunk", json.loads((root / "config.json").read_text()), tensors)
    with pytest.raises(mz.MTPZooError, match="head"):
        mz.attach(load_model(tmp_path / "trunk"))
