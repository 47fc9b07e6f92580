"""`mtp-zoo train`: train a head as a YAML file says."""

from __future__ import annotations

from typing import Annotated

import typer

from mtp_zoo.cli.output import JsonOption, quiet_transformers, show


def command(
    config: Annotated[str, typer.Argument(help="YAML file; docs/quickstart.md lists every field.")],
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint of run_dir.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train the head of a checkpoint on a frozen target, export it, and write report.html."""
    from accelerate import PartialState

    from mtp_zoo.training.config import TrainConfig
    from mtp_zoo.training.trainer import train

    settings = TrainConfig.from_yaml(config)
    quiet_transformers()
    result = train(settings, resume=resume)
    if PartialState().is_main_process:
        show(result.as_dict(), str(result), as_json=as_json)
