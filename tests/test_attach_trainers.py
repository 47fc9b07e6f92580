"""Other people's loops, unchanged: Trainer, SFTTrainer, accelerate."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor

import mtp_zoo as mz
from mtp_zoo.batch import IGNORED
from mtp_zoo.errors import AttachError, NoMTPLossError
from tests.attaching import assert_same, gradients, ids, joint, load_model, make_checkpoint, native_state, weights
from tests.exporting import same, stored

STEP = 1e-6
"""One step of SGD on FP32 weights, accumulated or at once: the same sums in another order (2e-7 seen)."""

LENGTHS = (5, 14, 9, 20)


@pytest.fixture(autouse=True)
def _own_state() -> Iterator[None]:
    """The trainers warn of names that will change, and accelerate keeps one precision for the whole process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("joint") / "base")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kinds = ["full_attention", "full_attention"]
    return make_checkpoint(tmp_path_factory.mktemp("joint") / "full", layer_types=kinds)


def rows() -> list[dict[str, list[int]]]:
    """Rows of one length, of which 3, 12, 7 and 18 tokens are to be learnt: no micro-batch has its share."""
    out: list[dict[str, list[int]]] = []
    for number, length in enumerate(LENGTHS):
        tokens = ids(1, 20, number)[0]
        labels = torch.where(torch.arange(20) < 20 - length + 2, IGNORED, tokens)
        out.append({"input_ids": tokens.tolist(), "labels": labels.tolist()})
    return out


