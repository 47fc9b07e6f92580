"""What verbs share: one JSON object on stdout, and a quiet transformers."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on stdout.")]


def show(data: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print `data` as one JSON object, or `text` for people."""
    typer.echo(json.dumps(data) if as_json else text)


def quiet_transformers() -> None:
    """Keep transformers' advice and progress bars out of the terminal; ours are on stderr."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
