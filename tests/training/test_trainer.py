from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from accelerate.utils import DistributedType
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from mtp_zoo.errors import (
    ContextLimitError,
    DataError,
    MTPZooError,
    ObjectiveError,
    OutputExistsError,
    ResumeError,
    SettingsError,
)
from mtp_zoo.groups import group_of
from mtp_zoo.loader import load_head
from mtp_zoo.training import trainer as trainer_module
from mtp_zoo.training.config import TrainConfig
from mtp_zoo.training.trainer import Trainer, train
from mtp_zoo_conformance.cases import get_case
from mtp_zoo_conformance.prepared import prepare
from tests.children import METHOD, forked
from tests.tiny import tiny_config, tiny_tensors, write_checkpoint
from tests.training.conftest import MakeConfig
from tests.training.words import CHATML, save_tokenizer

SUM_ORDER = 2e-6
"""Largest relative difference of a gradient whose fp32 terms are added in another order; seen: under 5e-7."""

SAME_CURVE = 1e-5
"""Largest relative difference of metrics after a few steps whose gradients agree to `SUM_ORDER`; seen: under 2e-7."""


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.head.weights().items()}


def gradients(trainer: Trainer, step: int = 1) -> torch.Tensor:
    """The gradient of one step as one vector, taken before the optimiser uses it."""
    taken: list[torch.Tensor] = []
    trainer.optimizer.register_step_pre_hook(
        lambda *_: taken.append(torch.cat([p.grad.flatten() for p in trainer.head.trainable_parameters()]))
    )
    trainer.train_step(step)
    return taken[0]


def difference(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).norm() / right.norm())