def collate(examples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    return {name: torch.tensor([example[name] for example in examples]) for name in ("input_ids", "labels")}


ONE_PLAIN_STEP: dict[str, Any] = {
    "per_device_train_batch_size": 1,
    "max_steps": 1,
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "logging_steps": 1,
    "disable_tqdm": True,
}
"""Settings of a trainer under which the change of a weight is its gradient times -0.1."""


def trainer(model: Any, place: Path, *, kind: Any = None, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    settings = {**ONE_PLAIN_STEP, "output_dir": str(place)}
    arguments = TrainingArguments(**{**settings, **options})
    return (kind or Trainer)(
        model=model, args=arguments, train_dataset=rows(), eval_dataset=rows(), data_collator=collate
    )


def assert_stepped_alike(found: Any, expected: Any, before: dict[str, Tensor]) -> None:
    """Every weight moved, and to the same place."""
    moved = weights(found)
    assert all(not torch.equal(moved[name], value) for name, value in before.items())
    for name, value in weights(expected).items():
        torch.testing.assert_close(moved[name], value, atol=STEP, rtol=0)


# Trainer


def test_accumulated_micro_batches_step_like_one_batch(root: Path, tmp_path: Path) -> None:
    """https://github.com/huggingface/transformers/pull/34191"""
    cut, one = joint(root, depths=2), joint(root, depths=2)
    before = weights(cut)
    trainer(cut, tmp_path, gradient_accumulation_steps=4).train()
    trainer(one, tmp_path, per_device_train_batch_size=4).train()
    assert_stepped_alike(cut, one, before)
    by_hand = joint(root, depths=2)
    batch = collate(rows())
    items = int((batch["labels"][:, 1:] != IGNORED).sum())
    by_hand(**batch, num_items_in_batch=items).loss.backward()
    with torch.no_grad():
        for parameter in by_hand.parameters():
            parameter -= 0.1 * parameter.grad
    assert_stepped_alike(cut, by_hand, before)


def test_the_reported_loss_is_the_joint_loss(root: Path, tmp_path: Path) -> None:
    model = joint(root)
    batch = collate(rows())
    items = int((batch["labels"][:, 1:] != IGNORED).sum())
    expected = model(**batch, num_items_in_batch=items).loss.item()
    run = trainer(model, tmp_path, gradient_accumulation_steps=4)
    run.train()
    assert run.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-5)


def test_evaluation_sees_what_the_model_alone_returns(root: Path, tmp_path: Path) -> None:
    seen: list[Any] = []

    def shapes(prediction: Any) -> dict[str, float]:
        seen.append(prediction.predictions)
        return {}

    for model in (load_model(root), joint(root)):
        run = trainer(model, tmp_path)
        run.compute_metrics = shapes
        run.evaluate()
    plain, with_head = seen
    assert type(plain) is type(with_head)
    assert (plain == with_head).all()


@pytest.mark.slow
@pytest.mark.parametrize("best", [False, True])
def test_a_resumed_run_goes_on_like_one_that_was_not_cut(best: bool, root: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"optim": "adamw_torch", "learning_rate": 1e-3, "save_steps": 2, "save_strategy": "steps"}
    if best:
        options |= {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
    whole, cut = joint(root), joint(root)
    trainer(whole, tmp_path / "whole", max_steps=4, **options).train()
    trainer(cut, tmp_path / "cut", max_steps=2, **options).train()
    resumed = joint(root)
    place = tmp_path / "cut" / "checkpoint-2"
    assert same(joint(place).state_dict(), cut.state_dict(), cut.state_dict())
    trainer(resumed, tmp_path / "cut", max_steps=4, **options).train(resume_from_checkpoint=str(place))
    assert_same(weights(resumed), weights(whole), 1e-6)
    assert not torch.equal(
        weights(resumed)["mtp_head.depths.0.norm.weight"], weights(cut)["mtp_head.depths.0.norm.weight"]
    )


def test_mixed_precision_keeps_the_mtp_loss(root: Path, tmp_path: Path) -> None:
    """accelerate rebuilds an output from its items."""
    model = joint(root)
    before = weights(model)
    seen: list[torch.dtype] = []
    model.mtp_head.depths[0].eh_proj.register_forward_hook(lambda _m, _i, output: seen.append(output.dtype))
    trainer(model, tmp_path, bf16=True).train()
    assert seen == [torch.bfloat16]
    assert all(not torch.equal(value, before[name]) for name, value in weights(model).items())


@pytest.mark.parametrize("options", [{"label_smoothing_factor": 0.1}, {"compute_loss_func": True}])
def test_a_trainer_that_takes_the_labels_away_is_refused(options: dict[str, Any], root: Path, tmp_path: Path) -> None:
    function = options.pop("compute_loss_func", None)
    run = trainer(joint(root), tmp_path, **options)
    if function:
        run.compute_loss_func = lambda out, labels, num_items_in_batch: out.logits.mean()
    with pytest.raises(NoMTPLossError, match="Label smoothing"):
        run.train()


def test_noise_of_a_trainer_stays_on_the_models_own_embeddings(root: Path, tmp_path: Path) -> None:
    """https://arxiv.org/abs/2310.05914, `neftune_noise_alpha`"""
    noisy, entered = joint(root), []
    noisy.mtp_head.depths[0].enorm.register_forward_hook(lambda _m, inputs, _o: entered.append(inputs[0]))
    table = noisy.get_input_embeddings().weight.detach().clone()
    trainer(noisy, tmp_path, neftune_noise_alpha=50.0).train()
    assert entered
    rows = entered[0].flatten(0, -2)
    assert all(bool((table == row).all(-1).any()) or not bool(row.any()) for row in rows)


# SFTTrainer


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")


def sft(model: Any, place: Path, **options: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    settings = {**ONE_PLAIN_STEP, "output_dir": str(place), "bf16": False}
    peft = options.pop("peft_config", None)
    data = Dataset.from_list([{"input_ids": ids(1, n, n)[0].tolist()} for n in LENGTHS])
    arguments = SFTConfig(**{**settings, **options})
    return SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer(), peft_config=peft)


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_sft_trainer_steps_by_the_joint_gradient(loss_type: str, root: Path, tmp_path: Path) -> None:
    """Its loss is made of log-probabilities outside the model, and never looks at the model's own."""
    gathered: list[dict[str, Tensor]] = []
    for weight in (0.0, 0.5):
        model = joint(root, mtp_lambda=weight, detach=())
        before = weights(model)
        sft(model, tmp_path, loss_type=loss_type, gradient_accumulation_steps=4).train()
        gathered.append({name: (before[name] - value) / 0.1 for name, value in weights(model).items()})
    own, both = gathered
    alone = joint(root, mtp_lambda=0.5, detach=())
    items = sum(LENGTHS) - len(LENGTHS)
    for length in LENGTHS:
        row = ids(1, length, length)
        (0.5 * alone(input_ids=row, labels=row, num_items_in_batch=items).mtp_loss).backward()
    added = {name: both[name] - own[name] for name in both}
    # A difference of FP32 weights after one step, over a learning rate of 0.1.
    assert_same(added, gradients(alone), 1e-2)


def test_sft_trainer_reports_its_own_loss_and_the_model_the_rest(root: Path, tmp_path: Path) -> None:
    model, plain = joint(root), load_model(root)
    runs = [sft(each, tmp_path / str(n), per_device_train_batch_size=4) for n, each in enumerate((model, plain))]
    for run in runs:
        run.train()
    losses = [run.state.log_history[0]["loss"] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert model.mtp.metrics["mtp/slots_1"] == sum(LENGTHS) - 2 * len(LENGTHS)


@pytest.mark.parametrize("options", [{"packing": True, "max_length": 40}, {"padding_free": True, "max_length": None}])
def test_sft_trainer_packs(options: dict[str, Any], full: Path, tmp_path: Path) -> None:
    model = joint(full)
    before = weights(model)
    sft(model, tmp_path, per_device_train_batch_size=4, **options).train()
    assert all(not torch.equal(value, before[name]) for name, value in weights(model).items())
    # One row of 48 tokens: each document loses the two slots that it loses alone.
    rows = 1 if "padding_free" in options else 2
    expected = sum(LENGTHS) - 2 * len(LENGTHS)
    assert model.mtp.metrics["mtp/slots_1"] == expected or rows == 2


def test_sft_trainer_with_adapters_saves_both(root: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=2, target_modules=["q_proj"])
    model = mz.attach(get_peft_model(load_model(root), lora))
    run = sft(model, tmp_path / "run", save_strategy="steps", save_steps=1)
    run.train()
    place = tmp_path / "run" / "checkpoint-1"
    head = model.get_base_model().mtp_head.state_dict()
    again = mz.attach(load_model(root), place)
    assert same(again.mtp_head.state_dict(), head, head)
    with pytest.raises(AttachError, match="get_peft_model"):
        sft(joint(root), tmp_path / "late", peft_config=lora).train()


# accelerate


def test_an_accelerate_loop_in_bf16(root: Path, tmp_path: Path) -> None:
    from accelerate import Accelerator

    model = joint(root)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimiser = accelerator.prepare(model, optimiser)
    batch = collate(rows())
    losses: list[float] = []
    for _ in range(4):
        out = model(**batch)
        accelerator.backward(out.loss)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(out.mtp_loss.item())
        assert isinstance(out.metrics, dict)
    assert losses[-1] < losses[0]
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(tmp_path / "out", state_dict=accelerator.get_state_dict(model))
    assert same(stored(tmp_path / "out"), native_state(unwrapped), stored(tmp_path / "out"))
    assert json.dumps(unwrapped.mtp.metrics)
