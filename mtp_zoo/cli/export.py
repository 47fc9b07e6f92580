"""`mtp-zoo export`: put a head into a complete, servable checkpoint."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from mtp_zoo.cli.output import JsonOption, quiet_transformers, show

if TYPE_CHECKING:
    import torch

    from mtp_zoo.export_preview import ExportPreview
    from mtp_zoo.exporter import ExportReport


class Dtype(str, Enum):
    """How the head is stored."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


def torch_dtype_of(dtype: Dtype | None) -> torch.dtype | None:
    """The dtype that an option names."""
    import torch

    return {None: None, Dtype.bf16: torch.bfloat16, Dtype.fp16: torch.float16, Dtype.fp32: torch.float32}[dtype]


def show_report(report: ExportReport | ExportPreview, *, as_json: bool) -> None:
    """Print what was written, or would be."""
    show({**dataclasses.asdict(report), "out": str(report.out)}, str(report), as_json=as_json)


def command(
    base: Annotated[str, typer.Argument(help="Checkpoint whose trunk is served.")],
    out: Annotated[str | None, typer.Argument(help="Directory to make; must not exist. None with --in-place.")] = None,
    head: Annotated[
        str | None,
        typer.Option(help="Checkpoint, or training checkpoint, whose head to take; the base's own where left out."),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the head's checkpoint.")] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Update BASE itself; `mtp-zoo rollback` takes it back.")
    ] = False,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Store the head as floats like this; as the base stores it where left out.")
    ] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Copy weight files instead of hard-linking them.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tell which files would be linked and written, and write nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Export a head that holds a NaN or an infinity, too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write base + head as one checkpoint. Files without head tensors are hard-linked, and the base is never touched, unless
    --in-place asks for it."""
    quiet_transformers()
    chosen = torch_dtype_of(dtype)
    if dry_run:
        from mtp_zoo.checkpoint import CheckpointIndex
        from mtp_zoo.export_preview import head_on_meta, preview_export
        from mtp_zoo.trained_head import training_checkpoint

        opened = CheckpointIndex.open(base)
        own = head is None and revision is None
        trained = None if own else training_checkpoint(head or base)
        source = (head or base) if trained is None else trained["base"]
        fitting = head_on_meta(opened) if own else head_on_meta(source, revision=revision)
        preview = preview_export(fitting, opened, out, in_place=in_place, copy=copy, dtype=chosen)
        show_report(preview, as_json=as_json)
        return
    from mtp_zoo.exporter import export
    from mtp_zoo.loader import load_head

    loaded = load_head(head or base, revision=revision)
    report = export(loaded, base, out, in_place=in_place, copy=copy, dtype=chosen, force=force)
    show_report(report, as_json=as_json)
