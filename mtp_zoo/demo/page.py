"""The demo's HTML report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mtp_zoo.demo.head import DEPTHS
from mtp_zoo.training.report import Report

if TYPE_CHECKING:
    from mtp_zoo.demo.story import Story


def write_page(story: Story) -> None:
    """Write `story.report`: the table, accept length by stage, and the curves of the head's training."""
    report = Report("A head that went stale, and came back")
    report.text(
        "A small model drafts with its own head. It is fine-tuned on another kind of text by a trainer that knows of no "
        "head; its output is fine, only the drafts are no longer accepted. The head is then loaded strictly, trained "
        "towards the new model's distribution, and exported."
    )
    headers = ("stage", "prompts", "accept rate", "accept length", "std. error", "outputs that loop", "one block")
    report.table(headers, story.rows())
    report.figure(
        _stages(story), f"Accept length with {DEPTHS} drafted tokens a step (1 is no speed-up, {DEPTHS + 1} the most)."
    )
    report.figure(
        _training(story), "Training of the head: loss, and how often each depth's first choice is the target's."
    )
    report.text(f"Strict load of the fine-tuned checkpoint: {story.refusal}")
    report.text(
        f"The real draft/verify loop on {len(story.loop.prompts)} prompt(s) of the last stage gave accept length "
        f"{story.loop.accept_length:.3f}; its output equals plain greedy decoding: {story.loop.lossless}."
    )
    report.write(story.report)


def _stages(story: Story) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.add_subplot()
    names = [stage.name for stage in story.stages]
    places = range(len(names))
    axes.bar(
        [place - 0.2 for place in places],
        [stage.report.accept_length for stage in story.stages],
        width=0.38,
        yerr=[stage.error for stage in story.stages],
        capsize=3,
        label="greedy outputs",
    )
    axes.bar(
        [place + 0.2 for place in places],
        [stage.block for stage in story.stages],
        width=0.38,
        yerr=[stage.block_error for stage in story.stages],
        capsize=3,
        label="one block behind real text",
    )
    axes.set_xticks(list(places), names)
    axes.set_ylim(1, DEPTHS + 1)
    axes.set_ylabel("accept length")
    axes.legend()
    return figure


def _training(story: Story) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    loss, match = figure.subplots(1, 2)
    steps = range(1, len(story.history) + 1)
    for depth in range(1, DEPTHS + 1):
        loss.plot(steps, [row[f"mtp/loss_{depth}"] for row in story.history], label=f"depth {depth}")
        match.plot(steps, [row[f"mtp/match_{depth}"] for row in story.history], label=f"depth {depth}")
    loss.set_ylabel("KL to the target (nats)")
    match.set_ylabel("agreement with the target")
    for axes in (loss, match):
        axes.set_xlabel("step")
        axes.legend()
    return figure
