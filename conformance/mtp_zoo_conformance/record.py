"""What a run of the conformance tiers found: cells, flips, counters of served heads, and the exit code they add up to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter

Verdict = Literal["pass", "differs", "not_judged"]
Tier = Literal["keys", "forward", "module", "serve"]
TIERS: tuple[Tier, ...] = ("keys", "forward", "module", "serve")

PARITY, DIFFERS, NOT_JUDGED = 0, 1, 3
"""Exit codes of `mtp-zoo conform`."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One comparison.

    Attributes:
        family, variant: what was judged.
        engine: `vllm`, `sglang`, `reference` (plain torch), `transformers`, or `none` (tier keys).
        engine_version: version of the judge, empty where it never started.
        tier: which tier.
        stage: which stage of the head, or which check.
        max_abs_diff: largest difference, in the stage's unit; None where nothing was compared, or where one side is not
            finite (then `differs`, and the reason says so).
        tolerance: the bound; None for checks that hold or do not.
        verdict: `pass`, `differs`, or `not_judged`.
        reason: why, where it is not a plain pass.
        expected: a `not_judged` that the case declares beforehand (a part that needs a GPU): no change of the exit code.
    """

    family: str
    variant: str
    engine: str
    engine_version: str
    tier: Tier
    stage: str
    max_abs_diff: float | None = None
    tolerance: float | None = None
    verdict: Verdict
    reason: str = ""
    expected: bool = False


@dataclass(frozen=True)
class FlipResult:
    """Whether a wrong convention was caught, and the largest difference that it made (None where none was finite)."""

    family: str
    engine: str
    flip: str
    caught: bool
    max_abs_diff: float | None


@dataclass(frozen=True, kw_only=True)
class ServedHead:
    """One head served by one engine with k drafts a step, beside what the library counts on the same prompts.

    Attributes:
        accepted: accepted drafts of depth 1..k, counted by the engine.
        verify_steps: verify steps counted by the engine.
        library_accepted, library_verify_steps: the same, counted by `mtp_zoo.acceptance`.
        accept_length, library_accept_length: tokens a verify step.
    """

    family: str
    head: str
    engine: str
    engine_version: str
    dtype: str
    k: int
    accepted: tuple[int, ...]
    verify_steps: int
    accept_length: float
    library_accepted: tuple[int, ...]
    library_verify_steps: int
    library_accept_length: float


@dataclass(frozen=True)
class EngineRecord:
    """How an engine ran: for the table's caption.

    Attributes:
        engine, version, torch, device, backend: what ran.
        draft_classes: class names of the draft modules that were judged.
        shims: what was ours and not the engine's, in words; empty where nothing was.
        settings: what was set for the run, in words.
    """

    engine: str
    version: str
    torch: str
    device: str
    backend: str
    draft_classes: tuple[str, ...]
    shims: tuple[str, ...]
    settings: tuple[str, ...]


@dataclass
class Record:
    """A whole run."""

    cells: list[Cell] = field(default_factory=list)
    sensitivity: list[FlipResult] = field(default_factory=list)
    served: list[ServedHead] = field(default_factory=list)
    engines: list[EngineRecord] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """0 parity, 1 judged and differs (also a flip that went unseen), 3 something could not be judged.

        A run without a single judged cell is not parity.
        """
        if any(cell.verdict == "differs" for cell in self.cells) or any(not flip.caught for flip in self.sensitivity):
            return DIFFERS
        unjudged = any(cell.verdict == "not_judged" and not cell.expected for cell in self.cells)
        return NOT_JUDGED if unjudged or not any(cell.verdict == "pass" for cell in self.cells) else PARITY

    def as_dict(self) -> dict[str, Any]:
        """The run for `--json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Record:
        """The run that `as_dict` described."""
        return TypeAdapter(cls).validate_python(data)
