"""Cells and flips from two sets of outputs; the tiers forward and module differ only in where the other side came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from mtp_zoo.errors import MTPZooError
from mtp_zoo.spec import Engine
from mtp_zoo_conformance import compare, ours
from mtp_zoo_conformance.case import TAP
from mtp_zoo_conformance.flips import CONVENTIONS, TAP_FLIP, Flip
from mtp_zoo_conformance.prepared import Prepared
from mtp_zoo_conformance.record import Cell, FlipResult, Tier, Verdict

OURS = "ours"
"""Stage of a cell that says why our side gave nothing."""


@dataclass(frozen=True)
class Judge:
    """Who judges.

    Attributes:
        name: `vllm`, `sglang`, `reference` or `transformers`.
        version: its version.
        tier: the tier.
        engine: whose conventions our head follows; None is the training default.
    """

    name: str
    version: str
    tier: Tier
    engine: Engine | None = None

    def cell(
        self,
        prepared: Prepared,
        stage: str,
        verdict: Verdict,
        reason: str = "",
        *,
        difference: compare.Difference | None = None,
        expected: bool = False,
    ) -> Cell:
        """A cell of this judge's column."""
        return Cell(
            family=prepared.case.family,
            variant=prepared.variant.name,
            engine=self.name,
            engine_version=self.version,
            tier=self.tier,
            stage=stage,
            max_abs_diff=difference.max_abs if difference and isfinite(difference.max_abs) else None,
            tolerance=difference.tolerance if difference else None,
            verdict=verdict,
            reason=reason,
            expected=expected,
        )


def our_outputs(
    prepared: Prepared, judge: Judge, theirs: Mapping[str, Tensor], *, dtype: torch.dtype, flip: Flip | None = None
) -> dict[str, Tensor]:
    """Our head on the variant's requests, reading the other side's drafts; with our target's states if the other side
    gives its own."""
    case = prepared.case
    head = ours.load(case, prepared.checkpoint, engine=judge.engine, dtype=dtype, flip=flip)
    out = ours.run(head, prepared.requests, theirs[compare.DRAFTS], case.stages)
    if TAP in theirs and flip in (None, TAP_FLIP):
        out[TAP] = ours.tap(head, prepared.checkpoint, prepared.requests, dtype)
    return out


def judged(prepared: Prepared, judge: Judge, theirs: Mapping[str, Tensor]) -> tuple[list[Cell], list[FlipResult]]:
    """All cells of one variant and judge; on the case's first variant, also the flips.

    A head that does not even load here differs too; it does not end the run.
    """
    try:
        cells = judge_outputs(prepared, judge, theirs)
    except MTPZooError as error:
        return [judge.cell(prepared, OURS, "differs", f"our side does not run: {error}")], []
    return cells, judge_flips(prepared, judge, theirs) if prepared.is_first else []


def judge_outputs(prepared: Prepared, judge: Judge, theirs: Mapping[str, Tensor]) -> list[Cell]:
    """One cell a stage, one for the greedy drafts."""
    mine = our_outputs(prepared, judge, theirs, dtype=prepared.dtype)
    bounds = _bounds(prepared, judge, mine, theirs)
    found = compare.differences(mine, theirs, prepared.requests, bounds)
    miss = compare.first_miss(found)
    cells: list[Cell] = []
    for difference in compare.worst(found):
        verdict: Verdict = "pass" if difference.within else "differs"
        reason = "" if difference.within else f"{difference}; first to differ: {miss}"
        cells.append(judge.cell(prepared, difference.stage, verdict, reason, difference=difference))
    wrong = compare.draft_mismatches(mine, theirs, prepared.requests, bounds["logits"])
    cells.append(judge.cell(prepared, compare.DRAFTS, "differs" if wrong else "pass", "; ".join(wrong)))
    return cells


def _bounds(
    prepared: Prepared, judge: Judge, mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]
) -> dict[str, float]:
    if prepared.dtype == torch.float32:
        return compare.fp32_tolerances(judge.name)
    exact = our_outputs(prepared, judge, theirs, dtype=torch.float32)
    return compare.bf16_tolerances(mine, exact, prepared.requests)


def judge_flips(prepared: Prepared, judge: Judge, theirs: Mapping[str, Tensor]) -> list[FlipResult]:
    """Whether each wrong convention is caught against the other side's outputs.

    A flip that only the target's state shows (the tap) is left out where the other side runs no target.
    """
    results: list[FlipResult] = []
    for flip in (*CONVENTIONS, *prepared.case.flips):
        if flip is TAP_FLIP and TAP not in theirs:
            continue
        mine = our_outputs(prepared, judge, theirs, dtype=torch.float32, flip=flip)
        found = compare.differences(mine, theirs, prepared.requests, compare.fp32_tolerances(judge.name))
        finite = [difference.max_abs for difference in found if isfinite(difference.max_abs)]
        results.append(
            FlipResult(
                prepared.case.family,
                judge.name,
                flip.name,
                compare.first_miss(found) is not None,
                max(finite, default=None),
            )
        )
    return results
