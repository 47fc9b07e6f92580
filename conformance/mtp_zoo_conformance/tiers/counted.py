"""Judgement of one run of an engine: what it generated and counted, beside what the library generates and counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtp_zoo.acceptance import AcceptanceReport
from mtp_zoo.spec import Engine
from mtp_zoo_conformance.case import ConformanceCase
from mtp_zoo_conformance.compare import FP32
from mtp_zoo_conformance.library import Library
from mtp_zoo_conformance.record import Cell, ServedHead, Verdict
from mtp_zoo_conformance.served import NEW_TOKENS, ORACLE, ServedCheckpoint
from mtp_zoo_conformance.tiers.module import loading_problems

STANDARD_ERRORS = 3.0
"""In BF16 the outputs of two sides part at near ties, and what follows is another text. So their accept lengths are two
estimates of one number, and may lie this many standard errors (over prompts) apart. For the same reason one BF16 engine
need not repeat itself: a verify pass rounds other sums than a step of one token does. Its outputs with drafts may part
from those without only where the library's two best logits lie within what BF16 errs."""

COUNTING_ERROR = "CountingError"
"""Class of the workers' errors (`job_server`) that say nothing of the checkpoint: the engine ran, it was not followed."""


@dataclass(frozen=True)
class Run:
    """One run of an engine.

    Attributes:
        case, engine, checkpoint: what ran.
        k: drafts a step.
        record: what the worker wrote; None if it wrote nothing.
        plain: the engine's outputs without drafts with the same target; None if it gave none.
    """

    case: ConformanceCase
    engine: Engine
    checkpoint: ServedCheckpoint
    k: int
    record: Mapping[str, Any] | None
    plain: list[list[int]] | None

    @property
    def finished(self) -> bool:
        """Whether there is something to judge."""
        return self.record is not None and self.record["status"] == "ok"

    @property
    def exact(self) -> bool:
        """Whether engine and library compute in the same precision, so that counts must be equal."""
        return self.checkpoint.dtypes[self.engine] == "float32"

    @property
    def outputs(self) -> list[list[int]]:
        """Generated tokens."""
        assert self.record is not None
        return self.record["outputs"]

    def cell(
        self,
        stage: str,
        verdict: Verdict,
        reason: str = "",
        *,
        max_abs_diff: float | None = None,
        tolerance: float | None = None,
    ) -> Cell:
        """A cell of this run."""
        return Cell(
            family=self.case.family,
            variant=f"{self.checkpoint.head}, k={self.k}",
            engine=self.engine,
            engine_version=str((self.record or {}).get("version", "")),
            tier="serve",
            stage=stage,
            max_abs_diff=max_abs_diff,
            tolerance=tolerance,
            verdict=verdict,
            reason=reason,
        )


@dataclass(frozen=True)
class FirstDifference:
    """Where two sides part in one prompt.

    Attributes:
        words: where, and what each side has.
        margin: by how much the library's choice there leads its second best; None where it can't be told.
        error: how far a logit may be off.
    """

    words: str
    margin: float | None = None
    error: float = 0.0

    @property
    def is_tie(self) -> bool:
        """Whether errors of both logits can turn the choice."""
        return self.margin is not None and self.margin <= 2 * self.error

    def __str__(self) -> str:
        if self.margin is None:
            return self.words
        return f"{self.words}; there the library's best logit leads by {self.margin:.1e}, and each may err by {self.error:.1e}"


def judge_run(run: Run, library: Library | None) -> tuple[list[Cell], ServedHead | None]:
    """Cells of a run and, with drafts, its counters. `library` may be None where the run did not finish."""
    if not run.finished or library is None:
        return [_not_finished(run)], None
    assert run.record is not None
    cells = [_loads(run), _greedy(run, library)]
    if run.k == 0:
        return cells, None
    report = library.report(run.engine, run.k)
    if run.checkpoint.head == ORACLE:
        cells.append(_oracle(run))
    cells.append(_exact_counters(run, library, report) if run.exact else _estimated_counters(run, report))
    return cells, _row(run, report)


