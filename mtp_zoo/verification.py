"""verify: whether a checkpoint is still what an export wrote, and whether its trunk is the base's.

headers            -> is it whole, is its head one that loads
mtp_zoo.json       -> every tensor of the head by its hash; names, dtypes and shapes of the trunk by its files' headers
--against a base   -> every other tensor byte by byte; a file that is a hard link to the base's is not read
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from mtp_zoo.arguments import PATH, checked, optional
from mtp_zoo.checkpoint import CheckpointIndex, TensorEntry, TensorReader
from mtp_zoo.containment import refuse_escapes
from mtp_zoo.errors import MTPZooError
from mtp_zoo.export_form import is_left_alone
from mtp_zoo.export_plan import PROVENANCE_NAME, old_head
from mtp_zoo.progress import progress_bytes
from mtp_zoo.provenance import read_record
from mtp_zoo.registry import Resolution, resolve, resolve_family
from mtp_zoo.site import HeadSite, likely_site

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Verification:
    """What a check came to.

    Attributes:
        source: what was checked.
        problems: everything that is wrong, in words.
        notices: what could not be checked, and contradictions that no engine trips over.
        head_tensors: tensors of the head whose hash was compared.
        trunk_tensors: other tensors that were compared with the base's, those in linked files included.
        bytes_read: bytes of tensors that were read for it.
    """

    source: str
    problems: tuple[str, ...]
    notices: tuple[str, ...]
    head_tensors: int
    trunk_tensors: int
    bytes_read: int

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """The check for `--json`."""
        return {
            "ok": self.ok,
            "problems": list(self.problems),
            "notices": list(self.notices),
            "head_tensors": self.head_tensors,
            "trunk_tensors": self.trunk_tensors,
            "bytes_read": self.bytes_read,
        }

    def __str__(self) -> str:
        counted = (
            f"{self.head_tensors:,} tensors of the head by hash, {self.trunk_tensors:,} of the trunk against the base"
        )
        lines = [f"{self.source}: {counted}; {self.bytes_read:,} bytes read"]
        lines += [f"problem: {problem}" for problem in self.problems] or ["no problems"]
        return "\n".join([*lines, *(f"notice: {notice}" for notice in self.notices)])


@checked("Verifying a checkpoint", checkpoint=PATH, against=optional(PATH))
def verify(checkpoint: str | Path, *, against: str | Path | None = None) -> Verification:
    """Check a checkpoint that holds a head.

    Args:
        checkpoint: directory, hub-cache tree, or repository id. One that was not written by `export` is checked as far as its
            headers go.
        against: the base whose trunk it should hold, likewise.

    Raises:
        CheckpointError: the checkpoint can't be read as one at all (what else is wrong with it is reported), or the base is not
            whole.
    """
    index = CheckpointIndex.open(checkpoint)
    base = None if against is None else CheckpointIndex.open(against)
    site = _site(index)
    if base:
        base.verify(besides=site.in_scope if site else lambda _: False)
    problems, notices = _structure(index)
    record = _record(index, problems, notices)
    head = set(record["tensors"] if record else site.inside(index.entries) if site else ())
    ours, theirs = TensorReader(index), TensorReader(base or index)
    pairs = _pairs(index, base, site, head) if base else []
    read = [entry for pair in pairs if not pair.linked for entry in pair.both]
    hashed = [index.entries[name] for name in head if record and name in index.entries]
    with progress_bytes("Checking tensors", total=sum(entry.nbytes for entry in (*read, *hashed))) as advance:
        if record:
            problems += [*_head(index, record, ours, advance), *_added(index, record, site), *_headers(index, record)]
        problems += _trunk(pairs, ours, theirs, advance)
    if base:
        problems += _strangers(index, base, head)
    return Verification(
        source=str(checkpoint),
        problems=tuple(dict.fromkeys(problems)),
        notices=tuple(dict.fromkeys(notices)),
        head_tensors=len(hashed),
        trunk_tensors=len(pairs),
        bytes_read=ours.bytes_read + theirs.bytes_read,
    )


def _site(index: CheckpointIndex) -> HeadSite | None:
    """Where the head lies by names and config; None where no family can be told."""
    try:
        family = resolve_family(index.names, index.config)
        return likely_site(family, index.names, index.config)
    except MTPZooError:
        return None


def _structure(index: CheckpointIndex) -> tuple[list[str], list[str]]:
    """What is wrong with files and head by headers alone, and what is worth knowing."""
    problems = [str(fault) for fault in index.faults if fault.fatal]
    notices = [*index.storage.notices, *(str(fault) for fault in index.faults if not fault.fatal)]
    try:
        resolution = resolve(index.names, index.config)
        notices += resolution.notices
        problems += _planned(index, resolution)
    except MTPZooError as error:
        new = [told for told in map(str, error.problems) if told not in problems]
        problems += [error.message, *new] if new or not error.problems else []
    return problems, notices


def _planned(index: CheckpointIndex, resolution: Resolution) -> list[str]:
    from mtp_zoo.loader import ignore_notices, plan_head

    head, plan, stored = plan_head(index, resolution)
    return ignore_notices(index, head.site, plan, stored)


def _record(index: CheckpointIndex, problems: list[str], notices: list[str]) -> dict[str, Any] | None:
    """What `mtp_zoo.json` says; where there is none, or none that can be read, that is added to the lists."""
    refuse_escapes(index.root, [PROVENANCE_NAME])
    path = index.storage.small_file(PROVENANCE_NAME)
    if path is None:
        notices.append(f"there is no {PROVENANCE_NAME}, so there are no hashes to compare with")
        return None
    try:
        return read_record(path)
    except ValueError as error:
        problems.append(str(error))
        return None


def _head(index: CheckpointIndex, record: Mapping[str, Any], reader: TensorReader, advance: Advance) -> Iterator[str]:
    """Tensors of the head that are not what the record says."""
    for name, row in record["tensors"].items():
        entry = index.entries.get(name)
        if entry is None:
            yield f"'{name}' of the head is gone"
            continue
        digest = hashlib.sha256()
        for piece in reader.raw(entry):
            digest.update(piece)
            advance(len(piece))
        if (entry.dtype, list(entry.shape)) != (row.get("dtype"), row.get("shape")):
            yield f"'{name}' of the head is {_form(entry)}, it was {row.get('dtype')} {row.get('shape')}"
        elif digest.hexdigest() != row.get("sha256"):
            yield f"'{name}' of the head in {entry.file} has other numbers than at the export"


def _added(index: CheckpointIndex, record: Mapping[str, Any], site: HeadSite | None) -> Iterator[str]:
    """Tensors in the head's scope that the record does not know; what a family leaves alone is the trunk's."""
    if site is None:
        return
    for name in sorted(site.inside(index.entries)):
        if name not in record["tensors"] and not is_left_alone(site, name):
            yield f"'{name}' in {index.entries[name].file} was not in the head that was exported"


def _headers(index: CheckpointIndex, record: Mapping[str, Any]) -> Iterator[str]:
    """Weight files besides the head's whose header is another than at the export."""
    known = record["trunk"]
    heads = {index.entries[name].file for name in record["tensors"] if name in index.entries}
    found = index.storage.headers([file for file in index.files if file in known]).read
    for file, row in known.items():
        if file not in index.files:
            yield f"{file} is gone"
        elif file in found and found[file].sha256 != row.get("header_sha256"):
            yield f"{file} has another header than at the export: names, dtypes or shapes in it have changed"
    for file in index.files:
        if file not in known and file not in heads:
            yield f"{file} was not there at the export"


