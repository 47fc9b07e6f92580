"""The `mtp-zoo` command: one verb a file; a verb imports torch only when it runs.

Exit codes: 0 done, 1 the check that was asked for failed (a head that does not load, an output that is not lossless, a
module that computes something else), 2 a user error (`MTPZooError`, wrong options), 3 something could not be judged.
"""

from __future__ import annotations

import sys

import typer

from mtp_zoo.cli import conform, demo, doctor, evaluate, export, families, graft, inspect, push, rollback, train, verify
from mtp_zoo.errors import MTPZooError
from mtp_zoo.version import __version__

app = typer.Typer(
    name="mtp-zoo",
    help="Load, train, export and measure multi-token-prediction (MTP / NEXTN) draft heads.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help texts: rendering them with rich takes half of the time of `mtp-zoo --help`
)
app.command("list")(families.command)
app.command("inspect")(inspect.command)
app.command("doctor")(doctor.command)
app.command("train")(train.command)
app.command("eval")(evaluate.command)
app.command("export")(export.command)
app.command("verify")(verify.command)
app.command("rollback")(rollback.command)
app.command("graft")(graft.command)
app.command("push")(push.command)
app.command("conform")(conform.command)
app.command("demo")(demo.command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mtp-zoo {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Print the version and leave."
    ),
) -> None:
    del version


def main() -> None:
    """Entry point of the command."""
    try:
        app()
    except MTPZooError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        sys.exit(2)
