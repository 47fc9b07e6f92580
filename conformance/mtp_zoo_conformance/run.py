"""The runner: make the checkpoints, let every judge run, compare, and give one record."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers

from mtp_zoo.progress import progress
from mtp_zoo.spec import Engine
from mtp_zoo.version import __version__
from mtp_zoo_conformance.case import ConformanceCase
from mtp_zoo_conformance.cases import get_case, list_cases
from mtp_zoo_conformance.engines.client import EnginePython, run_jobs
from mtp_zoo_conformance.prepared import Prepared, prepare
from mtp_zoo_conformance.record import EngineRecord, Record, Tier
from mtp_zoo_conformance.tiers import forward, keys, module, serve

Job: TypeAlias = dict[str, Any]
"""What a worker is to do."""

Records: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Job id -> what a worker wrote."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What to judge.

    Attributes:
        families: names of families; None takes every registered case.
        engines: the engines that judge the tiers module and serve.
        tiers: the tiers.
    """

    families: tuple[str, ...] | None
    engines: tuple[Engine, ...]
    tiers: tuple[Tier, ...]

    @property
    def cases(self) -> tuple[ConformanceCase, ...]:
        """The cases.

        Raises:
            ConformanceError: a family without a case.
        """
        return list_cases() if self.families is None else tuple(map(get_case, self.families))


def run(selection: Selection, pythons: Mapping[Engine, EnginePython], folder: Path, *, limit: float) -> Record:
    """Judge what was selected.

    Args:
        selection: families, engines, tiers.
        pythons: the interpreter of each engine that is there; others give cells that say `not_judged`.
        folder: where checkpoints, outputs and logs go.
        limit: seconds that one engine job may take.

    Raises:
        ConformanceError: a selected family has no case.
    """
    began = time.monotonic()
    plan = _Plan(selection, folder, limit)
    record = Record(versions=versions())
    jobs: dict[Engine, list[Job]] = {e: plan.jobs(e) for e in selection.engines if e in pythons}
    with progress("Judging", total=sum(map(len, jobs.values())) + len(plan.prepared)) as advance:
        # One worker an engine, side by side: each is one thread wide.
        with ThreadPoolExecutor(max_workers=max(len(jobs), 1)) as pool:
            running = {
                engine: pool.submit(run_jobs, pythons[engine], batch, folder / engine, advance=advance)
                for engine, batch in jobs.items()
                if batch
            }
            for prepared in plan.prepared:
                _judge_here(prepared, selection, record)
                advance()
            for case in plan.cases if "keys" in selection.tiers else ():
                record.cells += keys.judge_inventories(case)
        records = {engine: future.result() for engine, future in running.items()}
    for engine in selection.engines:
        _judge_engine(engine, plan, records.get(engine), record)
    record.seconds = time.monotonic() - began
    return record


class _Plan:
    """Checkpoints and jobs of a run."""

    def __init__(self, selection: Selection, folder: Path, limit: float) -> None:
        self.selection, self.limit = selection, limit
        self.cases = selection.cases
        self.prepared = [prepare(case, variant, folder) for case in self.cases for variant in case.variants]
        wanted = self.cases if "serve" in selection.tiers else ()
        self.servings = [serve.Serving(case, folder / case.family / "served") for case in wanted]

    def judged_by(self, engine: Engine) -> list[Prepared]:
        """Variants for the module tier."""
        wanted = self.prepared if "module" in self.selection.tiers else []
        return [prepared for prepared in wanted if engine in prepared.case.engines]

    def served_by(self, engine: Engine) -> list[serve.Serving]:
        """Checkpoints for the serve tier."""
        return [serving for serving in self.servings if engine in serving.case.engines]

    def jobs(self, engine: Engine) -> list[Job]:
        """Everything that the engine's worker is to do."""
        modules = [module.job(prepared, engine, limit=self.limit) for prepared in self.judged_by(engine)]
        served = [job for serving in self.served_by(engine) for job in serve.jobs(serving, engine, limit=self.limit)]
        return [job for job in modules if job is not None] + served


def _judge_here(prepared: Prepared, selection: Selection, record: Record) -> None:
    if "keys" in selection.tiers:
        record.cells += keys.judge(prepared)
    if "forward" in selection.tiers:
        cells, flips = forward.judge(prepared)
        record.cells += cells
        record.sensitivity += flips


def _judge_engine(engine: Engine, plan: _Plan, records: Records | None, record: Record) -> None:
    """Judge what an engine gave; `records` is None where it has no interpreter."""
    for prepared in plan.judged_by(engine):
        cells, flips = module.judge(prepared, engine, (records or {}).get(module.job_id(prepared, engine)))
        record.cells += cells
        record.sensitivity += flips
    for serving in plan.served_by(engine):
        cells, heads = serve.judge(serving, engine, records)
        record.cells += cells
        record.served += heads
    done = [found for found in (records or {}).values() if found.get("version")]
    if done:
        record.engines.append(_engine_record(engine, done))


def _engine_record(engine: Engine, done: Sequence[Mapping[str, Any]]) -> EngineRecord:
    first = done[0]
    return EngineRecord(
        engine=engine,
        version=first["version"],
        torch=first["torch"],
        device=first["device"],
        backend=", ".join(dict.fromkeys(name for names in _each(done, "backend") for name in names.split(", "))),
        draft_classes=_each(done, "draft_class"),
        shims=_each(done, "shims"),
        settings=_each(done, "settings"),
    )


def _each(records: Iterable[Mapping[str, Any]], name: str) -> tuple[str, ...]:
    """Every value under a name, once, in order of appearance; records hold one value or a list."""
    values = [record.get(name) or [] for record in records]
    return tuple(dict.fromkeys(item for value in values for item in ([value] if isinstance(value, str) else value)))


def versions() -> dict[str, str]:
    """Versions of our side."""
    return {"mtp_zoo": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
