"""A run for people: as text for a terminal, as Markdown for the documentation, as files in a directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from mtp_zoo.tables import render_table
from mtp_zoo.training.files import write_atomic
from mtp_zoo_conformance import tables
from mtp_zoo_conformance.record import Cell, EngineRecord, Record
from mtp_zoo_conformance.tables import Row

JSON, PAGE = "conformance.json", "index.html"


def text(record: Record) -> str:
    """Tables for a terminal: verdicts, flips, counters, what is not a plain pass and why, and what was ours."""
    return "\n\n".join(_blocks(record))


def _blocks(record: Record) -> Iterator[str]:
    yield render_table("Conformance", tables.SUMMARY, tables.summary_rows(record), right=(4, 6, 7))
    if record.sensitivity:
        yield render_table("Wrong conventions, made on purpose", tables.SENSITIVITY, tables.sensitivity_rows(record))
    if record.served:
        yield render_table("Drafts, counted by engine and library", tables.SERVED, tables.served_rows(record))
    remarks = [f"  {place}: {remark}" for place, remark in tables.remarks(record)]
    if remarks:
        yield "\n".join(["Not a plain pass:", *remarks])
    for engine in record.engines:
        yield "\n".join([f"{engine.engine} {engine.version}", *_facts(engine, indent="  ", mark="")])
    yield f"{tables.end(record)} {record.seconds:.0f} s; {tables.versions(record)}"


def _facts(engine: EngineRecord, *, indent: str, mark: str) -> Iterator[str]:
    """What is known of an engine's run, a line a fact, and a line a thing where there are several."""
    for what, things in tables.engine_facts(engine):
        if len(things) == 1:
            yield f"{indent}{mark}{what}: {things[0]}"
        else:
            yield f"{indent}{mark}{what}:"
            yield from (f"{indent}    {mark}{thing}" for thing in things)


def write(record: Record, folder: Path) -> None:
    """Write `conformance.json` and `index.html` into a directory, which is made if need be.

    Raises:
        OSError: they can't be written.
    """
    from mtp_zoo_conformance.page import page

    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / JSON, json.dumps(record.as_dict(), indent=1) + "\n")
    page(record).write(folder / PAGE)


def markdown(record: Record) -> str:
    """The generated part of docs/conformance.md."""
    return "\n".join(_sections(record)).rstrip() + "\n"


def _sections(record: Record) -> Iterator[str]:
    engines = [f"{engine.engine} {engine.version}" for engine in record.engines]
    yield f"{tables.end(record)} {', '.join([tables.versions(record), *engines])}; {record.seconds:.0f} s."
    yield from _section("Every variant", "Of each row, the stage that lies nearest to its tolerance.")
    yield from markdown_table(tables.SUMMARY, tables.summary_rows(record))
    for family in dict.fromkeys(cell.family for cell in record.cells):
        yield from _stages(record, family)
    if record.sensitivity:
        yield from _section(
            "Wrong conventions, made on purpose", "A flip is caught where a gate of the tier fails on it."
        )
        yield from markdown_table(tables.SENSITIVITY, tables.sensitivity_rows(record))
    if record.served:
        note = "Accepted drafts of each depth, verify steps, and tokens a verify step, on the same prompts."
        yield from _section("Drafts, counted by engine and library", note)
        yield from markdown_table(tables.SERVED, tables.served_rows(record))
    yield from _section("What ran, and what was ours")
    for engine in record.engines:
        yield from (f"**{engine.engine} {engine.version}**", "", *_facts(engine, indent="", mark="- "), "")
    yield from ("### Not a plain pass", "")
    remarks = [f"- {place}: {remark}" for place, remark in tables.remarks(record)]
    yield from remarks or ["Nothing."]


def _section(title: str, note: str = "") -> Iterator[str]:
    yield from ("", f"### {title}", "")
    if note:
        yield from (note, "")


def _stages(record: Record, family: str) -> Iterator[str]:
    """Largest difference of each stage of a family's first variant, one column a judge."""
    first = next(cell.variant for cell in record.cells if cell.family == family)
    cells = [c for c in record.cells if (c.family, c.variant) == (family, first) and c.tier in tables.STAGED_TIERS]
    judges = list(dict.fromkeys(map(tables.judge, cells)))
    if not judges:
        return
    yield from _section(
        f"{family}, {first}: stage by stage", "Largest absolute difference; in brackets, the tolerance."
    )
    stages = list(dict.fromkeys(cell.stage for cell in cells))
    found = {(cell.stage, tables.judge(cell)): cell for cell in cells}
    rows = [(stage, *(_entry(found.get((stage, judge))) for judge in judges)) for stage in stages]
    yield from markdown_table(("stage", *judges), rows)


def _entry(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell.max_abs_diff is None:
        return tables.WORDS[cell.verdict]
    return f"{tables.number(cell.max_abs_diff)} ({tables.number(cell.tolerance)})"


def markdown_table(headers: Sequence[str], rows: Sequence[Row]) -> Iterator[str]:
    """A table; what would end a cell is escaped."""
    yield f"| {' | '.join(headers)} |"
    yield "|" + "--|" * len(headers)
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
