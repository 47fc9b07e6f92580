"""`mtp-zoo rollback`: take back an update in place."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from mtp_zoo.cli.output import JsonOption, show


def command(
    directory: Annotated[str, typer.Argument(help="Checkpoint that was updated in place.")],
    discard: Annotated[
        bool, typer.Option("--discard", help="Keep the update, and remove the files that it replaced.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Bring back the files that the last update in place replaced; also after one that was cut short."""
    from mtp_zoo.journal import discard_undo, rollback

    if discard:
        freed = discard_undo(directory)
        show({"directory": directory, "bytes_freed": freed}, f"{freed:,} bytes freed", as_json=as_json)
        return
    report = rollback(directory)
    data = {**dataclasses.asdict(report), "directory": str(report.directory)}
    lines = [f"{report.undone} update of {report.directory}"]
    lines += [f"  brought back {name}" for name in report.restored] + [f"  removed {name}" for name in report.removed]
    show(data, "\n".join(lines), as_json=as_json)
