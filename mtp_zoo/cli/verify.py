"""`mtp-zoo verify`: whether a checkpoint is still what was exported."""

from __future__ import annotations

from typing import Annotated

import typer

from mtp_zoo.cli.output import JsonOption, quiet_transformers, show


def command(
    checkpoint: Annotated[
        str, typer.Argument(help="Checkpoint that an export wrote; others are checked by their headers.")
    ],
    against: Annotated[
        str | None,
        typer.Option(help="Base whose trunk it should hold; every tensor that is not the head's is compared."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Hold a checkpoint against the hashes in its mtp_zoo.json. Exit code 1 where something is wrong."""
    from mtp_zoo.verification import verify

    quiet_transformers()
    found = verify(checkpoint, against=against)
    show(found.as_dict(), str(found), as_json=as_json)
    raise typer.Exit(0 if found.ok else 1)
