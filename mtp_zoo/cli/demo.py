"""`mtp-zoo demo`: the whole story on real text, without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtp_zoo.cli.output import JsonOption, quiet_transformers, show


def command(
    out: Annotated[Path, typer.Option(help="Directory for the report and the exported checkpoint; made anew.")] = Path(
        "demo-out"
    ),
    seed: Annotated[int, typer.Option(help="Seed of the fine-tune and of the head's training.")] = 0,
    short: Annotated[
        bool, typer.Option("--short", help="Fewer steps and prompts; for a quick check of the machinery.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune a small model, watch its head go stale, train and export the head, and measure each stage."""
    from mtp_zoo.demo.story import tell

    quiet_transformers()
    told = tell(out, seed=seed, short=short)
    show(told.as_dict(), str(told), as_json=as_json)
