"""A run as one HTML page with figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mtp_zoo.training.report import Report
from mtp_zoo_conformance import tables
from mtp_zoo_conformance.record import Cell, FlipResult, Record, ServedHead

FLOOR = 1e-8
"""Where a difference of nothing is drawn: a logarithmic axis has no zero."""

WIDTH = 7.0
ROW = 0.32
MARGIN = 1.3


def page(record: Record) -> Report:
    """The whole page; the record itself is in it, as JSON."""
    report = Report("Conformance")
    report.text(f"{tables.end(record)} {record.seconds:.0f} s; {tables.versions(record)}.")
    report.table(tables.SUMMARY, tables.summary_rows(record))
    _differences(report, record)
    _flips(report, record)
    _served(report, record)
    for engine in record.engines:
        report.heading(f"{engine.engine} {engine.version}")
        report.table(("", ""), [(what, thing) for what, things in tables.engine_facts(engine) for thing in things])
    report.heading("Not a plain pass")
    report.text("\n".join(f"{place}: {remark}" for place, remark in tables.remarks(record)) or "Nothing.")
    report.data("record", record.as_dict())
    return report


def _differences(report: Report, record: Record) -> None:
    measured = [cell for cell in record.cells if cell.max_abs_diff is not None and cell.tier in tables.STAGED_TIERS]
    for family in dict.fromkeys(cell.family for cell in measured):
        report.heading(f"{family}: differences by stage")
        caption = "A point a variant: the largest absolute difference of a stage. A bar: its tolerance. Zero is drawn at 1e-08."
        report.figure(_stage_figure([cell for cell in measured if cell.family == family]), caption)


def _stage_figure(cells: Sequence[Cell]) -> Any:
    stages = list(dict.fromkeys(cell.stage for cell in cells))
    colors = _colors(tables.judge(cell) for cell in cells)
    figure, axes = _axes(stages, "largest absolute difference")
    for cell in cells:
        name = tables.judge(cell)
        color, aside = colors[name]
        height = stages.index(cell.stage) + aside
        axes.plot(max(cell.max_abs_diff or 0.0, FLOOR), height, "o", color=color, markersize=4, label=name)
        axes.plot(cell.tolerance or FLOOR, height, "|", color=color, markersize=9, alpha=0.6)
    _logarithmic(axes)
    _legend(axes)
    return figure


def _flips(report: Report, record: Record) -> None:
    if not record.sensitivity:
        return
    report.heading("Wrong conventions, made on purpose")
    report.table(tables.SENSITIVITY, tables.sensitivity_rows(record))
    for family in dict.fromkeys(flip.family for flip in record.sensitivity):
        flips = [flip for flip in record.sensitivity if flip.family == family]
        report.figure(
            _flip_figure(flips), f"{family}: how far each wrong convention moves an output. Crosses went unseen."
        )


def _flip_figure(flips: Sequence[FlipResult]) -> Any:
    names = list(dict.fromkeys(flip.flip for flip in flips))
    colors = _colors(flip.engine for flip in flips)
    figure, axes = _axes(names, "largest absolute difference")
    for flip in (flip for flip in flips if flip.max_abs_diff is not None):
        color, aside = colors[flip.engine]
        height, mark = names.index(flip.flip) + aside, "o" if flip.caught else "x"
        axes.plot(max(flip.max_abs_diff or FLOOR, FLOOR), height, mark, color=color, markersize=4, label=flip.engine)
    _logarithmic(axes)
    _legend(axes)
    return figure


def _served(report: Report, record: Record) -> None:
    if not record.served:
        return
    report.heading("Drafts, counted by engine and library")
    report.table(tables.SERVED, tables.served_rows(record))
    caption = "Tokens a verify step. A point: the engine's count. A ring: the library's, on the same prompts."
    report.figure(_served_figure(record.served), caption)


def _served_figure(heads: Sequence[ServedHead]) -> Any:
    names = list(dict.fromkeys(f"{head.head}, k = {head.k}" for head in heads))
    colors = _colors(head.engine for head in heads)
    figure, axes = _axes(names, "accept length")
    for head in heads:
        color, aside = colors[head.engine]
        height = names.index(f"{head.head}, k = {head.k}") + aside
        axes.plot(head.accept_length, height, "o", color=color, markersize=4, label=head.engine)
        axes.plot(head.library_accept_length, height, "o", color=color, markersize=9, fillstyle="none")
    _legend(axes)
    return figure


def _colors(names: Any) -> Mapping[str, tuple[str, float]]:
    """A colour for each name, and how far beside its row it is drawn."""
    distinct = list(dict.fromkeys(names))
    middle = (len(distinct) - 1) / 2
    return {name: (f"C{position}", 0.18 * (position - middle)) for position, name in enumerate(distinct)}


def _axes(rows: Sequence[str], unit: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, MARGIN + ROW * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(unit)
    axes.grid(alpha=0.3)
    return figure, axes


def _logarithmic(axes: Any) -> None:
    """Whole decades, the only ones that are labelled."""
    from matplotlib.ticker import NullFormatter

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _legend(axes: Any) -> None:
    """One entry a name, however many points it has."""
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.figure.legend(once.values(), once.keys(), loc="outside upper center", ncols=len(once), frameon=False)
