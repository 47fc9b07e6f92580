"""Mending what needs no choice: the index, the declared depths, the lists of what is not quantised, second copies of a tensor.

All of it is one update in place under a journal (`mtp_zoo.journal`): a kill leaves the old files or the new ones, and
`mtp-zoo rollback` brings the old ones back. No byte of a tensor is made up or changed. A file that is a hard link into another
checkpoint is replaced, never written to.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtp_zoo.checkpoint import INDEX_NAME, CheckpointIndex, TensorEntry, TensorReader
from mtp_zoo.diagnosis.finding import Diagnosis
from mtp_zoo.diagnosis.stale import stale_copies
from mtp_zoo.diagnosis.subject import Subject
from mtp_zoo.errors import BrokenCheckpointError, ExportError, ModelConfigError, MTPZooError, UnsafeCheckpointError
from mtp_zoo.index_file import encode_index
from mtp_zoo.journal import owned, updating
from mtp_zoo.modelconfig import ModelConfig
from mtp_zoo.overlay import Overlay, Piece
from mtp_zoo.quant_ignore import quantized_by
from mtp_zoo.quant_patch import plan_patch
from mtp_zoo.quantization import quantization_settings
from mtp_zoo.safetensors_header import encode_header, read_header
from mtp_zoo.storage import LocalStorage


@dataclass
class Mending:
    """What is to be done.

    Attributes:
        texts: content of small files that are written anew.
        shards: weight files that are written anew, and what each keeps.
        gone: weight files of which nothing is kept.
        done: all of it in words.
    """

    texts: dict[str, str] = field(default_factory=dict)
    shards: dict[str, tuple[TensorEntry, ...]] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)


def mend(diagnosis: Diagnosis) -> tuple[str, ...]:
    """Do what is safe about the findings of `doctor`; returns what was done, in words.

    A checkpoint whose index can't be read gets a new one, and nothing else before the next call.

    Args:
        diagnosis: of a directory.

    Raises:
        ExportError: the checkpoint is not in a directory of its own, another process is updating it, or writing failed; the
            files are as they were.
    """
    root = _own_directory(diagnosis.source)
    with owned(root):
        if diagnosis.has("MZ014"):  # taken back by whoever comes to own the directory
            return ("the update that was cut short is taken back",)
        mending = _unlisted(root) if diagnosis.has("MZ001") else _listed(root)
        if not mending.done:
            return ()
        try:
            with updating(root, mending.gone) as new:
                _write(new, mending, root)
        except OSError as error:
            raise ExportError(
                f"Mending {root}: {error.strerror or error} ({error.filename}). The files are as they were.",
                remedy="Mend the named path or free disk space, then run doctor again.",
            ) from error
    return tuple(mending.done)


def _own_directory(source: str) -> Path:
    root = Path(os.path.abspath(Path(source).expanduser()))
    if not root.is_dir() or (root / "snapshots").is_dir() or root.parent.name == "snapshots":
        raise ExportError(
            f"Mending {source}: expected a directory of your own, got "
            + ("a part of a hub cache." if root.is_dir() else "what is no directory."),
            remedy="Copy the checkpoint into one (`hf download ... --local-dir DIR`), and mend that.",
        )
    return root


def _write(new: Path, mending: Mending, root: Path) -> None:
    overlay = Overlay(new, link=False)
    reader = TensorReader(CheckpointIndex.open(root)) if mending.shards else None
    for file, entries in mending.shards.items():
        assert reader is not None
        overlay.rewrite(file, _shard(root, file, entries, reader))
        _compare(new, root, file, entries)
    for name, text in mending.texts.items():
        overlay.write(name, [text.encode()])


def _shard(root: Path, file: str, entries: Collection[TensorEntry], reader: TensorReader) -> Iterator[Piece]:
    metadata = read_header(root, file).metadata
    yield encode_header(((e.name, e.dtype, e.shape, e.nbytes) for e in entries), metadata)
    for entry in entries:
        yield from reader.raw(entry)


def _compare(new: Path, root: Path, file: str, entries: Collection[TensorEntry]) -> None:
    """Refuse a file that does not read back as what it was written from."""
    written = {entry.name: entry for entry in read_header(new, file).entries}
    fresh, old = LocalStorage(new), LocalStorage(root)
    for entry in entries:
        ours, theirs = bytearray(entry.nbytes), bytearray(entry.nbytes)
        fresh.fill(file, written[entry.name].start, memoryview(ours))
        old.fill(file, entry.start, memoryview(theirs))
        if ours != theirs or (entry.dtype, entry.shape) != (written[entry.name].dtype, written[entry.name].shape):
            raise ExportError(
                f"Mending {root}: '{entry.name}' of {file} does not read back as it was written. The files are as they were.",
                remedy="Check the disk.",
            )


def _unlisted(root: Path) -> Mending:
    """A new index for one that can't be read, where every file can and no two hold the same name."""
    storage = LocalStorage(root)
    headers = storage.headers(sorted(storage.weight_files()))
    entries = [entry for header in headers.read.values() for entry in header.entries]
    weight_map = {entry.name: entry.file for entry in entries}
    if headers.corrupt or not entries or len(weight_map) < len(entries):
        return Mending()
    text = encode_index(weight_map, {"total_size": sum(entry.nbytes for entry in entries)})
    return Mending({INDEX_NAME: text}, done=[f"{INDEX_NAME}: written anew from {len(headers.read)} files"])


