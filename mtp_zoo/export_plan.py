"""Which file of an exported checkpoint comes from where. Decided from headers, before anything is written."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import count
from typing import Any, Literal

from mtp_zoo.checkpoint import INDEX_NAME, CheckpointIndex, TensorEntry
from mtp_zoo.containment import refuse_escapes
from mtp_zoo.errors import ExportError
from mtp_zoo.export_form import HeadForm, HeadTensor, is_left_alone
from mtp_zoo.journal import UNDO, UPDATE
from mtp_zoo.keymap import Binding
from mtp_zoo.overlay import files_below
from mtp_zoo.quant_ignore import HeadModules
from mtp_zoo.quant_patch import QuantPatch, plan_patch
from mtp_zoo.safetensors_header import Header, encode_header
from mtp_zoo.site import HeadSite

PROVENANCE_NAME = "mtp_zoo.json"
CARD_NAME = "README.md"
SINGLE_FILE = "model.safetensors"
HEAD_FILES = tuple(f"{stem}_mtp_head.safetensors" for stem in ("model", "z", "zz", "zzzz"))
PICKLED_WEIGHTS = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
NO_MODEL_FOLDERS = (".git", ".cache", UPDATE, UNDO)
"""Version control, download records and what updates in place keep: not part of the model, and as large as it."""


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One weight file of the output that comes from the base.

    Attributes:
        source: its path in the base.
        name: its path in the output.
        action: `link` (as it is) or `rewrite` (without the old head).
        entries: the base's tensors that it keeps, in the order of their bytes.
        header: the header that a rewritten file gets.
        header_sha256: of the header that the file has in the output.
    """

    source: str
    name: str
    action: Literal["link", "rewrite"]
    entries: tuple[TensorEntry, ...]
    header: bytes
    header_sha256: str


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """The whole output.

    Attributes:
        bindings: the head's stored layout.
        shards: weight files that come from the base.
        head_file, form, head_header: the new shard, how the head is stored in it, its header.
        patch: how the description of what is quantised changes.
        weight_map, total_size: content of the new index.
        others: files that are copied.
    """

    bindings: tuple[Binding, ...]
    shards: tuple[ShardPlan, ...]
    head_file: str
    form: HeadForm
    head_header: bytes
    patch: QuantPatch
    weight_map: Mapping[str, str]
    total_size: int
    others: tuple[str, ...]

    @property
    def head(self) -> tuple[HeadTensor, ...]:
        """The new head's tensors, in the order of their bytes."""
        return self.form.tensors


def plan_export(index: CheckpointIndex, site: HeadSite, bindings: tuple[Binding, ...], form: HeadForm) -> ExportPlan:
    """Decide the output's files.

    Args:
        index: of the base; must be whole.
        site: says which of the base's tensors are an old head.
        bindings: the head's stored layout.
        form: how the new head is stored.
    """
    head, floats = form.tensors, form.floats
    modules = HeadModules.of(site, floats.items(), whole=not form.quantized)
    patch = plan_patch(index, modules, floats)
    old = old_head(index, site, {tensor.name for tensor in head})
    shards = tuple(_shards(index, old))
    head_file = name_that_sorts_last(shard.name for shard in shards)
    listed = {shard.source for shard in shards if _is_listed(index, shard.source)}
    weight_map = {e.name: shard.name for shard in shards if shard.source in listed for e in shard.entries}
    kept = sum(e.nbytes for shard in shards if shard.source in listed for e in shard.entries)
    return ExportPlan(
        bindings=bindings,
        shards=shards,
        head_file=head_file,
        form=form,
        head_header=encode_header(((t.name, t.dtype, t.shape, t.nbytes) for t in head), {"format": "pt"}),
        patch=patch,
        weight_map={**weight_map, **{tensor.name: head_file for tensor in head}},
        total_size=kept + sum(tensor.nbytes for tensor in head),
        others=tuple(path for path in _others(index) if path not in patch.files),
    )


def old_head(index: CheckpointIndex, site: HeadSite, new: set[str]) -> frozenset[str]:
    """Names of the base that must not survive: the head's scope, save what the family deliberately leaves alone."""
    return frozenset(
        name for name in index.entries if name in new or (site.in_scope(name) and not is_left_alone(site, name))
    )


def _shards(index: CheckpointIndex, old: frozenset[str]) -> Iterable[ShardPlan]:
    for file, header in sorted(index.headers.items()):  # what can't be read is all of the old head: see verify
        kept = tuple(entry for entry in header.entries if entry.name not in old)
        name = _unambiguous(file, index.files)
        if len(kept) == len(header.entries):
            yield ShardPlan(file, name, "link", kept, b"", header.sha256)
        elif kept:
            shorter = _shorter(header, kept)
            yield ShardPlan(file, name, "rewrite", kept, shorter, hashlib.sha256(shorter).hexdigest())


def _shorter(header: Header, kept: Iterable[TensorEntry]) -> bytes:
    return encode_header(((e.name, e.dtype, e.shape, e.nbytes) for e in kept), header.metadata)


def _unambiguous(file: str, taken: Iterable[str]) -> str:
    """The file's name in the output, which always has an index.

    Many readers, transformers among them, open `model.safetensors` alone where it exists and never look at an index
    beside it, so they would miss the head: such a file gets a shard's name.
    """
    if file != SINGLE_FILE:
        return file
    names = (f"model-{number:05d}-of-00001.safetensors" for number in count(1))
    return next(name for name in names if name not in taken)


def _is_listed(index: CheckpointIndex, file: str) -> bool:
    """Whether the output's index lists the file: a file that engines do not open in the base stays unopened."""
    return not index.listed or file == SINGLE_FILE or file in index.weight_map.values()


def _others(index: CheckpointIndex) -> list[str]:
    ours = {*index.files, INDEX_NAME, PROVENANCE_NAME, CARD_NAME, "config.json"}
    below = files_below(index.root, skip_folders=NO_MODEL_FOLDERS)
    others = [path for path in below if path not in ours and not any(fnmatch(path, p) for p in PICKLED_WEIGHTS)]
    refuse_escapes(index.root, others)
    return others


def name_that_sorts_last(names: Iterable[str]) -> str:
    """A file name behind all of `names`, in plain and in natural order.

    Engines read weight files in one of these orders and let the last copy of a tensor win. The name is never
    `mtp.safetensors`, which SGLang opens on its own account.

    Raises:
        ExportError: some name sorts behind every candidate.
    """
    names = sorted(names)
    for candidate in HEAD_FILES:
        if all(name < candidate and natural_order(name) < natural_order(candidate) for name in names):
            return candidate
    raise ExportError(
        f"Naming the head's file: '{names[-1]}' sorts behind every name tried ({', '.join(HEAD_FILES)}).",
        remedy="Rename that file, and correct the index.",
    )


def natural_order(path: str) -> list[Any]:
    """Sorting key that compares numbers in a file's name as numbers; text and numbers alternate, text first."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path.rpartition("/")[2])]
