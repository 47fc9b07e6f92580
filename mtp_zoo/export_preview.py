"""What an export would do, told from headers: no tensor is read and nothing is written."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mtp_zoo.checkpoint import CheckpointIndex
from mtp_zoo.export_write import texts
from mtp_zoo.exporter import Job, notices, prepare
from mtp_zoo.load_report import Origin
from mtp_zoo.loader import plan_head
from mtp_zoo.registry import needed_by_head, resolve

if TYPE_CHECKING:
    from mtp_zoo.head import DraftHead

DIGEST = "0" * 64
"""Stands for a sha256 that only an export can know; as long as one, so that sizes are right."""

SHOWN = 4
"""File names of one kind that the text shows; of more, the first and the last."""


@dataclass(frozen=True)
class ExportPreview:
    """The files of an export that was not made, and what they would cost.

    Attributes:
        out: the directory that would be made or updated.
        in_place: whether it is the base's own.
        linked: weight files that would be linked to the base's or, in place, stay; where links are not possible, copied.
        rewritten: weight files that would be copied without the base's head.
        left_out: weight files that hold nothing but the base's head.
        copied: other files that come along.
        written: new files.
        bytes_linked: bytes of weights that cost nothing.
        bytes_written: bytes that would be put on the disk.
        head_bytes: stored size of the head.
        notices: what the reader has to know before the checkpoint is served.
    """

    out: Path
    in_place: bool
    linked: tuple[str, ...]
    rewritten: tuple[str, ...]
    left_out: tuple[str, ...]
    copied: tuple[str, ...]
    written: tuple[str, ...]
    bytes_linked: int
    bytes_written: int
    head_bytes: int
    notices: tuple[str, ...]

    def __str__(self) -> str:
        kept = "stay" if self.in_place else "link"
        rows = [(kept, self.linked), ("rewrite", self.rewritten), ("leave out", self.left_out)]
        rows += [("copy", self.copied), ("write", self.written)]
        lines = [f"{'update' if self.in_place else 'make'} {self.out}"]
        lines += [f"{act:>9}  {len(names):>4}  {_some(names)}" for act, names in rows if names]
        lines += [
            f"{self.bytes_written:,} bytes to write, {self.bytes_linked:,} bytes shared; head {self.head_bytes:,} bytes"
        ]
        return "\n".join([*lines, *(f"notice: {notice}" for notice in self.notices)])


def preview_export(
    head: DraftHead,
    base: str | Path | CheckpointIndex,
    out: str | Path | None = None,
    *,
    in_place: bool = False,
    copy: bool = False,
    dtype: torch.dtype | None = None,
) -> ExportPreview:
    """What `export` with the same arguments would do.

    Args:
        head: only its shapes and dtypes are looked at: one on the meta device does (`head_on_meta`).
        base: see `export`; or the same, opened.
        out, in_place, copy, dtype: see `export`.

    Raises:
        see `export`, for all that can be known from headers.
    """
    job = prepare(head, base, out, in_place=in_place, copy=copy, dtype=dtype)
    plan, root = job.plan, job.index.root
    made = texts(plan, head, job.index.config, {tensor.name: DIGEST for tensor in plan.head}, job.facts)
    linked = [shard for shard in plan.shards if shard.action == "link"]
    others = [*(() if in_place else plan.others), *(("config.json",) if "config.json" not in made else ())]
    costs_nothing = in_place or (not copy and _one_disk(root, job.out))
    weights = sum((root / shard.source).stat().st_size for shard in linked)
    rewritten = [shard for shard in plan.shards if shard.action == "rewrite"]
    head_bytes = sum(tensor.nbytes for tensor in plan.head)
    written = [
        len(plan.head_header) + head_bytes,
        *(len(shard.header) + sum(entry.nbytes for entry in shard.entries) for shard in rewritten),
        *((root / name).stat().st_size for name in others),
        *map(len, made.values()),
    ]
    return ExportPreview(
        out=job.out,
        in_place=in_place,
        linked=tuple(shard.name for shard in linked),
        rewritten=tuple(shard.name for shard in rewritten),
        left_out=tuple(_left_out(job)),
        copied=tuple(others),
        written=(plan.head_file, *made),
        bytes_linked=weights if costs_nothing else 0,
        bytes_written=sum(written) + (0 if costs_nothing else weights),
        head_bytes=head_bytes,
        notices=notices(job, head),
    )


def head_on_meta(source: str | Path | CheckpointIndex, *, revision: str | None = None) -> DraftHead:
    """The head of a checkpoint, which may be open already, without its numbers, for `preview_export`; reads headers.

    Raises:
        see `load_head`.
    """
    opened = isinstance(source, CheckpointIndex)
    index = source if opened else CheckpointIndex.open(source, revision=revision, need=needed_by_head)
    head, plan, _ = plan_head(index, resolve(index.names, index.config))
    dtypes = {name: plan.dtypes[next(iter(binding.natives))] for binding in plan.bindings for name in binding.heads}
    head.origin = Origin(index.root, plan.bindings, dtypes)
    return head


def _left_out(job: Job) -> list[str]:
    kept = {shard.source for shard in job.plan.shards}
    return [file for file in job.index.files if file not in kept]


def _one_disk(root: Path, out: Path) -> bool:
    """Whether hard links from one place to the other can be had; clones, which may be possible as well, are not foreseen."""
    place = next(folder for folder in out.parents if folder.exists())
    return os.stat(root).st_dev == os.stat(place).st_dev


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) <= SHOWN else f"{names[0]} ... {names[-1]}"