@dataclass(frozen=True)
class _Pair:
    """A tensor of the base, and the checkpoint's of the same name."""

    base: TensorEntry
    copy: TensorEntry | None
    linked: bool

    @property
    def both(self) -> tuple[TensorEntry, ...]:
        """Those that there are."""
        return (self.base, self.copy) if self.copy else ()


def _pairs(index: CheckpointIndex, base: CheckpointIndex, site: HeadSite | None, head: set[str]) -> list[_Pair]:
    """Every tensor that the checkpoint should have from the base: all but the base's own head."""
    old = old_head(base, likely_site(site.family, base.names, base.config), head) if site else frozenset(head)
    one_file = cache(partial(_one_file, index, base))
    pairs: list[_Pair] = []
    for name, entry in base.entries.items():
        if name not in old:
            copy = index.entries.get(name)
            linked = copy is not None and copy.start == entry.start and one_file(copy.file, entry.file)
            pairs.append(_Pair(entry, copy, linked))
    return pairs


def _one_file(index: CheckpointIndex, base: CheckpointIndex, ours: str, theirs: str) -> bool:
    """Whether the two are one file on the disk, so that its bytes are the same."""
    local = index.storage.is_local and base.storage.is_local
    return local and os.path.samefile(index.root / ours, base.root / theirs)


def _trunk(pairs: list[_Pair], ours: TensorReader, theirs: TensorReader, advance: Advance) -> Iterator[str]:
    for pair in pairs:
        name, copy = pair.base.name, pair.copy
        if copy is None:
            yield f"'{name}' of the base is missing"
        elif (copy.dtype, copy.shape) != (pair.base.dtype, pair.base.shape):
            yield f"'{name}' is {_form(copy)}, the base has {_form(pair.base)}"
        elif not pair.linked and not _equal(pair, ours, theirs, advance):
            yield f"'{name}' in {copy.file} has other bytes than the base's in {pair.base.file}"


def _equal(pair: _Pair, ours: TensorReader, theirs: TensorReader, advance: Advance) -> bool:
    assert pair.copy is not None
    for left, right in zip(ours.raw(pair.copy), theirs.raw(pair.base), strict=True):
        advance(2 * len(left))
        if left != right:
            return False
    return True


def _strangers(index: CheckpointIndex, base: CheckpointIndex, head: set[str]) -> Iterator[str]:
    for name in sorted(index.entries.keys() - base.entries.keys() - head):
        yield f"'{name}' in {index.entries[name].file} is neither the base's nor the head's"


def _form(entry: TensorEntry) -> str:
    return f"{entry.dtype} {list(entry.shape)}"
