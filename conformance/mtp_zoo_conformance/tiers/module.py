"""Tier module: our head against an engine's own draft module, on the same checkpoint and inputs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from mtp_zoo.spec import Engine
from mtp_zoo_conformance.case import TAP, EngineView
from mtp_zoo_conformance.prepared import Prepared
from mtp_zoo_conformance.record import Cell, FlipResult
from mtp_zoo_conformance.tiers.judged import Judge, judged

ALL = "all"
LOADS = "loads"


def job(prepared: Prepared, engine: Engine, *, limit: float) -> dict[str, Any] | None:
    """What the engine's worker is to do for a variant, or None where the case says that it can't on a CPU."""
    variant, view = prepared.variant, prepared.case.engines[engine]
    if engine in variant.not_run:
        return None
    return {
        "id": job_id(prepared, engine),
        "kind": "module",
        "folder": str(prepared.folder / engine),
        "limit": limit,
        "checkpoint": str(prepared.checkpoint),
        "dtype": variant.dtype,
        "device": None,
        "drop": list(variant.drop.get(engine, ())),
        "twin": twin(view),
        "inputs": str(prepared.inputs),
        "steps": prepared.requests.steps,
        "run_target": engine not in variant.no_target,
        "stages": dict(view.stages),
    }


def twin(view: EngineView) -> dict[str, Any] | None:
    """The form in which an engine reads a checkpoint, for its worker; None for the checkpoint's own."""
    return dataclasses.asdict(view.twin) if view.twin else None


def job_id(prepared: Prepared, engine: Engine) -> str:
    """The name of a variant's job."""
    return f"module/{prepared.case.family}/{prepared.variant.name}/{engine}"


def judge(prepared: Prepared, engine: Engine, record: Mapping[str, Any] | None) -> tuple[list[Cell], list[FlipResult]]:
    """Cells of one variant and engine; flips on the case's first variant.

    Args:
        prepared: the variant.
        engine: the engine.
        record: what the worker wrote; None where no worker was there to run it.
    """
    variant, version = prepared.variant, str((record or {}).get("version", ""))
    who = Judge(engine, version, "module", engine)
    if engine in variant.not_run:
        return [who.cell(prepared, ALL, "not_judged", variant.not_run[engine], expected=True)], []
    if record is None:
        return [who.cell(prepared, ALL, "not_judged", no_environment(engine))], []
    if record["status"] != "ok":
        return [who.cell(prepared, ALL, "not_judged", f"{record['error']}; log: {record['log']}")], []
    theirs = load_file(Path(prepared.folder) / engine / "outputs.safetensors")
    wrong = loading_problems(record, prepared.case.engines[engine])
    cells, flips = judged(prepared, who, theirs)
    if engine in variant.no_target:
        cells.append(who.cell(prepared, TAP, "not_judged", variant.no_target[engine], expected=True))
    for part, why in prepared.case.engines[engine].unjudged.items():
        cells.append(who.cell(prepared, part, "not_judged", why, expected=True))
    return [who.cell(prepared, LOADS, "differs" if wrong else "pass", wrong), *cells], flips


def no_environment(engine: Engine) -> str:
    """Why nothing was judged where an engine has no environment."""
    return f"no environment: `mtp-zoo conform --install {engine}` makes one, --engine-python uses one of yours"


def loading_problems(record: Mapping[str, Any], view: EngineView) -> str:
    """What an engine's loader did wrong or left undone, or ''."""
    problems: list[str] = []
    if record["draft_class"] != view.draft_class:
        problems.append(f"expected the draft module {view.draft_class}, the engine built {record['draft_class']}")
    for whose in ("unfilled", "target_unfilled"):
        left = [
            name for name in record.get(whose, ()) if not any(re.fullmatch(known, name) for known in view.leftovers)
        ]
        if left:
            part = "draft" if whose == "unfilled" else "target"
            problems.append(f"parameters of the {part} that no tensor of the checkpoint filled: {left}")
    return "; ".join(problems)
