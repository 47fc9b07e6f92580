"""`mtp-zoo export`: put a head into a complete, servable checkpoint."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Annotated

import typer

from mtp_zoo.cli.output import JsonOption, quiet_transformers, show


class Dtype(str, Enum):
    """How the head is stored."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


def command(
    base: Annotated[str, typer.Argument(help="Checkpoint whose trunk is served.")],
    out: Annotated[str, typer.Argument(help="Directory to make; must not exist.")],
    head: Annotated[
        str | None, typer.Option(help="Checkpoint whose head to take; the base's own where left out.")
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Store the head as floats like this; as the base stores it where left out.")
    ] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Copy weight files instead of hard-linking them.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write base + head as one checkpoint. Files without head tensors are hard-linked; the base is never touched."""
    import torch

    from mtp_zoo.exporter import export
    from mtp_zoo.loader import load_head

    quiet_transformers()
    dtypes = {None: None, Dtype.bf16: torch.bfloat16, Dtype.fp16: torch.float16, Dtype.fp32: torch.float32}
    report = export(load_head(head or base), base=base, out=out, copy=copy, dtype=dtypes[dtype])
    data = {**dataclasses.asdict(report), "out": str(report.out)}
    counts = {name: value for name, value in data.items() if name != "notices"}
    lines = [f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}" for name, value in counts.items()]
    show(data, "\n".join([*lines, *(f"notice: {notice}" for notice in report.notices)]), as_json=as_json)