def _listed(root: Path) -> Mending:
    try:
        subject = Subject(CheckpointIndex.open(root))
    except (BrokenCheckpointError, ModelConfigError, UnsafeCheckpointError):
        return Mending()
    mending = Mending()
    kept, dropped = stale_copies(subject)
    _drop(mending, subject, dropped)
    _list(mending, subject, kept)
    _declare(mending, subject)
    return mending


def _drop(mending: Mending, subject: Subject, dropped: Mapping[str, set[str]]) -> None:
    for file, names in dropped.items():
        entries = read_header(subject.index.root, file).entries
        left = tuple(entry for entry in entries if entry.name not in names)
        if left:
            mending.shards[file] = left
        else:
            mending.gone.append(file)
        rest = f"{len(left)} left" if left else "removed, nothing was left in it"
        mending.done.append(f"{file}: {len(names)} tensors that another file holds dropped, {rest}")


def _list(mending: Mending, subject: Subject, kept: Mapping[str, str]) -> None:
    """The index as the files are; what is in no readable file stays listed, so that its loss is not hidden."""
    index = subject.index
    if not index.listed and len(index.files) - len(mending.gone) < 2:
        return
    where = {name: kept.get(name, entry.file) for name, entry in index.entries.items()}
    files = _worth_listing(subject, where)
    found = {name: file for name, file in where.items() if file in files}
    weight_map = {**index.weight_map, **found}
    metadata = dict(index.metadata)
    if weight_map.keys() == found.keys():  # else nobody knows the sizes of what is lost
        metadata["total_size"] = sum(index.entries[name].nbytes for name in found)
    changed = [name for name, file in weight_map.items() if index.weight_map.get(name) != file]
    if changed or metadata != index.metadata:
        mending.texts[INDEX_NAME] = encode_index(weight_map, metadata)
        mending.done.append(
            f"{INDEX_NAME}: {len(changed)} names corrected or added, total_size {metadata.get('total_size')}"
        )


def _worth_listing(subject: Subject, where: Mapping[str, str]) -> set[str]:
    """Files that the index names, that hold what it names, or that hold the head and nothing else.

    Another file that no index names may be a second copy of the model under other names: it is left alone.
    """
    index, site = subject.index, subject.site
    if not index.listed:
        return set(where.values())
    held = {file: [name for name, place in where.items() if place == file] for file in set(where.values())}
    named = {*index.weight_map.values(), *(where[name] for name in index.weight_map if name in where)}
    return {file for file, names in held.items() if file in named or (site and all(map(site.in_scope, names)))}


def _declare(mending: Mending, subject: Subject) -> None:
    """The config's count of depths, and its lists of what is not quantised, where the head is whole."""
    site = subject.site
    try:
        whole = site is not None and subject.planned is not None and not subject.planned.problems
        count = subject.undeclared if whole else None
    except MTPZooError:
        return
    if site is None or not whole:
        return
    config = subject.index.config
    content, done = dict(config.raw), []
    modules, floats = subject.float_modules
    if any(quantized_by(quantization_settings(config), modules).values()):
        patch = plan_patch(subject.index, modules, floats)
        content = dict(patch.config or content)
        mending.texts |= {name: _json(side) for name, side in patch.files.items()}
        changed = [name for name in ("config.json",) if content != config.raw] + list(patch.files)
        done = [f"{name}: float modules of the head listed" for name in changed]
    if count is not None and site.family.count_field is not None:
        content = ModelConfig(content, config.path).with_value(site.family.count_field, count)
        done.append(f"config.json: {site.family.count_field} set to {count}")
    if content != config.raw:
        mending.texts["config.json"] = _json(content)
    mending.done += done


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
