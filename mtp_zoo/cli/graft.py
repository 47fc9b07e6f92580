"""`mtp-zoo graft`: give a checkpoint that lost its head the head of another."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from mtp_zoo.cli.export import Dtype
from mtp_zoo.cli.output import JsonOption, quiet_transformers, show


def command(
    source: Annotated[str, typer.Argument(help="Checkpoint whose head to take: directory or repository id.")],
    into: Annotated[str, typer.Argument(help="Checkpoint whose trunk is served, its head lost or to be replaced.")],
    out: Annotated[str, typer.Argument(help="Directory to make; must not exist.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of SOURCE.")] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Store the head as floats like this; as it is stored now where left out.")
    ] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Copy weight files instead of hard-linking them.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write INTO with the head of SOURCE. Refused where the two are not of one model; INTO is never touched."""
    import torch

    from mtp_zoo.grafting import graft

    quiet_transformers()
    dtypes = {None: None, Dtype.bf16: torch.bfloat16, Dtype.fp16: torch.float16, Dtype.fp32: torch.float32}
    report = graft(source, into, out, copy=copy, dtype=dtypes[dtype], revision=revision)
    data = {**dataclasses.asdict(report), "out": str(report.out)}
    counts = {name: value for name, value in data.items() if name != "notices"}
    lines = [f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}" for name, value in counts.items()]
    show(data, "\n".join([*lines, *(f"notice: {notice}" for notice in report.notices)]), as_json=as_json)
