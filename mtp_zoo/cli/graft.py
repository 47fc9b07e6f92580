"""`mtp-zoo graft`: give a checkpoint that lost its head the head of another."""

from __future__ import annotations

from typing import Annotated

import typer

from mtp_zoo.cli.export import Dtype, show_report, torch_dtype_of
from mtp_zoo.cli.output import JsonOption, quiet_transformers


def command(
    source: Annotated[str, typer.Argument(help="Checkpoint whose head to take: directory or repository id.")],
    into: Annotated[str, typer.Argument(help="Checkpoint whose trunk is served, its head lost or to be replaced.")],
    out: Annotated[str | None, typer.Argument(help="Directory to make; must not exist. None with --in-place.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of SOURCE.")] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Update INTO itself; `mtp-zoo rollback` takes it back.")
    ] = False,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Store the head as floats like this; as it is stored now where left out.")
    ] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Copy weight files instead of hard-linking them.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and tell which files would be written, and write nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write INTO with the head of SOURCE. Refused where the two are not of one model; INTO is never touched, unless --in-place
    asks for it."""
    from mtp_zoo.grafting import graft, preview_graft

    quiet_transformers()
    act = preview_graft if dry_run else graft
    chosen = torch_dtype_of(dtype)
    done = act(source, into, out, in_place=in_place, copy=copy, dtype=chosen, revision=revision)
    show_report(done, as_json=as_json)
