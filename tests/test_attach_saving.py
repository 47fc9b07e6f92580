"""A joint model keeps its head: in its state dict, in what it saves, and in what it loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import mtp_zoo as mz
from mtp_zoo import attach_save
from mtp_zoo.attach_save import STAGING
from mtp_zoo.checkpoint import INDEX_NAME
from mtp_zoo.cli import app
from mtp_zoo.errors import AttachError, ExportError, HeadMismatchError
from tests.attaching import ids, joint, load_model, make_checkpoint, native_state
from tests.exporting import same, stored, train
from tests.stored_forms import plain_form, write

RUNNABLE = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_5_moe", "qwen3_next")
"""Families beside Qwen3.5 whose trunks transformers loads into one class and runs on a CPU."""

NATIVE = "mtp.fc.weight"
OWN = "mtp_head.depths.0.eh_proj.weight"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("joint") / "base")


def changed(root: Path, **options: Any) -> Any:
    """A joint model in which every weight of the head was trained."""
    model = joint(root, **options)
    train(model.mtp_head)
    return model


def head_files(place: Path) -> dict[str, Tensor]:
    return {name: value for name, value in stored(place).items() if name.startswith("mtp.")}


# The state dict


def test_the_state_dict_has_the_parameters_names_and_goes_back_in(root: Path) -> None:
    model, other = changed(root), joint(root)
    state = model.state_dict()
    assert dict(model.named_parameters(remove_duplicate=False)).keys() <= state.keys()
    assert state[OWN].data_ptr() == model.mtp_head.depths[0].eh_proj.weight.data_ptr()
    assert other.load_state_dict(state).missing_keys == []
    assert same(other.state_dict(), state, state)


def test_the_names_of_checkpoints_are_taken_too(root: Path) -> None:
    model, other = changed(root), joint(root)
    natives = native_state(model)
    assert {name for name in natives if name.startswith("mtp.")} == set(head_files(root))
    assert other.load_state_dict(natives).missing_keys == []
    assert same(other.state_dict(), model.state_dict(), model.state_dict())
    del natives["mtp.norm.weight"]
    with pytest.raises(HeadMismatchError, match=r"mtp\.norm\.weight"):
        other.load_state_dict(natives, strict=False)


def test_inside_another_module_names_get_its_prefix(root: Path) -> None:
    outer, again = torch.nn.ModuleDict({"policy": changed(root)}), torch.nn.ModuleDict({"policy": joint(root)})
    natives = {f"policy.{name}": value for name, value in native_state(outer["policy"]).items()}
    again.load_state_dict(natives)
    assert torch.equal(again.state_dict()[f"policy.{OWN}"], natives[f"policy.{NATIVE}"])


def test_a_trunk_alone_leaves_the_head_as_it_is(root: Path) -> None:
    model = changed(root)
    before = model.mtp_head.depths[0].eh_proj.weight.clone()
    model.load_state_dict(load_model(root).state_dict(), strict=False)
    assert torch.equal(model.mtp_head.depths[0].eh_proj.weight, before)
    with pytest.raises(RuntimeError, match=r"mtp_head.depths.0.eh_proj.weight"):
        model.load_state_dict(load_model(root).state_dict())


# What is saved


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_save_holds_trunk_and_head_bit_for_bit(tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", tied=tied, dtype=dtype)
    model = changed(base, head_dtype=dtype)
    model.save_pretrained(tmp_path / "out")
    assert mz.load_head(tmp_path / "out", target=model).origin.dtypes["depths.0.eh_proj.weight"] == (
        "F32" if dtype == torch.float32 else "BF16"
    )
    state = native_state(model)
    found = stored(tmp_path / "out")
    assert found.keys() == state.keys() - ({"lm_head.weight"} if tied else set())
    assert same(found, state, found)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert same(plain, state, plain)
    again = native_state(joint(tmp_path / "out", head_dtype=dtype))
    assert again.keys() == state.keys()
    assert same(again, state, state)


def test_a_head_keeps_its_own_dtype(tmp_path: Path) -> None:
    """FP32 master weights beside a BF16 trunk: a save must not round what training has gathered."""
    base = make_checkpoint(tmp_path / "base", dtype=torch.bfloat16)
    model = changed(base, head=mz.load_head(base, dtype=torch.float32))
    model.save_pretrained(tmp_path / "out")
    found = stored(tmp_path / "out")
    assert {value.dtype for name, value in found.items() if name.startswith("mtp.")} == {torch.float32}
    assert {value.dtype for name, value in found.items() if not name.startswith("mtp.")} == {torch.bfloat16}
    assert torch.equal(found[NATIVE], model.mtp_head.depths[0].eh_proj.weight)


@pytest.mark.parametrize("family", RUNNABLE)
def test_every_form_of_head_is_kept(family: str, tmp_path: Path) -> None:
    base = write(tmp_path / "base", plain_form(family))
    alone = AutoModelForCausalLM.from_pretrained(base, dtype="auto").train()
    model = mz.attach(alone, head_dtype=alone.dtype)
    tokens = ids(2, 7) % 60
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None for p in model.mtp_head.trainable_parameters())
    train(model.mtp_head)
    model.save_pretrained(tmp_path / "out")
    head = mz.load_head(tmp_path / "out")
    for name, value in model.mtp_head.state_dict().items():
        assert torch.equal(head.state_dict()[name], value), name
    assert head_names(tmp_path / "out", head) == head_names(base, head)
    trunk = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert same(trunk, model.state_dict(), trunk)
    again = mz.attach(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto"))
    again.load_state_dict(model.state_dict())


def head_names(root: Path, head: Any) -> set[str]:
    return {name for name in stored(root) if head.site.in_scope(name)}


def test_inspect_finds_nothing_wrong(root: Path, tmp_path: Path) -> None:
    changed(root).save_pretrained(tmp_path / "out")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "out"), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert (found["family"], found["depths"]) == ("qwen3_5", 1)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["mtp_num_hidden_layers"] == 1
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    record = json.loads((tmp_path / "out" / "mtp_zoo.json").read_text())
    assert record["base"]["source"] == str(root)
    assert record["training"] == {"mode": "joint", "mtp_lambda": 0.2, "depths": 1}


def test_the_config_counts_the_heads_depths(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", depths=None)
    head = mz.load_head(base, init="random", depths=2)
    joint(base, head=head, depths=2).save_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["mtp_num_hidden_layers"] == 2
    assert mz.load_head(tmp_path / "out").num_depths == 2


@pytest.mark.parametrize("max_shard_size", ["50GB", "100KB"])
def test_a_save_replaces_an_earlier_one(max_shard_size: str, root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    joint(root).save_pretrained(out, max_shard_size="60KB")
    (out / "tokenizer.json").write_text("{}")
    (out / "model.safetensors").write_bytes(b"of a save without a head")
    model = changed(root)
    model.save_pretrained(out, max_shard_size=max_shard_size)
    listed = set(json.loads((out / INDEX_NAME).read_text())["weight_map"].values())
    assert {path.name for path in out.glob("*.safetensors")} == listed
    assert (len(listed) > 2) == (max_shard_size == "100KB")
    assert same(stored(out), native_state(model), stored(out))
    assert (out / "tokenizer.json").exists()
    assert not (out / STAGING).exists()


def test_what_is_passed_as_state_dict_is_what_is_saved(root: Path, tmp_path: Path) -> None:
    """As accelerate and Trainer gather it from all ranks."""
    model = joint(root)
    own = {name: value * 2 for name, value in model.state_dict().items()}
    state = {name: value * 2 for name, value in native_state(model).items()}
    for number, each in enumerate((own, state)):
        model.save_pretrained(tmp_path / f"out{number}", state_dict=each)
        assert same(stored(tmp_path / f"out{number}"), state, stored(tmp_path / f"out{number}"))
    trunk = {name: value for name, value in state.items() if not name.startswith("mtp.")}
    model.save_pretrained(tmp_path / "trunk", state_dict=trunk)
    assert torch.equal(stored(tmp_path / "trunk")[NATIVE], model.state_dict()[OWN])
    del state["mtp.norm.weight"], own["mtp_head.depths.0.norm.weight"]
    for part, says in ((state, r"mtp\.norm\.weight"), (own, r"mtp_head\.depths\.0\.norm\.weight: missing")):
        with pytest.raises(HeadMismatchError, match=says):
            model.save_pretrained(tmp_path / "partial", state_dict=part)
    assert not (tmp_path / "partial").exists()


def test_other_processes_write_nothing(root: Path, tmp_path: Path) -> None:
    joint(root).save_pretrained(tmp_path / "out", is_main_process=False)
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_leaves_what_was_there(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    joint(root).save_pretrained(out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def fail(*_args: Any, **_options: Any) -> None:
        raise ExportError("no space", remedy="Free some.")

    monkeypatch.setattr(attach_save, "export", fail)
    with pytest.raises(ExportError, match="no space"):
        changed(root).save_pretrained(out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_save_that_is_cut_short_looks_like_no_checkpoint(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    joint(root).save_pretrained(out)
    moved: list[Path] = []

    def killed(_source: Path, place: Path) -> None:
        if moved:
            raise KeyboardInterrupt
        moved.append(place)

    monkeypatch.setattr(attach_save.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        changed(root).save_pretrained(out)
    assert not (out / INDEX_NAME).exists()
    assert not (out / "model.safetensors").exists()


def test_options_that_can_not_be_kept_are_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(AttachError, match="push_to_hub"):
        joint(root).save_pretrained(tmp_path / "out", push_to_hub=True)
    with pytest.raises(AttachError, match="variant"):
        joint(root).save_pretrained(tmp_path / "out", variant="fp16")


def test_a_trained_model_moves_on_disk_as_it_did_in_memory(root: Path, tmp_path: Path) -> None:
    """One optimiser step, saved and loaded, continues like the one that was not."""
    model = joint(root, detach=())
    tokens = ids(2, 12)

    def step(model: Any) -> Tensor:
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimiser.step()
        model.zero_grad()
        return model(input_ids=tokens, labels=tokens).loss

    step(model)
    model.save_pretrained(tmp_path / "out")
    assert load_file(tmp_path / "out" / "model_mtp_head.safetensors").keys() == head_files(root).keys()
    assert torch.equal(step(joint(tmp_path / "out", detach=())), step(model))
