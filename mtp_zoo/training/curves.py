"""The report of a training run: curves over steps, final numbers, settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from mtp_zoo.training.config import TrainConfig
from mtp_zoo.training.report import Report

EVAL = "eval/"
"""Prefix of the metrics of the held-out rows."""

POINTS = 2000
"""Most steps that a curve shows; of a longer run, every n-th step."""

FIGURE_SIZE = (7.0, 3.4)
Metrics: TypeAlias = Mapping[str, float]

PER_DEPTH = {
    "loss": ("Loss", "loss (nats)", "Training loss of every depth."),
    "acc": ("Accuracy", "share of tokens", "How often the head's first choice is the token of the text."),
    "match": (
        "Agreement with the target",
        "share of tokens",
        "How often the head's first choice is the target's: what greedy verification accepts.",
    ),
    "accept": (
        "Acceptance by rejection sampling",
        "probability",
        "Overlap of the two distributions, the sum of min(p, q): what rejection sampling accepts.",
    ),
}


def training_report(
    metrics: Sequence[Metrics], config: TrainConfig, path: str | Path, *, facts: Mapping[str, object] | None = None
) -> None:
    """Write the report of a run.

    Args:
        metrics: one mapping a step, as in metrics.jsonl; held-out metrics stand under `eval/`.
        config: the run's settings.
        path: HTML file to write.
        facts: further rows of the first table, such as tokens per second.
    """
    report = Report(f"Training the head of {config.model}")
    report.table(("run", ""), [*_facts(metrics), *(facts or {}).items()])
    report.heading("At the end")
    report.text("Training numbers are of the last step's batch, held-out numbers of the last evaluation.")
    report.table(("depth", "rows", *PER_DEPTH), _final(metrics, config.objective.depths))
    shown = thin(metrics, POINTS)
    report.heading("Expected accept length")
    report.figure(
        _accept_length(shown),
        "1 + the expected number of leading drafts that are accepted, if every draft continues the text: greedy "
        "verification, and rejection sampling. An estimate; `mtp-zoo eval` measures it.",
    )
    for name, (title, unit, caption) in PER_DEPTH.items():
        report.heading(title)
        report.figure(_depth_curves(shown, name, unit, config.objective.depths), caption)
    report.heading("Settings")
    report.table(("field", "value"), [(name, _plain(value)) for name, value in config.flat().items()])
    report.data("metrics", shown)
    report.write(path)


def thin(metrics: Sequence[Metrics], points: int) -> list[Metrics]:
    """At most about `points` of the steps, evenly spaced; the last step and all evaluations stay."""
    stride = max(1, -(-len(metrics) // points))
    last = len(metrics) - 1
    return [m for number, m in enumerate(metrics) if number % stride == 0 or number == last or f"{EVAL}loss" in m]


def _facts(metrics: Sequence[Metrics]) -> list[tuple[str, object]]:
    evaluated = [m for m in metrics if f"{EVAL}loss" in m]
    facts: list[tuple[str, object]] = [
        ("steps", f"{len(metrics):,}"),
        ("tokens", f"{sum(int(m['tokens']) for m in metrics):,}"),
        ("loss, first and last step", f"{metrics[0]['loss']:.4g}, {metrics[-1]['loss']:.4g}"),
        ("expected accept length, first and last step", _pair(metrics, "mtp/accept_length")),
    ]
    if evaluated:
        facts.append(("the same, held out, first and last evaluation", _pair(evaluated, f"{EVAL}mtp/accept_length")))
    return facts


def _pair(metrics: Sequence[Metrics], name: str) -> str:
    return f"{metrics[0][name]:.3f}, {metrics[-1][name]:.3f}"


def _final(metrics: Sequence[Metrics], depths: int) -> list[list[object]]:
    evaluated = [m for m in metrics if f"{EVAL}loss" in m][-1:]
    sources = [("training", "", metrics[-1]), *(("held out", EVAL, m) for m in evaluated)]
    return [
        [depth, label, *(f"{source[f'{prefix}mtp/{name}_{depth}']:.4f}" for name in PER_DEPTH)]
        for depth in range(1, depths + 1)
        for label, prefix, source in sources
    ]


def _plain(value: Any) -> str:
    return "" if value is None else str(value)


def _accept_length(metrics: Sequence[Metrics]) -> Any:
    figure, axes = _axes("accept length")
    for color, (name, label) in enumerate((("mtp/accept_length", "greedy"), ("mtp/accept_length_sampled", "sampling"))):
        _curve(axes, metrics, name, label, f"C{color}")
    axes.legend()
    return figure


def _depth_curves(metrics: Sequence[Metrics], name: str, unit: str, depths: int) -> Any:
    figure, axes = _axes(unit)
    for depth in range(1, depths + 1):
        _curve(axes, metrics, f"mtp/{name}_{depth}", f"depth {depth}", f"C{depth - 1}")
    axes.legend()
    return figure


def _axes(unit: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=FIGURE_SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.grid(alpha=0.3)
    return figure, axes


def _curve(axes: Any, metrics: Sequence[Metrics], name: str, label: str, color: str) -> None:
    """Training as a line, held-out evaluations as points joined by dashes."""
    axes.plot([m["step"] for m in metrics], [m[name] for m in metrics], color=color, label=label, linewidth=1.2)
    evaluated = [m for m in metrics if EVAL + name in m]
    if evaluated:
        steps, values = [m["step"] for m in evaluated], [m[EVAL + name] for m in evaluated]
        axes.plot(steps, values, "o--", color=color, label=f"{label}, held out", markersize=4, linewidth=1)
