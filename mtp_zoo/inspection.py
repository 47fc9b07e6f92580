"""What head a checkpoint holds, from headers only, with everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_zoo.checkpoint import CheckpointIndex, TensorEntry, TensorReader
from mtp_zoo.errors import MTPZooError
from mtp_zoo.registry import Family, Resolution, needed_by_head, resolve, resolve_family
from mtp_zoo.site import HeadSite, likely_site

if TYPE_CHECKING:
    from mtp_zoo.copies import Comparison


@dataclass(frozen=True)
class Inspection:
    """One checkpoint's head.

    Attributes:
        source: what was inspected.
        family: name of the family, or None where it can't be told.
        depths: depths on disk.
        tensors: the head's tensors.
        shared: role -> name, file and dtype of the tensors it borrows, and whether embedding and lm_head are tied.
        copies: tensors of the head that repeat one of the target's, compared with it where that was asked for.
        loads: whether `load_head` would succeed, with what the head borrows from its target.
        problems: everything that is wrong, in words; those that stop a load first.
        header_bytes: bytes read.
    """

    source: str
    family: str | None
    depths: int
    tensors: tuple[TensorEntry, ...]
    shared: dict[str, Any]
    copies: dict[str, Comparison]
    loads: bool
    problems: tuple[str, ...]
    header_bytes: int

    @property
    def head_bytes(self) -> int:
        """Stored size of the head."""
        return sum(entry.nbytes for entry in self.tensors)

    def as_dict(self) -> dict[str, Any]:
        """The inspection for `--json`."""
        tensors = [
            {"name": e.name, "dtype": e.dtype, "shape": list(e.shape), "bytes": e.nbytes, "file": e.file}
            for e in self.tensors
        ]
        return {
            "family": self.family,
            "depths": self.depths,
            "head_bytes": self.head_bytes,
            "tensors": tensors,
            "shared": self.shared,
            "copies": {name: asdict(found) for name, found in self.copies.items()},
            "loads": self.loads,
            "problems": list(self.problems),
        }

    def __str__(self) -> str:
        from mtp_zoo.tables import render_table

        rows = [(e.name, e.dtype, "x".join(map(str, e.shape)), f"{e.nbytes:,}", e.file) for e in self.tensors]
        title = f"{self.source}: {self.family or 'no known family'}, {self.depths} depth(s), {self.head_bytes:,} bytes"
        lines = [render_table(title, ("tensor", "dtype", "shape", "bytes", "file"), rows, right=(2, 3))]
        lines += [f"shared {role}: {_in_words(detail)}" for role, detail in self.shared.items() if role != "tied"]
        lines += [f"copy {name}: {found}" for name, found in self.copies.items()]
        lines += ["lm_head is the embedding (tied)"] if self.shared.get("tied") else []
        lines += [f"problem: {problem}" for problem in self.problems] or ["no problems"]
        return "\n".join(lines)


def inspect(source: str | Path, *, copies: bool = False, revision: str | None = None) -> Inspection:
    """Look at a checkpoint without reading a tensor.

    Args:
        source: checkpoint directory, hub-cache tree, or repository id; on the Hub, only the headers of files that hold the
            head or what it borrows are read.
        copies: read the head's copies of the target's embedding and lm_head, and these, and compare them whole.
        revision: branch, tag or commit of a repository; its main branch where not given.

    Raises:
        CheckpointError: the place can't be read as a checkpoint at all; what is wrong with the head is reported.
    """
    index = CheckpointIndex.open(source, revision=revision, need=needed_by_head)
    notes: list[str] = []
    problems: list[str] = [*index.storage.notices, *(str(fault) for fault in index.faults)]
    family = resolution = None
    remarks: list[str] = []
    try:
        family = resolve_family(index.names, index.config)
        resolution = resolve(index.names, index.config, family=family)
        remarks = _plan(index, resolution)
    except MTPZooError as error:
        notes = [error.message, *map(str, error.problems)]
    site = likely_site(family, index.names, index.config) if family else None
    scoped = [index.entries[name] for name in sorted(site.inside(index.entries))] if site else []
    shared, missing = _shared(index, family) if family else ({}, [])
    compared = _compared(index, site) if site and copies else {}
    problems += [*missing, *(resolution.notices if resolution else ()), *remarks]
    return Inspection(
        source=str(source),
        family=family.name if family else None,
        depths=site.depths_on_disk(entry.name for entry in scoped) if site else 0,
        tensors=tuple(scoped),
        shared=shared,
        copies=compared,
        loads=not notes and not missing,
        problems=tuple(dict.fromkeys([*notes, *problems])),
        header_bytes=index.header_bytes,
    )


def _in_words(tensor: dict[str, Any]) -> str:
    return f"{tensor['name']}, {tensor['dtype']}, {'x'.join(map(str, tensor['shape']))}, in {tensor['file']}"


def _plan(index: CheckpointIndex, resolution: Resolution) -> list[str]:
    from mtp_zoo.loader import ignore_notices, plan_head

    head, plan, stored = plan_head(index, resolution)
    return ignore_notices(index, head.site, plan, stored)


def _compared(index: CheckpointIndex, site: HeadSite) -> dict[str, Comparison]:
    from mtp_zoo.copies import compare_copies

    scoped = sorted(site.inside(index.entries))
    return compare_copies(index, site, scoped, TensorReader(index), whole=True)


def _told(entries: Mapping[str, TensorEntry]) -> dict[str, Any]:
    return {
        role: {"name": e.name, "dtype": e.dtype, "shape": list(e.shape), "file": e.file} for role, e in entries.items()
    }


def _present(index: CheckpointIndex, family: Family) -> dict[str, TensorEntry]:
    """What is there of the tensors that a head borrows, where not all of them are."""
    target = family.target
    candidates = {
        "embedding": [prefix + target.embedding for prefix in target.prefixes],
        "lm_head": target.lm_head,
        "final_norm": [prefix + target.final_norm for prefix in target.prefixes],
    }
    found = {role: next((n for n in names if n in index.entries), None) for role, names in candidates.items()}
    return {role: index.entries[name] for role, name in found.items() if name is not None}


def _shared(index: CheckpointIndex, family: Family) -> tuple[dict[str, Any], list[str]]:
    from mtp_zoo.shared import shared_names

    try:
        names = shared_names(index, family)
        entries = dict(zip(names, index.require(names.values()), strict=True))
    except MTPZooError as error:
        return _told(_present(index, family)), [error.message, *map(str, error.problems)]
    shared = _told(entries)
    shared["tied"] = names["embedding"] == names["lm_head"]
    return shared, []
