"""`mtp-zoo doctor`: what is wrong with a checkpoint that should hold a head."""

from __future__ import annotations

from typing import Annotated

import typer

from mtp_zoo.cli.output import JsonOption, quiet_transformers, show


def command(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint directory, hub-cache tree or repository id.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a repository.")] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Read every tensor of the head.")] = False,
    against: Annotated[
        str | None, typer.Option(help="Checkpoint that the head was trained from: is it still the same head?")
    ] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Mend what needs no choice; `rollback` takes it back.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Find out what is wrong with a checkpoint. Exit code 1 where a finding is an error, after mending where asked for."""
    from mtp_zoo.diagnosis.examination import doctor
    from mtp_zoo.diagnosis.fix import mend

    quiet_transformers()
    found = doctor(checkpoint, revision=revision, deep=deep, against=against)
    done = mend(found) if fix else ()
    if done:
        found = doctor(checkpoint, revision=revision, deep=deep, against=against)
    data = {**found.as_dict(), **({"fixed": list(done)} if fix else {})}
    show(data, "\n".join([*(f"fixed: {act}" for act in done), str(found)]), as_json=as_json)
    raise typer.Exit(0 if found.healthy else 1)