def tree(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_a_run_trains_reports_and_exports_what_it_trained(make_config: MakeConfig, base: Path) -> None:
    config = make_config(data__eval_fraction=0.25, steps=6, eval_every=4, save_every=4)
    trainer = Trainer(config)
    before = weights(trainer)
    result = trainer.fit()

    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert ["eval/loss" in line for line in lines] == [False, False, False, True, False, True]
    assert {"loss", "lr", "grad_norm", "tokens", "mtp/loss_3", "mtp/acc_3", "mtp/accept_length"} <= lines[0].keys()
    assert result.metrics == lines[-1]
    assert "servable checkpoint" in str(result)
    assert json.loads(json.dumps(result.as_dict()))["out"] == str(config.out)

    exported = load_head(config.out)
    after = weights(trainer)
    assert all(torch.equal(value, after[name].bfloat16()) for name, value in exported.weights().items())
    assert all(not torch.equal(before[name], after[name]) for name in before)
    provenance = json.loads((config.out / "mtp_zoo.json").read_text(encoding="utf-8"))["training"]
    assert provenance["settings"]["steps"] == 6
    assert provenance["tokens"] == sum(line["tokens"] for line in lines)
    assert "Expected accept length" in (config.run_dir / "report.html").read_text(encoding="utf-8")
    assert [path.name for path in (config.run_dir / "checkpoints").iterdir()] == ["step-000004", "step-000006"]


@pytest.mark.parametrize("cut", [{"batch_size": 1, "grad_accumulation": 8}, {"batch_size": 2, "grad_accumulation": 4}])
def test_accumulated_micro_batches_give_the_gradient_of_one_big_batch(
    make_config: MakeConfig, cut: dict[str, int]
) -> None:
    """Means of micro-batch means: https://github.com/huggingface/transformers/pull/34191

    The micro-batches hold from 1 to 48 slots at depth 1, and some hold none at depths 2 and 3.
    """
    whole = gradients(Trainer(make_config(batch_size=8)))
    assert difference(gradients(Trainer(make_config(**cut))), whole) < SUM_ORDER


def test_a_mean_of_micro_batch_means_would_be_noticed(make_config: MakeConfig) -> None:
    """The flip of the test above."""
    whole = gradients(Trainer(make_config(batch_size=8)))
    trainer = Trainer(make_config(batch_size=1, grad_accumulation=8))
    trainer.objective.reduction = "micro_batch"
    means = gradients(trainer) / 8
    assert difference(means, whole) > 1000 * SUM_ORDER


def test_accumulation_asked_for_by_the_launcher_changes_nothing(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = gradients(Trainer(make_config()))
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    launched = Trainer(make_config())
    assert launched.accelerator.gradient_accumulation_steps == 4
    assert torch.equal(gradients(launched), plain)


def test_padding_changes_nothing_and_packing_keeps_the_documents_apart(make_config: MakeConfig) -> None:
    """All texts in one step: padded rows, rows of several documents, and documents one by one have one gradient."""
    alone = gradients(Trainer(make_config(batch_size=1, grad_accumulation=8)))
    packed = Trainer(make_config(data__pack=True, batch_size=1, grad_accumulation=3))
    assert len(packed.rows) == 3
    assert difference(gradients(packed), alone) < SUM_ORDER


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_curve_to_the_last_bit(make_config: MakeConfig, tmp_path: Path) -> None:
    changes = {"steps": 9, "save_every": 2, "data__eval_fraction": 0.25, "eval_every": 3, "data__pack": True}
    straight = make_config(**changes, run_dir=str(tmp_path / "straight"), out=str(tmp_path / "straight_out"))
    train(straight)

    config = make_config(**changes)
    (tmp_path / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    kill_after(lines=5, config=tmp_path / "config.yaml", metrics=config.run_dir / "metrics.jsonl")
    assert not config.out.exists()
    with (config.run_dir / "metrics.jsonl").open("a", encoding="utf-8") as stream:
        stream.write('{"step": 6, "los')  # what a kill in the middle of a write leaves
    train(config, resume=True)

    assert (config.run_dir / "metrics.jsonl").read_bytes() == (straight.run_dir / "metrics.jsonl").read_bytes()
    head = "model_mtp_head.safetensors"
    assert (config.out / head).read_bytes() == (straight.out / head).read_bytes()


def kill_after(*, lines: int, config: Path, metrics: Path) -> None:
    """Train in a process of its own and kill it with -9 as soon as it has written `lines` lines of metrics."""
    process = forked().Process(target=_train_and_hang, args=(lines, str(config)))
    process.start()
    deadline = time.monotonic() + 300
    while not metrics.exists() or metrics.read_text(encoding="utf-8").count("\n") < lines:
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def _train_and_hang(lines: int, config: str) -> None:
    torch.set_num_threads(1)
    trainer = Trainer(TrainConfig.from_yaml(config))
    step = trainer.train_step
    trainer.train_step = lambda number: step(number) if number <= lines else time.sleep(600)
    trainer.fit()


def test_a_run_without_a_checkpoint_resumes_from_its_start(make_config: MakeConfig) -> None:
    config = make_config()
    first = Trainer(config)
    first._begin()
    first.run.append(first.train_step(1))
    curve = (config.run_dir / "metrics.jsonl").read_bytes()
    train(config, resume=True)
    assert (config.run_dir / "metrics.jsonl").read_bytes().startswith(curve)


def test_a_finished_run_resumes_to_its_export_alone(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config()
    train(config)
    metrics = (config.run_dir / "metrics.jsonl").read_bytes()
    again = make_config(out=str(tmp_path / "again"), save_every=1, eval_every=7, keep_checkpoints=1)
    train(again, resume=True)
    assert (config.run_dir / "metrics.jsonl").read_bytes() == metrics
    head = "model_mtp_head.safetensors"
    assert (again.out / head).read_bytes() == (config.out / head).read_bytes()


def test_resuming_with_other_settings_is_refused_with_every_difference(make_config: MakeConfig, tmp_path: Path) -> None:
    train(make_config())
    before = tree(tmp_path)
    changed = make_config(
        optimizer__lr=2e-3,
        seed=1,
        objective__beta=0.5,
        steps=8,
        run_dir=str(tmp_path / "run"),
        out=str(tmp_path / "new"),
    )
    with pytest.raises(ResumeError) as caught:
        train(changed, resume=True)
    assert sorted(str(problem) for problem in caught.value.problems) == [
        "objective.beta: the run has null, got 0.5",
        "optimizer.lr: the run has 0.001, got 0.002",
        "seed: the run has 0, got 1",
        "steps: the run has 4, got 8",
    ]
    assert tree(tmp_path) == before


def test_resuming_on_other_data_is_refused(make_config: MakeConfig, texts: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(texts.read_bytes())
    train(make_config(data__path=str(copy)))
    moved = make_config(out=str(tmp_path / "new"))
    train(moved, resume=True)  # the same text under another path is the same data
    copy.write_text(copy.read_text(encoding="utf-8").replace("hello", "thanks"), encoding="utf-8")
    with pytest.raises(ResumeError, match="1 settings that change the curve differ") as caught:
        train(make_config(data__path=str(copy), out=str(tmp_path / "newer")), resume=True)
    assert str(caught.value.problems[0]).startswith("the data's sha256: the run has")


def test_nothing_to_resume_is_refused_and_nothing_is_made(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match="no run in it"):
        train(make_config(), resume=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("taken", ["out", "run_dir"])
def test_an_output_that_exists_is_refused_before_anything_is_read(
    make_config: MakeConfig, tmp_path: Path, taken: str
) -> None:
    config = make_config(model=str(tmp_path / "no such model"))
    path: Path = getattr(config, taken)
    path.mkdir()
    (path / "precious").write_text("kept", encoding="utf-8")
    with pytest.raises(OutputExistsError, match=str(path)):
        train(config)
    assert tree(tmp_path) == {f"{path.name}/precious": b"kept"}


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "no/such-model"},
        {"data__path": "no such file"},
        {"data__text_field": "body"},
        {"data__text_field": None, "data__messages_field": "text"},
        {"trackers": ["aim"]},
    ],
)
def test_bad_input_changes_nothing_on_disk(make_config: MakeConfig, tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(MTPZooError):
        train(make_config(**changes))
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_that_is_not_installed_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(SettingsError, match="aim can't be imported"):
        Trainer(make_config(trackers=["aim"]))


def test_a_tokenizer_that_is_too_large_for_the_target_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config(vocab=16)
    directory = write_checkpoint(tmp_path / "small", config, tiny_tensors(config))
    with pytest.raises(DataError, match="there is no vocabulary"):
        Trainer(make_config(model=str(directory)))
    save_tokenizer(directory)
    with pytest.raises(DataError, match=r"expected token ids below 16, got 18 \('</think>'\)"):
        Trainer(make_config(model=str(directory)))


def test_only_the_head_is_trained(make_config: MakeConfig) -> None:
    """A library switched requires_grad back on: https://github.com/vllm-project/speculators/pull/593"""
    trainer = Trainer(make_config(data__eval_fraction=0.25))
    before = {name: value.clone() for name, value in trainer.target.state_dict().items()}
    trainer.head.train()
    trainer.train_step(1)
    trainer.evaluate()
    trainable = {name for name, p in trainer.module.named_parameters() if p.requires_grad}
    assert trainable == {f"head.{name}" for name in trainer.head.state_dict()}
    assert not any(p.requires_grad for p in trainer.target.parameters())
    assert not trainer.target.training
    assert all(torch.equal(value, before[name]) for name, value in trainer.target.state_dict().items())
    size = sum(p.numel() for p in trainer.head.parameters())
    held = [t for state in trainer.optimizer.state.values() for t in state.values() if t.ndim]
    assert sum(t.numel() for t in held) == 2 * size


def test_the_groups_that_are_asked_for_are_trained_and_the_others_come_out_as_they_went_in(
    make_config: MakeConfig, base: Path
) -> None:
    run = make_config(trainable=["fusion", "norms"], optimizer__weight_decay=0.1, optimizer__lr=0.1)
    train(run)
    before, after = load_head(base).weights(), load_head(run.out).weights()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if group_of(name) in ("fusion", "norms")}


def test_groups_that_the_head_lacks_are_refused_before_anything_is_written(make_config: MakeConfig) -> None:
    run = make_config(trainable=["experts"])
    with pytest.raises(SettingsError, match=r"expected groups of \['fusion', 'attention', 'mlp', 'norms'\]"):
        Trainer(run)
    assert not run.run_dir.exists()


def test_small_rates_move_the_master_weights_of_a_bf16_head(make_config: MakeConfig) -> None:
    """Master weights became bf16 unasked: https://github.com/huggingface/transformers/issues/36567"""
    trainer = Trainer(make_config(precision="bf16", optimizer__lr=1e-6, optimizer__warmup_steps=0))
    assert trainer.target.dtype == torch.bfloat16
    before = weights(trainer)
    for step in range(1, 5):
        trainer.train_step(step)
    after = weights(trainer)
    name = "depths.0.eh_proj.weight"
    assert after[name].dtype == torch.float32
    moved = (after[name] != before[name]).float().mean()
    moved_in_bf16 = (after[name].bfloat16() != before[name].bfloat16()).float().mean()
    assert moved > 0.9
    assert moved_in_bf16 < 0.1


def test_recomputed_activations_give_the_same_gradient(make_config: MakeConfig) -> None:
    plain = gradients(Trainer(make_config()))
    trainer = Trainer(make_config(gradient_checkpointing=True))
    calls: list[int] = []
    trainer.head.depths[0].block.register_forward_hook(lambda *_: calls.append(1))
    assert difference(gradients(trainer), plain) < SUM_ORDER
    assert len(calls) == 2 * 3  # each of three depths once forward and once again in the backward pass


def test_rows_longer_than_sparse_attention_is_dense_for_are_refused_before_the_first_step(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """511 tokens and two more positions for the deeper drafts are one more than `index_topk`."""
    case = get_case("glm_moe_dsa")
    base = prepare(case, case.variants[0], tmp_path / "base").checkpoint
    save_tokenizer(base, CHATML, vocab_size=case.variants[0].config["vocab_size"])
    with pytest.raises(ContextLimitError, match=r"at most 512 tokens .*got 513"):
        Trainer(make_config(model=str(base), data__max_length=511, objective__depths=3))
    Trainer(make_config(model=str(base), data__max_length=510, objective__depths=3))


def test_evaluation_is_an_average_over_tokens_and_leaves_training_alone(make_config: MakeConfig, texts: Path) -> None:
    curves: list[list[dict[str, float]]] = []
    for batch_size in (1, 8):
        trainer = Trainer(make_config(data__eval_path=str(texts), batch_size=batch_size))
        curves.append([trainer.evaluate()])
    for name, value in curves[0][0].items():
        assert value == pytest.approx(curves[1][0][name], rel=1e-5), name
    plain, evaluated = Trainer(make_config()), Trainer(make_config(data__eval_path=str(texts)))
    first = plain.train_step(1), plain.train_step(2)
    evaluated.evaluate()
    second = evaluated.train_step(1), evaluated.evaluate() and evaluated.train_step(2)
    assert first == second
    assert evaluated.head.training


def test_depths_that_are_not_trained_keep_their_weights(make_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config(depths=2)
    directory = write_checkpoint(tmp_path / "two", config, tiny_tensors(config, head_depths=2))
    save_tokenizer(directory, vocab_size=config["vocab_size"])
    run = make_config(model=str(directory), objective__depths=1)
    train(run)
    before, after = load_head(directory).weights(), load_head(run.out).weights()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.startswith("depths.0.")}


def test_a_gradient_that_is_not_finite_stops_the_run_before_it_is_used(make_config: MakeConfig) -> None:
    trainer = Trainer(make_config())
    name = "depths.0.eh_proj.weight"
    with torch.no_grad():
        trainer.head.weights()[name][0, 0] = float("nan")
    before = weights(trainer)
    with pytest.raises(ObjectiveError, match="step 1: expected a finite gradient, got norm nan"):
        trainer.train_step(1)
    assert torch.equal(weights(trainer)["depths.0.norm.weight"], before["depths.0.norm.weight"])


def test_a_head_may_start_from_random_weights_when_asked(make_config: MakeConfig) -> None:
    one, other, third = (Trainer(make_config(init="random", seed=seed)) for seed in (0, 0, 1))
    assert one.head.report.initialised
    name = "depths.0.eh_proj.weight"
    assert torch.equal(weights(one)[name], weights(other)[name])
    assert not torch.equal(weights(one)[name], weights(third)[name])


def test_chat_messages_are_trained_on_their_answers(make_config: MakeConfig, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "how are you"}, {"role": "assistant", "content": "fine thanks you"}]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n", encoding="utf-8")
    data = {"path": str(path), "messages_field": "messages", "max_length": 64}
    record = Trainer(make_config(data=data, batch_size=1)).train_step(1)
    assert [record[f"mtp/slots_{depth}"] for depth in (1, 2, 3)] == [4, 4, 4]  # three words and the end of turn


def test_a_launcher_that_shards_weights_is_refused(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)
    with pytest.raises(SettingsError, match="expected one process or data parallelism, got FSDP"):
        Trainer(make_config())


class Recorder(GeneralTracker):
    name = "recorder"
    requires_logging_directory = False

    def __init__(self) -> None:
        self.stored: dict[str, Any] = {}
        self.logged: list[tuple[int | None, dict[str, Any]]] = []
        super().__init__()

    @property
    def tracker(self) -> Recorder:
        return self

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.stored = values

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.logged.append((step, values))


def test_trackers_get_the_settings_and_every_step(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(trainer_module, "require_trackers", lambda _: None)
    monkeypatch.setattr(trainer_module, "make_accelerator", lambda _: Accelerator(log_with=[recorder]))
    train(make_config(trackers=["wandb"]))
    assert recorder.stored["optimizer.lr"] == "0.001"
    assert [step for step, _ in recorder.logged] == [1, 2, 3, 4]
    assert all({"loss", "mtp/acc_1", "tokens_per_second"} <= values.keys() for _, values in recorder.logged)


def _train_as_rank(config: str) -> None:
    os.environ["ACCELERATE_USE_CPU"] = "1"
    torch.set_num_threads(1)
    train(TrainConfig.from_yaml(config))


@pytest.mark.slow
def test_two_processes_follow_the_curve_of_one(make_config: MakeConfig, tmp_path: Path) -> None:
    """Counts were averaged within a rank only: https://github.com/huggingface/transformers/pull/34373"""
    one = make_config(batch_size=4, run_dir=str(tmp_path / "one"), out=str(tmp_path / "one_out"))
    train(one)
    two = make_config(batch_size=2)
    (tmp_path / "config.yaml").write_text(two.to_yaml(), encoding="utf-8")
    launch = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        max_restarts=0, start_method=METHOD,
    )  # fmt: skip
    forked()  # says what the server loads
    elastic_launch(launch, _train_as_rank)(str(tmp_path / "config.yaml"))
    curves = [
        [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        for config in (one, two)
    ]
    for left, right in zip(*curves, strict=True):
        assert left == pytest.approx(right, rel=SAME_CURVE)  # also the norm of the gradient, which AdamW does not see


def test_a_callers_accelerator_keeps_its_precision_and_accumulation(make_config: MakeConfig) -> None:
    theirs = Accelerator(cpu=True, gradient_accumulation_steps=3)
    before = (theirs.mixed_precision, theirs.gradient_accumulation_steps, theirs.state)
    with theirs.accumulate():
        train(make_config(precision="bf16"))
        assert not theirs.sync_gradients, "the first of three micro-batches"
    assert (theirs.mixed_precision, theirs.gradient_accumulation_steps, theirs.state) == before
    assert Accelerator(cpu=True, gradient_accumulation_steps=3).mixed_precision == "no"
