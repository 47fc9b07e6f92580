"""Tier serve: engines generate with what `mtp_zoo` exported, and count drafts as the library counts them.

Stages of a run:
    loads     the engine took the checkpoint, built the expected module and filled all of it
    greedy    the tokens are those of plain greedy decoding: the engine's own and the library's
    oracle    every draft was accepted
    counters  accepted drafts of every depth, verify steps, and the accepted drafts of each step are the library's
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from mtp_zoo.spec import Engine
from mtp_zoo_conformance.case import ConformanceCase
from mtp_zoo_conformance.library import Library
from mtp_zoo_conformance.record import Cell, ServedHead
from mtp_zoo_conformance.served import NEW_TOKENS, ServedCheckpoint, build
from mtp_zoo_conformance.tiers.counted import Run, judge_run
from mtp_zoo_conformance.tiers.module import ALL, no_environment, twin

SKIPPED: Mapping[Engine, tuple[int, ...]] = {"vllm": (), "sglang": (2,)}
"""Draft counts that an engine is not asked for: SGLang starts slowly, and what two drafts show, one and three show."""


class Serving:
    """The checkpoints of one case, on disk.

    Args:
        case: the case.
        folder: where everything of this tier lies.
    """

    def __init__(self, case: ConformanceCase, folder: Path) -> None:
        self.case, self.folder = case, folder
        self._libraries: dict[str, Library] = {}

    @cached_property
    def checkpoints(self) -> tuple[ServedCheckpoint, ...]:
        """Built when they are first asked for."""
        return build(self.case, self.folder / "checkpoints")

    def library(self, checkpoint: ServedCheckpoint) -> Library:
        """The library's side of a checkpoint."""
        if checkpoint.head not in self._libraries:
            self._libraries[checkpoint.head] = Library(checkpoint, self.case.family)
        return self._libraries[checkpoint.head]


def runs(serving: Serving, engine: Engine) -> Iterator[tuple[ServedCheckpoint, int]]:
    """(checkpoint, drafts a step) of every run of an engine; without drafts once for each target, first."""
    for checkpoint in serving.checkpoints:
        if engine not in checkpoint.not_run:
            drafts = [k for k in checkpoint.drafts if k not in SKIPPED[engine]]
            yield from ((checkpoint, k) for k in ([0] if checkpoint.has_own_target else []) + drafts)


def jobs(serving: Serving, engine: Engine, *, limit: float) -> list[dict[str, Any]]:
    """What the engine's worker is to do.

    Args:
        serving: the case's checkpoints.
        engine: the engine.
        limit: seconds for one run.
    """
    return [
        {
            "id": job_id(serving, engine, checkpoint, k),
            "kind": "generate",
            "folder": str(serving.folder / engine / f"{checkpoint.head}-{k}"),
            "limit": limit,
            "checkpoint": str(checkpoint.path),
            "dtype": checkpoint.dtypes[engine],
            "device": None,
            "drop": list(serving.case.variants[0].drop.get(engine, ())),
            "twin": twin(serving.case.engines[engine]),
            "prompts": [list(prompt) for prompt in checkpoint.prompts],
            "k": k,
            "max_new_tokens": NEW_TOKENS,
        }
        for checkpoint, k in runs(serving, engine)
    ]


def job_id(serving: Serving, engine: Engine, checkpoint: ServedCheckpoint, k: int) -> str:
    """The name of a run's job."""
    return f"serve/{serving.case.family}/{checkpoint.head}/{k}/{engine}"


def judge(
    serving: Serving, engine: Engine, records: Mapping[str, Mapping[str, Any]] | None
) -> tuple[list[Cell], list[ServedHead]]:
    """Cells of every run of an engine, and the counters of every run with drafts.

    Args:
        serving: the case's checkpoints.
        engine: the engine.
        records: job id -> what the worker wrote; None where no worker was there to run anything.
    """
    if records is None:
        return [_not_judged(serving, engine, ALL, no_environment(engine), expected=False)], []
    cells = [
        _not_judged(serving, engine, checkpoint.head, checkpoint.not_run[engine], expected=True)
        for checkpoint in serving.checkpoints
        if engine in checkpoint.not_run
    ]
    unjudged = serving.case.engines[engine].unjudged
    cells += [_not_judged(serving, engine, ALL, why, stage=part, expected=True) for part, why in unjudged.items()]
    rows: list[ServedHead] = []
    plain: dict[str, list[list[int]]] = {}
    for checkpoint, k in runs(serving, engine):
        record = records.get(job_id(serving, engine, checkpoint, k))
        run = Run(serving.case, engine, checkpoint, k, record, plain.get(checkpoint.plain))
        if k == 0 and run.finished:
            plain[checkpoint.head] = run.outputs
        found, row = judge_run(run, serving.library(checkpoint) if run.finished else None)
        cells += found
        rows += [row] if row else []
    return cells, rows


def _not_judged(
    serving: Serving, engine: Engine, variant: str, reason: str, *, expected: bool, stage: str = ALL
) -> Cell:
    return Cell(
        family=serving.case.family,
        variant=variant,
        engine=engine,
        engine_version="",
        tier="serve",
        stage=stage,
        verdict="not_judged",
        reason=reason,
        expected=expected,
    )
