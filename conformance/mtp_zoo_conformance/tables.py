"""A run as tables and sentences: what the terminal, the documentation and the HTML page have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mtp_zoo_conformance.record import DIFFERS, PARITY, Cell, EngineRecord, FlipResult, Record

Row = tuple[str, ...]

SUMMARY = (
    "family",
    "variant",
    "tier",
    "judge",
    "stages",
    "nearest to its tolerance",
    "difference",
    "tolerance",
    "verdict",
)
SENSITIVITY = ("family", "judge", "flips caught", "hardest to see", "it moves", "not caught")
SERVED = (
    "family",
    "head",
    "engine",
    "dtype",
    "k",
    "accepted: engine",
    "accepted: library",
    "verify steps: engine",
    "verify steps: library",
    "accept length: engine",
    "accept length: library",
)
STAGED_TIERS = ("forward", "module")
"""Tiers that compare a head stage by stage."""

WORDS = {"pass": "pass", "differs": "DIFFERS", "not_judged": "not judged"}
ENDS = {PARITY: "Parity.", DIFFERS: "Judged, and something differs."}


@dataclass(frozen=True)
class Group:
    """The cells of one variant, tier and judge."""

    family: str
    variant: str
    tier: str
    judge: str
    cells: tuple[Cell, ...]

    @property
    def judged(self) -> list[Cell]:
        """Cells in which something was compared."""
        return [cell for cell in self.cells if cell.verdict != "not_judged"]

    @property
    def nearest(self) -> Cell | None:
        """The measured cell that lies nearest to its tolerance, or farthest beyond it."""
        return max((cell for cell in self.judged if cell.max_abs_diff is not None), key=share, default=None)

    @property
    def verdict(self) -> str:
        """One word for all cells, the worst one; a part that is not judged as declared is counted behind it."""
        if any(cell.verdict == "differs" for cell in self.cells):
            return WORDS["differs"]
        if not self.judged or any(cell.verdict == "not_judged" and not cell.expected for cell in self.cells):
            return WORDS["not_judged"]
        left = len(self.cells) - len(self.judged)
        return f"pass, {left} not judged" if left else "pass"

    def row(self) -> Row:
        """Cells of the table with the header `SUMMARY`."""
        passed = sum(cell.verdict == "pass" for cell in self.cells)
        nearest = self.nearest
        numbers = (nearest.stage, number(nearest.max_abs_diff), number(nearest.tolerance)) if nearest else ("", "", "")
        return (self.family, self.variant, self.tier, self.judge, f"{passed}/{len(self.cells)}", *numbers, self.verdict)


def share(cell: Cell) -> float:
    """Difference over tolerance; a difference of nothing is nothing, whatever the tolerance."""
    if not cell.max_abs_diff:
        return 0.0
    return cell.max_abs_diff / cell.tolerance if cell.tolerance else float("inf")


def number(value: float | None) -> str:
    """Two digits, or nothing."""
    return "" if value is None else "0" if value == 0 else f"{value:.1e}" if value < 0.1 else f"{value:.3g}"


def groups(cells: Iterable[Cell]) -> list[Group]:
    """Cells by family, variant, tier and judge, in order of appearance."""
    found: dict[tuple[str, str, str, str], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.family, cell.variant, cell.tier, judge(cell)), []).append(cell)
    return [Group(*key, tuple(members)) for key, members in found.items()]


def judge(cell: Cell) -> str:
    """Who judged, with its version; the library itself where a check needs nobody else."""
    return "mtp_zoo" if cell.engine == "none" else f"{cell.engine} {cell.engine_version}".strip()


def summary_rows(record: Record) -> list[Row]:
    """Rows of `SUMMARY`, by family and tier."""
    found = groups(record.cells)
    tiers = list(dict.fromkeys(group.tier for group in found))
    found.sort(key=lambda group: (group.family, tiers.index(group.tier)))
    return [group.row() for group in found]


def sensitivity_rows(record: Record) -> list[Row]:
    """Rows of `SENSITIVITY`: flips caught of flips made, the one that moves least, and those that went unseen."""
    found: dict[tuple[str, str], list[FlipResult]] = {}
    for flip in record.sensitivity:
        found.setdefault((flip.family, flip.engine), []).append(flip)
    return [(*key, *_flip_cells(flips)) for key, flips in found.items()]


def _flip_cells(flips: Sequence[FlipResult]) -> Row:
    least = min(flips, key=lambda flip: float("inf") if flip.max_abs_diff is None else flip.max_abs_diff)
    unseen = ", ".join(flip.flip for flip in flips if not flip.caught)
    return (f"{sum(flip.caught for flip in flips)}/{len(flips)}", least.flip, number(least.max_abs_diff), unseen)


def served_rows(record: Record) -> list[Row]:
    """Rows of `SERVED`."""
    return [
        (
            head.family,
            head.head,
            f"{head.engine} {head.engine_version}",
            head.dtype,
            str(head.k),
            " ".join(map(str, head.accepted)),
            " ".join(map(str, head.library_accepted)),
            str(head.verify_steps),
            str(head.library_verify_steps),
            f"{head.accept_length:.3f}",
            f"{head.library_accept_length:.3f}",
        )
        for head in record.served
    ]


def remarks(record: Record) -> list[tuple[str, str]]:
    """(place, what is to be said) of every cell that is not a plain pass, or that passes with a remark; what several cells
    have to say is said once."""
    found: dict[Row, list[Cell]] = {}
    for cell in record.cells:
        if cell.verdict != "pass" or cell.reason:
            found.setdefault((cell.family, cell.tier, judge(cell), WORDS[cell.verdict], cell.reason), []).append(cell)
    return [(", ".join(key[:3]), f"{_where(cells)}: {key[3]}: {key[4]}") for key, cells in found.items()]


def _where(cells: Sequence[Cell]) -> str:
    """Stages by variant, or variants alone where nothing was run."""
    variants, stages = (
        list(dict.fromkeys(names)) for names in zip(*((c.variant, c.stage) for c in cells), strict=True)
    )
    return ", ".join(variants) if stages == ["all"] else f"{', '.join(variants)} ({', '.join(stages)})"


def engine_facts(engine: EngineRecord) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(what, how it was, one entry a thing) of an engine's run. What was ours is always said, also where it was nothing."""
    yield "ran on", (f"{engine.device}, torch {engine.torch}",)
    yield "attention", (engine.backend,)
    yield "draft modules", (", ".join(engine.draft_classes),)
    yield "ours, not the engine's", engine.shims or ("nothing",)
    if engine.settings:
        yield "set for the run", engine.settings


def end(record: Record) -> str:
    """The verdict on the whole run, in a sentence."""
    if record.exit_code in ENDS:
        return ENDS[record.exit_code]
    judged = any(cell.verdict == "pass" for cell in record.cells)
    return "Something could not be judged." if judged else "Nothing was judged."


def versions(record: Record) -> str:
    """What our side was."""
    return ", ".join(f"{name} {version}" for name, version in record.versions.items())
