"""graft: the head of one checkpoint put into another that lost it, or never had it.

    headers of both -> check_graft (one model? all facts at once) -> load_head -> export into the receiver

Trainers drop the head when they save (transformers does not build it), so do mergers of LoRA and most quantisers. The head
takes the receiver's form: its place among the layers, its experts' layout and FP8 form where it has a head of its own, its
list of modules that are not quantised.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_zoo.arguments import FLAG, FLOAT_DTYPE, PATH, TEXT, checked, optional
from mtp_zoo.checkpoint import CheckpointIndex
from mtp_zoo.errors import ExportError
from mtp_zoo.export_preview import ExportPreview, head_on_meta, preview_export
from mtp_zoo.exporter import ExportReport, check_export, export, own_directory, refuse_unclear
from mtp_zoo.graft_check import check_graft
from mtp_zoo.journal import owned
from mtp_zoo.loader import load_head
from mtp_zoo.registry import needed_by_head, resolve

if TYPE_CHECKING:
    import torch

ADAPTER = "adapter_config.json"
"""What PEFT saves of a model that is not merged."""


ARGUMENTS = {
    "source": PATH,
    "into": PATH,
    "out": optional(PATH),
    "in_place": FLAG,
    "copy": FLAG,
    "dtype": optional(FLOAT_DTYPE),
    "revision": optional(TEXT),
}


@checked("Grafting a head", error=ExportError, **ARGUMENTS)
def graft(
    source: str | Path,
    into: str | Path,
    out: str | Path | None = None,
    *,
    in_place: bool = False,
    copy: bool = False,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
) -> ExportReport:
    """Write `into` with the head of `source`, as a new checkpoint or in its own directory.

    Nothing is written, and of `source` only headers and the tokenizer are read, before it is known that both are of one model:
    trunk, tokens and the head's shapes must agree. What differs and does no harm by itself is in the report's notices.

    A tensor keeps the dtype in which `source` stores it, or takes that of the head that it replaces; FP8 becomes BF16 where
    `into` has no FP8 head of its own.

    Args:
        source: checkpoint that holds the head: directory, hub-cache tree, or repository id. Of a repository that is not on
            this machine, headers, the tokenizer and the head's bytes are read, and nothing else.
        into: checkpoint whose trunk is served; whole, and on this machine.
        out: directory to make; must not exist.
        in_place: write into `into` itself instead; `rollback` takes it back.
        copy: copy weight files instead of hard-linking them.
        dtype: store the head as floats like this.
        revision: branch, tag or commit of `source`; its main branch where not given.

    Returns:
        What was written, as `export` says it.

    Raises:
        GraftMismatchError: the two are not of one model; every fact that differs.
        HeadNotFoundError and the other errors of `load_head`: `source` holds no head that can be read.
        CheckpointError: `into` is not whole, or not on this machine.
        ExportError: see `export`; also where `into` is a LoRA adapter that is not merged.
    """
    if in_place:
        with owned(own_directory(into)):
            pass  # an update that was cut short is taken back first: between its files there is no checkpoint to check
    donor, notices = _agreed(source, into, out, in_place=in_place, copy=copy, dtype=dtype, revision=revision)
    head = load_head(source, revision=donor.revision)
    report = export(head, into, out, in_place=in_place, copy=copy, dtype=dtype)
    return dataclasses.replace(report, notices=(*notices, *report.notices))


@checked("Grafting a head", error=ExportError, **ARGUMENTS)
def preview_graft(
    source: str | Path,
    into: str | Path,
    out: str | Path | None = None,
    *,
    in_place: bool = False,
    copy: bool = False,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
) -> ExportPreview:
    """What `graft` with the same arguments would do; no tensor is read, and nothing is written.

    Raises:
        see `graft`, for all that can be known from headers.
    """
    donor, notices = _agreed(source, into, out, in_place=in_place, copy=copy, dtype=dtype, revision=revision)
    head = head_on_meta(source, revision=donor.revision)
    preview = preview_export(head, into, out, in_place=in_place, copy=copy, dtype=dtype)
    return dataclasses.replace(preview, notices=(*notices, *preview.notices))


def _agreed(
    source: str | Path,
    into: str | Path,
    out: str | Path | None,
    *,
    in_place: bool,
    copy: bool,
    dtype: torch.dtype | None,
    revision: str | None,
) -> tuple[CheckpointIndex, tuple[str, ...]]:
    """The source's index, and what differs and does no harm; everything else is refused here."""
    refuse_unclear(out, in_place, copy)
    _refuse_adapter(into)
    receiver = CheckpointIndex.open(into)
    donor = CheckpointIndex.open(source, revision=revision, need=needed_by_head)
    check_export(receiver, out, resolve(donor.names, donor.config).family, dtype=dtype)
    return donor, check_graft(donor, receiver)


def _refuse_adapter(into: str | Path) -> None:
    root = Path(into).expanduser()
    if (root / ADAPTER).is_file() and not (root / "config.json").is_file():
        raise ExportError(
            f"Grafting into {into}: expected a model, found a LoRA adapter ({ADAPTER}, no config.json).",
            remedy="Merge it into its base first (PEFT: merge_and_unload), save that, and graft into what was saved.",
        )
