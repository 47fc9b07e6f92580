"""The trainer: a head on its frozen target, over accelerate.

    checks -> data, target, head -> run directory -> steps -> report -> servable checkpoint

Everything that can be refused is refused before anything is written. A run that was stopped, in whatever way, continues
from its newest training checkpoint with the same loss curve to the last bit, on the same machine with as many threads and
processes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from mtp_zoo.arguments import FLAG, checked, instance
from mtp_zoo.batch import PADDING, TokenBatch
from mtp_zoo.checkpoint import CheckpointIndex
from mtp_zoo.errors import ObjectiveError, SettingsError
from mtp_zoo.exporter import check_export, export
from mtp_zoo.head import DraftHead
from mtp_zoo.loader import load_head
from mtp_zoo.objective import MTPOutput, step_counts
from mtp_zoo.overlay import refuse_existing
from mtp_zoo.registry import resolve_family
from mtp_zoo.stats import MTPStats
from mtp_zoo.targets import target_states
from mtp_zoo.training.bar import TrainingBar
from mtp_zoo.training.batches import BatchPlan
from mtp_zoo.training.checkpoints import (
    clear_partial,
    complete_checkpoints,
    restore_checkpoint,
    rng_state,
    save_checkpoint,
)
from mtp_zoo.training.config import TrainConfig
from mtp_zoo.training.curves import EVAL, training_report
from mtp_zoo.training.data import load_rows
from mtp_zoo.training.failures import fail_together
from mtp_zoo.training.launch import make_accelerator, own_accelerate_state, require_trackers
from mtp_zoo.training.loss import make_objective
from mtp_zoo.training.optimizer import learning_rate, make_optimizer
from mtp_zoo.training.result import TrainResult
from mtp_zoo.training.rundir import RunDirectory, digest
from mtp_zoo.training.target import check_vocabulary, load_target, load_tokenizer
from mtp_zoo.unused_parameters import freeze_unused

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PROJECT = "mtp-zoo"


@checked("Training a head", error=SettingsError, config=instance("a TrainConfig", TrainConfig), resume=FLAG)
def train(config: TrainConfig, *, resume: bool = False) -> TrainResult:
    """Train the head of a checkpoint on its frozen target, and export it.

    Args:
        config: the run.
        resume: continue the run in `config.run_dir` from its newest training checkpoint, or from its start where it has
            none yet.

    Raises:
        OutputExistsError: `out` exists, or `run_dir` does and the run is not resumed.
        ResumeError: there is nothing to resume, the settings differ, or the training checkpoint is not whole.
        DataError, CheckpointError, HeadError: see `mtp_zoo.errors`; nothing was written.
    """
    with own_accelerate_state():
        return Trainer(config, resume=resume).fit()


class Trainer:
    """One run, loaded and checked; `fit` trains it. Make and use it inside `own_accelerate_state`.

    Args:
        config: the run.
        resume: see `train`.

    Attributes:
        accelerator: processes, devices, autocast, trackers.
        target: the frozen model.
        head: float32 master weights, with the target's embedding and lm_head attached.
        rows, eval_rows: training and held-out data.
        plan: which rows each step sees.
        steps: optimiser steps of the whole run.

    Raises:
        See `train`. Nothing is written here.
    """

    def __init__(self, config: TrainConfig, *, resume: bool = False) -> None:
        self.config = config
        self.resume = resume
        self.run = RunDirectory(config.run_dir)
        self._check_places()
        index = CheckpointIndex.open(config.model)
        check_export(index, config.out, resolve_family(index.names, index.config))
        self.accelerator = make_accelerator(config)
        with fail_together("Preparing a training"):
            self._prepare(index)

    def _prepare(self, index: CheckpointIndex) -> None:
        config = self.config
        processes, device = self.accelerator.num_processes, self.accelerator.device
        tokenizer = load_tokenizer(index.require_local("Training on"))
        self.rows, self.eval_rows = load_rows(config.data, tokenizer, seed=config.seed)
        self.plan = BatchPlan(len(self.rows), config.batch_size, config.grad_accumulation, processes, config.seed)
        self.steps = config.steps or self.plan.steps(config.epochs or 1.0)
        facts = {"the data's sha256": self.rows.fingerprint(), "processes": processes, "device": device.type}
        self.identity = {**config.curve_settings(), **facts}
        if self.resume:
            self.run.require(self.identity)
        self.target = load_target(index.root, dtype=DTYPES[config.precision], device=device)
        for rows in filter(None, (self.rows, self.eval_rows)):
            check_vocabulary(rows, self.target, tokenizer)
        self.head = self._load_head()
        self.objective = make_objective(self.head, config.objective)
        self.optimizer = make_optimizer(self.head, config.optimizer)
        self.module = self.accelerator.prepare(self.objective)

    def fit(self) -> TrainResult:
        """Train, write the report, export.

        Raises:
            ObjectiveError: the gradient is not finite.
            RankError: another rank failed.
            ResumeError, ExportError: see `mtp_zoo.errors`.
        """
        with fail_together("Training"):
            return self._fit()

    def _fit(self) -> TrainResult:
        done = self._begin()
        main = self.accelerator.is_main_process
        self.head.train()
        with TrainingBar(self.steps, done, self.config.objective.depths, shown=main) as bar:
            for step in range(done + 1, self.steps + 1):
                record = self.train_step(step)
                if self.eval_rows is not None and self._due(step, self.config.eval_every):
                    record |= self.evaluate()
                bar.step(record)
                self._log(record, bar)
                if self._due(step, self.config.save_every):
                    self._save(step)
        self.head.eval()
        return self._finish(bar)

    def train_step(self, step: int) -> dict[str, float]:
        """One optimiser step (the first is 1); returns its metrics.

        The gradient is that of one batch of all the step's rows: micro-batches are divided by the counts of the whole
        step and added up.
        """
        rate = learning_rate(step, self.steps, self.config.optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batches = [self._batch(rows) for rows in self.plan.micro_batches(step, self.accelerator.process_index)]
        counts = step_counts(batches, self.objective.depths)
        stats: MTPStats | None = None
        for number, tokens in enumerate(batches, start=1):
            with self._sync_gradients(number == len(batches)):
                out = self._loss(self.module, tokens, counts)
                self.accelerator.backward(out.loss * self._divided_by)
            stats = out.stats if stats is None else stats + out.stats
        norm = self._clip(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert stats is not None
        record = {"step": step, **self._metrics(stats), "lr": rate, "grad_norm": norm}
        return record | {"tokens": self._total_tokens(batches)}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Metrics of the held-out rows, every key behind `eval/`."""
        assert self.eval_rows is not None
        self.head.eval()
        rank, size = self.accelerator.process_index, self.config.batch_size
        numbers = range(rank, len(self.eval_rows), self.accelerator.num_processes)
        stats = MTPStats.none(self.objective.depths, self.accelerator.device)
        for start in range(0, len(numbers), size):
            tokens = self.eval_rows.batch(numbers[start : start + size]).to(self.accelerator.device)
            # the objective itself: its DDP wrapper talks to ranks that may have no rows left
            stats += self._loss(self.objective, tokens, None).stats
        self.head.train()
        return {f"{EVAL}{name}": value for name, value in self._metrics(stats).items()}

    def _check_places(self) -> None:
        """What can be refused before anything is read."""
        refuse_existing(self.config.out)
        if self.resume:
            self.run.require(self.config.curve_settings())
        else:
            self.run.refuse_existing()
        require_trackers(self.config.trackers)

    def _load_head(self) -> DraftHead:
        config = self.config
        head = load_head(
            config.model,
            target=self.target,
            dtype=torch.float32,
            device=self.accelerator.device,
            init=config.init,
            engine=config.engine,
            seed=config.seed,
            trainable=config.trainable,
        )
        head.check_context(config.data.max_length + config.objective.depths - 1)
        freeze_unused(head, config.objective.depths)
        if config.gradient_checkpointing:
            head.gradient_checkpointing_enable()
        return head

    def _begin(self) -> int:
        """Make or reopen the run directory; returns the number of steps that are done."""
        done = self._restore() if self.resume else 0
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            if self.resume:
                clear_partial(self.run.checkpoints)
                self.run.rewind(done)
            else:
                self.run.create(self.identity)
        self.accelerator.wait_for_everyone()
        if self.config.trackers:
            settings = {name: str(value) for name, value in self.config.flat().items()}
            self.accelerator.init_trackers(PROJECT, config=settings)
        return done

    def _restore(self) -> int:
        complete = complete_checkpoints(self.run.checkpoints)
        if not complete:
            return 0
        rank, run = self.accelerator.process_index, digest(self.identity)
        return restore_checkpoint(complete[-1], self.head, self.optimizer, rank=rank, run=run)

    def _batch(self, rows: Sequence[int]) -> TokenBatch:
        return self.rows.batch(rows).to(self.accelerator.device)

    def _loss(self, module: Any, tokens: TokenBatch, counts: torch.Tensor | None) -> MTPOutput:
        return module(tokens, target_states(self.target, tokens, self.head.spec), counts)

    def _sync_gradients(self, last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if last else self.accelerator.no_sync(self.module)

    @property
    def _divided_by(self) -> int:
        """What the gradient is divided by on its way: processes are averaged, and a launcher may set an accumulation."""
        return self.accelerator.num_processes * self.accelerator.gradient_accumulation_steps

    def _clip(self, step: int) -> float:
        limit = self.config.optimizer.max_grad_norm or math.inf
        norm: Any = self.accelerator.clip_grad_norm_(list(self.head.trainable_parameters()), limit)
        norm = float(norm)
        if not math.isfinite(norm):
            raise ObjectiveError(
                f"Training step {step}: expected a finite gradient, got norm {norm}.",
                remedy="Lower optimizer.lr or raise optimizer.warmup_steps; the newest training checkpoint is untouched.",
            )
        return norm

    def _metrics(self, stats: MTPStats) -> dict[str, float]:
        metrics = stats.all_reduce().metrics()
        weights = enumerate(self.objective.weights, start=1)
        return {"loss": sum(weight * metrics[f"mtp/loss_{depth}"] for depth, weight in weights), **metrics}

    def _total_tokens(self, batches: Sequence[TokenBatch]) -> int:
        real = sum(int((tokens.host.doc_ids != PADDING).sum()) for tokens in batches)
        total: Any = self.accelerator.reduce(torch.tensor(real, device=self.accelerator.device), reduction="sum")
        return int(total)

    def _due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self.steps

    def _log(self, record: dict[str, float], bar: TrainingBar) -> None:
        if self.accelerator.is_main_process:
            self.run.append(record)
        if self.config.trackers:
            self.accelerator.log({**record, "tokens_per_second": bar.tokens_per_second}, step=int(record["step"]))

    def _save(self, step: int) -> None:
        states = gather_object([rng_state()])
        if self.accelerator.is_main_process:
            save_checkpoint(
                self.run.checkpoints,
                step,
                self.head,
                self.optimizer,
                rng=states,
                run=digest(self.identity),
                keep=self.config.keep_checkpoints,
                base=str(Path(self.config.model).resolve()) if Path(self.config.model).is_dir() else self.config.model,
            )
        self.accelerator.wait_for_everyone()

    def _finish(self, bar: TrainingBar) -> TrainResult:
        records = self.run.records()
        if self.accelerator.is_main_process:
            facts = {"rows": len(self.rows), "tokens per second": f"{bar.tokens_per_second:,.0f}"}
            training_report(records, self.config, self.run.report, facts=facts)
            export(self.head, base=self.config.model, out=self.config.out, training=self._summary(records))
        self.accelerator.wait_for_everyone()
        if self.config.trackers:
            self.accelerator.end_training()
        return TrainResult(
            out=self.config.out,
            run_dir=self.run.path,
            report=self.run.report,
            steps=self.steps,
            seconds=bar.seconds,
            tokens_per_second=bar.tokens_per_second,
            metrics=records[-1],
        )

    def _summary(self, records: Sequence[dict[str, float]]) -> dict[str, Any]:
        """What the exported checkpoint says of its training."""
        return {
            "settings": self.config.flat(),
            "data": {"sha256": self.rows.fingerprint(), **asdict(self.rows.counts)},
            "steps": self.steps,
            "tokens": sum(int(record["tokens"]) for record in records),
            "last_step": records[-1],
        }
