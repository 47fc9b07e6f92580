"""Adapters in the trunk, a head that trains whole beside them: both learn, and both are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

import mtp_zoo as mz
from mtp_zoo.attach_peft import HEAD_FILE
from mtp_zoo.errors import AttachError, HeadMismatchError
from tests.attaching import assert_same, gradients, ids, joint, load_model, make_checkpoint, weights
from tests.exporting import same, stored

pytestmark = [
    # PEFT calls methods of transformers by names that will go, and warns of tied embeddings, which one test is about.
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore:.*a tied layer is part of the adapter:UserWarning"),
]

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0}
TOKENS = ids(2, 12)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("joint") / "base")


def adapted(root: Path, **options: Any) -> Any:
    return mz.attach(get_peft_model(load_model(root), LoraConfig(**LORA)), **options)


def trained(model: Any, steps: int = 3) -> Any:
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(steps):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimiser.step()
        model.zero_grad()
    return model


def head_of(model: Any) -> dict[str, Tensor]:
    return model.get_base_model().mtp_head.state_dict()


def test_adapters_and_the_whole_head_train_and_nothing_else(root: Path) -> None:
    model = adapted(root)
    assert isinstance(model, PeftModel)
    before = weights(model)
    trained(model)
    moved = {name for name, value in weights(model).items() if not torch.equal(value, before[name])}
    head = {name for name in before if ".mtp_head." in name}
    adapters = {name for name in before if ".lora_" in name}
    assert len(head) == len(list(model.get_base_model().mtp_head.parameters()))
    assert not any(".lora_" in name for name in head)
    assert moved == head | adapters


def test_the_heads_gradient_is_that_beside_a_trunk_without_adapters(root: Path) -> None:
    """LoRA starts at zero, so the trunk's states are the same."""
    with_adapters, plain = adapted(root), joint(root)
    with_adapters(input_ids=TOKENS, labels=TOKENS).loss.backward()
    plain(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert_same(gradients(with_adapters.get_base_model().mtp_head), gradients(plain.mtp_head))


def test_a_saved_adapter_brings_its_head(root: Path, tmp_path: Path) -> None:
    model = trained(adapted(root))
    model.save_pretrained(tmp_path / "out")
    assert {"adapter_model.safetensors", "adapter_config.json", HEAD_FILE} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    assert not any("mtp" in name for name in load_file(tmp_path / "out" / "adapter_model.safetensors"))
    assert load_file(tmp_path / "out" / HEAD_FILE).keys() == {name for name in stored(root) if name.startswith("mtp.")}
    again = mz.attach(PeftModel.from_pretrained(load_model(root), tmp_path / "out"), tmp_path / "out")
    assert same(head_of(again), head_of(model), head_of(model))
    out, expected = (m.eval()(input_ids=TOKENS, labels=TOKENS) for m in (again, model))
    assert torch.equal(out.loss, expected.loss)


def test_loading_an_adapter_loads_its_head(root: Path, tmp_path: Path) -> None:
    """What Trainer calls when it resumes."""
    model = trained(adapted(root))
    model.save_pretrained(tmp_path / "out")
    other = adapted(root)
    other.load_adapter(str(tmp_path / "out"), "default", is_trainable=True)
    assert same(head_of(other), head_of(model), head_of(model))


def test_a_saved_head_must_be_whole(root: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    adapted(root).save_pretrained(tmp_path / "out")
    tensors = load_file(tmp_path / "out" / HEAD_FILE)
    del tensors["mtp.norm.weight"]
    save_file(tensors, tmp_path / "out" / HEAD_FILE, metadata={"family": "qwen3_5", "depths": "1"})
    with pytest.raises(HeadMismatchError, match=r"mtp\.norm\.weight"):
        mz.attach(load_model(root), tmp_path / "out")


def test_a_merged_model_saves_trunk_and_head(root: Path, tmp_path: Path) -> None:
    model = trained(adapted(root))
    head = {name: value.clone() for name, value in head_of(model).items()}
    expected = model.eval()(input_ids=TOKENS, labels=TOKENS)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "out")
    assert same(mz.load_head(tmp_path / "out").state_dict(), head, head)
    again = joint(tmp_path / "out").eval()(input_ids=TOKENS, labels=TOKENS)
    torch.testing.assert_close(again.logits, expected.logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(again.mtp_loss, expected.mtp_loss, atol=1e-5, rtol=0)


def test_other_processes_write_no_head(root: Path, tmp_path: Path) -> None:
    adapted(root).save_pretrained(tmp_path / "out", is_main_process=False)
    assert not (tmp_path / "out" / HEAD_FILE).exists()


@pytest.mark.parametrize("targets", [["q_proj"], ["gate_proj", "linear_attn.in_proj_a"]])
def test_adapters_that_are_made_behind_attach_are_refused(targets: list[str], root: Path) -> None:
    model = get_peft_model(joint(root), LoraConfig(**{**LORA, "target_modules": targets}))
    with pytest.raises(AttachError, match="Expected a head that trains fully") as caught:
        model(input_ids=TOKENS, labels=TOKENS)
    assert "get_peft_model" in caught.value.remedy


def test_adapters_in_what_the_head_borrows_are_refused(root: Path) -> None:
    model = get_peft_model(load_model(root), LoraConfig(**{**LORA, "target_modules": ["q_proj", "embed_tokens"]}))
    with pytest.raises(AttachError, match="fit") as caught:
        mz.attach(model)
    assert "embedding: adapters are in it" in str(caught.value)


@pytest.mark.filterwarnings("ignore:Found missing adapter keys:UserWarning")
def test_an_adapter_saved_under_another_prefix_is_refused_by_name(root: Path, tmp_path: Path) -> None:
    adapted(root).save_pretrained(tmp_path)
    place = tmp_path / "adapter_model.safetensors"
    moved = {name.replace(".model.layers.", ".model.language_model.layers."): v for name, v in load_file(place).items()}
    save_file(moved, place, metadata={"format": "pt"})
    model = PeftModel.from_pretrained(load_model(root), tmp_path)
    with pytest.raises(HeadMismatchError) as caught:
        mz.attach(model, tmp_path)
    unknown = [problem for problem in caught.value.problems if "unknown to the model" in problem]
    assert len(unknown) == len(moved) == len(caught.value.problems) - len(unknown)
    assert not hasattr(model.get_base_model(), "mtp_head")
