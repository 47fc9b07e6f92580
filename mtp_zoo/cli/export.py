"""`mtp-zoo export`: put a head into a complete, servable checkpoint."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from mtp_zoo.cli.output import JsonOption, quiet_transformers, show


def command(
    base: Annotated[str, typer.Argument(help="Checkpoint whose trunk is served.")],
    out: Annotated[str, typer.Argument(help="Directory to make; must not exist.")],
    head: Annotated[
        str | None, typer.Option(help="Checkpoint whose head to take; the base's own where left out.")
    ] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Copy weight files instead of hard-linking them.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write base + head as one checkpoint. Files without head tensors are hard-linked; the base is never touched."""
    from mtp_zoo.exporter import export
    from mtp_zoo.loader import load_head

    quiet_transformers()
    report = export(load_head(head or base), base=base, out=out, copy=copy)
    data = {**dataclasses.asdict(report), "out": str(report.out)}
    text = "\n".join(
        f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}" for name, value in data.items()
    )
    show(data, text, as_json=as_json)