def _not_finished(run: Run) -> Cell:
    """A checkpoint that was refused is a finding; an engine that broke down or was too slow is none."""
    if run.record is None:
        return run.cell("loads", "not_judged", "the worker left no record")
    refused = run.record["status"] == "error" and not run.record["error"].startswith(COUNTING_ERROR)
    reason = f"{run.record['error']}; log: {run.record['log']}"
    return run.cell("loads", "differs" if refused else "not_judged", reason)


def _loads(run: Run) -> Cell:
    assert run.record is not None
    view = run.case.engines[run.engine]
    record = run.record if run.k else {**run.record, "draft_class": view.draft_class}  # there is no draft module
    wrong = loading_problems(record, view)
    return run.cell("loads", "differs" if wrong else "pass", wrong)


def _greedy(run: Run, library: Library) -> Cell:
    """Against the engine's own plain outputs; in FP32 also against the library's choices."""
    if run.k and run.plain is None:
        return run.cell("greedy", "not_judged", "the engine gave no outputs without drafts to compare with")
    found: list[FirstDifference] = []
    for number, output in enumerate(run.outputs):
        if len(output) != NEW_TOKENS:
            found.append(FirstDifference(f"prompt {number}: {len(output)} tokens for {NEW_TOKENS}"))
            continue
        choices, margins = library.choices(number, output)
        sides = {"plain decoding": run.plain[number]} if run.k and run.plain else {}
        if run.exact:
            sides["the library"] = choices
        for who, other in sides.items():
            place = _first_difference(output, other)
            if place is not None:
                words = f"prompt {number}, token {place}: {output[place]}, {who} has {other[place]}"
                error = FP32[run.engine].absolute if run.exact else library.bf16_error(number, output)
                found.append(FirstDifference(words, margins[place], error))
    return _cell_of(run, "greedy", found)


def _cell_of(run: Run, stage: str, found: Sequence[FirstDifference], *, max_abs_diff: float | None = None) -> Cell:
    """A pass without differences. Where all are ties, no side is wrong: in BF16 that is all that can be asked for; in FP32
    equality was asked for and can't be judged."""
    words = "; ".join(map(str, found[:3])) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
    verdict: Verdict = "differs" if found else "pass"
    if found and all(difference.is_tie for difference in found):
        verdict, words = "not_judged" if run.exact else "pass", f"numeric tie: {words}"
    tolerance = 0.0 if max_abs_diff is not None else None
    return run.cell(stage, verdict, words, max_abs_diff=max_abs_diff, tolerance=tolerance)


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """First place where two sequences differ; where one ends within the other, its end."""
    place = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return None if place == len(one) == len(other) else place


def _oracle(run: Run) -> Cell:
    assert run.record is not None
    counters = run.record["counters"]
    missed = counters["drafted"] - counters["accepted"]
    reason = f"accepted {counters['accepted']} of {counters['drafted']} drafts" if missed else ""
    whole = counters["drafted"] > 0 and not missed
    return run.cell("oracle", "pass" if whole else "differs", reason, max_abs_diff=float(missed), tolerance=0.0)


def _exact_counters(run: Run, library: Library, report: AcceptanceReport) -> Cell:
    """Sums against sums, and step against step."""
    assert run.record is not None
    pairs = _pairs(run, report)
    largest = float(max(abs(engine - ours) for engine, ours in pairs.values()))
    found = [
        difference
        for number in range(len(run.checkpoint.prompts))
        if (difference := _first_step(run, library, report, number)) is not None
    ]
    if largest and not found:
        words = ", ".join(
            f"{name} {engine}, the library {ours}" for name, (engine, ours) in pairs.items() if engine != ours
        )
        found = [FirstDifference(f"the sums differ, no step does: {words}")]
    if not found and not _informative(run, report):
        accepted = [int(depth["accepted"]) for depth in report.per_depth]
        reason = f"equal, but tells little: the library accepts {accepted} drafts in {report.verify_steps} steps"
        return run.cell("counters", "not_judged", reason, max_abs_diff=largest, tolerance=0.0)
    return _cell_of(run, "counters", found, max_abs_diff=largest)


