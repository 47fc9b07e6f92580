"""`mtp-zoo inspect`: what head a checkpoint holds."""

from __future__ import annotations

from typing import Annotated

import typer

from mtp_zoo.cli.output import JsonOption, quiet_transformers, show


def command(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint directory, hub-cache tree or repository id.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a repository.")] = None,
    copies: Annotated[
        bool, typer.Option(help="Read the head's copies of embedding and lm_head, and compare them with the target's.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the head that a checkpoint holds, reading headers only. Exit code 1 where the head would not load."""
    from mtp_zoo.inspection import inspect

    quiet_transformers()
    found = inspect(checkpoint, copies=copies, revision=revision)
    show(found.as_dict(), str(found), as_json=as_json)
    raise typer.Exit(0 if found.loads else 1)