def _pairs(run: Run, report: AcceptanceReport) -> dict[str, tuple[int, int]]:
    """(engine, library) of every counter."""
    assert run.record is not None
    counters = run.record["counters"]
    pairs = {name: (counters[name], getattr(report, name)) for name in ("verify_steps", "drafted", "accepted")}
    return pairs | {
        f"accepted at depth {depth['depth']:.0f}": (counters["accepted_per_depth"][number], int(depth["accepted"]))
        for number, depth in enumerate(report.per_depth)
    }


def _informative(run: Run, report: AcceptanceReport) -> bool:
    """Whether some drafts of every depth are right and some wrong; of an oracle's, none is wrong."""
    if run.checkpoint.head == ORACLE:
        return True
    return all(0 < depth["accepted"] < depth["drafted"] for depth in report.per_depth)


def _first_step(run: Run, library: Library, report: AcceptanceReport, number: int) -> FirstDifference | None:
    """The first verify step of a prompt in which another number of drafts was accepted."""
    assert run.record is not None
    theirs, ours = run.record["accepted"][number], report.prompts[number].accepted
    step = _first_difference(theirs, ours)
    if step is None:
        return None
    if step == min(len(theirs), len(ours)):
        return FirstDifference(f"prompt {number}: {len(theirs)} verify steps, the library {len(ours)}")
    depth = min(theirs[step], ours[step]) + 1
    known = 1 + sum(ours[:step]) + step + depth - 1
    output = report.prompts[number].output
    margin = library.draft_margin(run.engine, number, output[:known], depth) if known <= len(output) else None
    words = f"prompt {number}, step {step}: accepted {theirs[step]} of {run.k} drafts, the library {ours[step]}"
    return FirstDifference(words, margin, FP32[run.engine].absolute)


def _estimated_counters(run: Run, report: AcceptanceReport) -> Cell:
    tolerance = STANDARD_ERRORS * (report.standard_error or 0.0)
    apart = abs(_accept_length(run) - report.accept_length)
    assert run.record is not None
    ours = [list(prompt.accepted) for prompt in report.prompts]
    equal = sum(one == other for one, other in zip(run.record["accepted"], ours, strict=True))
    reason = (
        f"{run.checkpoint.dtypes[run.engine]}: accept length {_accept_length(run):.3f}, the library's "
        f"{report.accept_length:.3f}; equal in every step of {equal} of {len(ours)} prompts"
    )
    verdict: Verdict = "pass" if apart <= tolerance else "differs"
    return run.cell("counters", verdict, reason, max_abs_diff=apart, tolerance=tolerance)


def _accept_length(run: Run) -> float:
    """Tokens a verify step."""
    assert run.record is not None
    counters = run.record["counters"]
    return (counters["accepted"] + counters["verify_steps"]) / max(counters["verify_steps"], 1)


def _row(run: Run, report: AcceptanceReport) -> ServedHead:
    assert run.record is not None
    counters = run.record["counters"]
    return ServedHead(
        family=run.case.family,
        head=run.checkpoint.head,
        engine=run.engine,
        engine_version=run.record["version"],
        dtype=run.checkpoint.dtypes[run.engine],
        k=run.k,
        accepted=tuple(counters["accepted_per_depth"]),
        verify_steps=counters["verify_steps"],
        accept_length=_accept_length(run),
        library_accepted=tuple(int(depth["accepted"]) for depth in report.per_depth),
        library_verify_steps=report.verify_steps,
        library_accept_length=report.accept_length,
    )
