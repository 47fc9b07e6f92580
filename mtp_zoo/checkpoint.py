"""CheckpointIndex: what a checkpoint holds, from headers only, and TensorReader: its tensors, planned ranges only.

The index file is compared with the headers of the weight files and never trusted. A fault stops a reader only where it
touches the tensors asked for: a head can be read out of a checkpoint of which some trunk shard is missing.

Of a directory every header is read. Of a repository on the Hub, where each costs a request, only those of the files that hold
what the caller needs, and of those that the index leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from mtp_zoo.checkpoint_faults import REMEDIES, Fault, find_faults
from mtp_zoo.checkpoint_source import locate
from mtp_zoo.containment import refuse_escapes
from mtp_zoo.errors import BrokenCheckpointError, SourceNotFoundError, UnsafeCheckpointError
from mtp_zoo.index_file import CONVERT_PICKLES, INDEX_NAME, PICKLE_SUFFIXES, read_index
from mtp_zoo.journal import refuse_half_updated
from mtp_zoo.modelconfig import ModelConfig
from mtp_zoo.safetensors_header import DTYPES, Header, TensorEntry, collector_paused, stored_dtype, torch_dtype
from mtp_zoo.storage import ByteRange, Storage

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "DTYPES",
    "INDEX_NAME",
    "CheckpointIndex",
    "Fault",
    "TensorEntry",
    "TensorReader",
    "stored_dtype",
    "torch_dtype",
]

Need: TypeAlias = Callable[[frozenset[str], ModelConfig], Callable[[str], bool]]
"""From the listed names and the config: which tensors a reader may ask for."""


@dataclass(frozen=True)
class CheckpointIndex:
    """A headers-only view of one checkpoint.

    Attributes:
        source: what was opened, as given.
        storage: where its files lie, and what their bytes are read from.
        config: its config.json.
        entries: every readable tensor, where it really is, by file and offset. Of a tensor that is in two files, the
            one that the index names.
        headers: of the files that could be read.
        faults: what is wrong, fatal or not; see `require`, `check` and `verify`.
        files: weight files on disk, readable or not, sorted: those at the top of the directory and those listed.
        weight_map: tensor name -> file, as the index file says; empty where there is none.
        metadata: what the index file says besides.
        listed: whether there is an index file.
        unread: files whose headers were left unread because they hold nothing that was needed.
        header_bytes: bytes of headers and index that were read to make this view.
    """

    source: str
    storage: Storage
    config: ModelConfig
    entries: Mapping[str, TensorEntry]
    headers: Mapping[str, Header]
    faults: tuple[Fault, ...]
    files: tuple[str, ...]
    weight_map: Mapping[str, str]
    metadata: Mapping[str, Any]
    listed: bool
    unread: frozenset[str]
    header_bytes: int

    @classmethod
    @collector_paused()
    def open(cls, source: str | Path, *, revision: str | None = None, need: Need | None = None) -> CheckpointIndex:
        """Read config.json, the index and the headers.

        Args:
            source: a directory, a Hugging Face cache tree, or a repository id.
            revision: branch, tag or commit, for the latter two.
            need: which tensors will be asked for; where the files are on the Hub, only headers that they need are read.
                None reads all.

        Raises:
            SourceNotFoundError: no such place, or no weights in it.
            HubReadError: the Hub can't be reached, or does not give what was asked for.
            UnsafeCheckpointError: only pickled weights, a listed path or a link that leads out of the directory, an
                unbounded header.
            BrokenCheckpointError: the index is unreadable, no weight file is readable, or an update in place was cut short.
            ModelConfigError: config.json is missing or unreadable.
        """
        storage = locate(source, revision)
        refuse_half_updated(storage.root)
        on_disk = storage.weight_files()
        index_size, weight_map, metadata = read_index(storage.root)
        if not on_disk and weight_map is None:
            raise _no_weights(str(source), storage)
        candidates = sorted(on_disk | set((weight_map or {}).values()))
        refuse_escapes(storage.root, ["config.json", INDEX_NAME, *candidates])
        config = ModelConfig.read(storage.root)
        missing = [file for file in candidates if not storage.exists(file)]
        files = tuple(file for file in candidates if file not in missing)
        wanted = _needed(files, weight_map, config, None if storage.is_local else need)
        headers, corrupt = storage.headers(wanted)
        faults = find_faults(weight_map, headers, missing, corrupt)
        if not headers:
            raise _broken(f"Opening {source}: none of its weight files can be read.", faults)
        return cls(
            source=str(source),
            storage=storage,
            config=config,
            entries=_entries(headers, weight_map or {}),
            headers=headers,
            faults=faults,
            files=files,
            weight_map=weight_map or {},
            metadata=metadata,
            listed=weight_map is not None,
            unread=frozenset(files).difference(wanted),
            header_bytes=index_size + sum(header.nbytes for header in headers.values()),
        )

    @property
    def root(self) -> Path:
        """The directory; of a checkpoint on the Hub, the one that holds copies of its small files."""
        return self.storage.root

    @property
    def revision(self) -> str | None:
        """The commit, where the files have one."""
        return self.storage.revision

    def require_local(self, act: str) -> Path:
        """The directory that holds every file.

        Raises:
            SourceNotFoundError: the weights are on the Hub; `act` says what needs them here.
        """
        if self.storage.is_local:
            return self.root
        at = f" --revision {self.revision}" if self.revision else ""
        raise SourceNotFoundError(
            f"{act} {self.source}: its weights are on the Hub, and all of them are needed on this machine.",
            remedy=f"Run `hf download {self.source}{at}` first.",
        )

    @cached_property
    def names(self) -> frozenset[str]:
        """Every tensor name that a readable file holds or the index lists: what the checkpoint means to hold."""
        return frozenset(self.entries).union(self.weight_map)

    def require(self, names: Iterable[str]) -> list[TensorEntry]:
        """The entries of `names`, in that order.

        Raises:
            BrokenCheckpointError: with every name that is in no file, and every fatal fault that touches one of them.
        """
        wanted = list(names)
        lost = {name for name in wanted if name not in self.entries}
        fatal = [fault for fault in self.faults if fault.fatal]
        touching = [fault for fault in fatal if not set(wanted).isdisjoint(fault.tensors)]
        unexplained = sorted(lost.difference(*(fault.tensors for fault in touching)))
        blind = [fault for fault in fatal if not fault.tensors] if unexplained else []
        problems = [*touching, *(f"'{name}' is in no readable file." for name in unexplained), *blind]
        if problems:
            raise _broken(f"Reading {len(wanted)} tensors of {self.source}: {len(problems)} problems.", problems)
        return [self.entries[name] for name in wanted]

    def check(self, in_scope: Callable[[str], bool]) -> None:
        """Refuse a checkpoint in which some tensor in scope can't be trusted.

        A missing or corrupt file touches the names that the index says it holds. Where there is no index, it may hold
        any name, so it touches every scope.

        Raises:
            BrokenCheckpointError: with every such fault.
        """
        problems = [
            fault
            for fault in self.faults
            if fault.fatal and (any(map(in_scope, fault.tensors)) or not (fault.tensors or self.listed))
        ]
        if problems:
            raise _broken(f"Checking {self.source}: {len(problems)} faults touch the tensors asked for.", problems)

    def verify(self, *, besides: Callable[[str], bool] = lambda _: False) -> None:
        """Refuse a checkpoint that is not whole.

        Args:
            besides: tensors that will be replaced; a fault that touches no other is none.

        Raises:
            BrokenCheckpointError: with every fatal fault.
        """
        known = [fault for fault in self.faults if fault.fatal]
        problems = [fault for fault in known if not fault.tensors or not all(map(besides, fault.tensors))]
        if problems:
            raise _broken(f"Checking the whole of {self.source}: {len(problems)} faults.", problems)


class TensorReader:
    """Reads tensors of one checkpoint, each by one range read, and counts the bytes.

    Args:
        index: whose entries will be read.

    Attributes:
        bytes_read: bytes of tensors read so far.
    """

    def __init__(self, index: CheckpointIndex) -> None:
        self._index = index
        self.bytes_read = 0

    def read_into(self, entry: TensorEntry, out: Tensor) -> None:
        """Fill `out`, a contiguous CPU tensor of the entry's dtype and shape, straight from the file.

        Raises:
            BrokenCheckpointError: the file has become shorter than its header says.
        """
        import torch

        assert out.is_contiguous()
        assert (out.device.type, out.dtype, tuple(out.shape)) == ("cpu", torch_dtype(entry.dtype), entry.shape)
        if entry.nbytes:
            self._fill(entry, 0, out.detach().reshape(-1).view(torch.uint8).numpy().data)

    def read(self, entry: TensorEntry) -> Tensor:
        """The tensor, in memory of its own (never a view of the file)."""
        import torch

        out = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="cpu")
        self.read_into(entry, out)
        return out

    def raw(
        self, entry: TensorEntry, chunk: int = 1 << 22, *, start: int = 0, stop: int | None = None
    ) -> Iterator[bytearray]:
        """The tensor's bytes, from `start` up to `stop` (its end), in pieces of at most `chunk`; the next overwrites each."""
        end = entry.nbytes if stop is None else stop
        piece = bytearray()
        for offset in range(start, end, chunk):
            size = min(chunk, end - offset)
            if len(piece) != size:  # a new buffer for every piece would cost more than reading does
                piece = bytearray(size)
            self._fill(entry, offset, memoryview(piece))
            yield piece

    def fetch(self, entries: Iterable[TensorEntry]) -> None:
        """Announce what will be read whole, so that a checkpoint on the Hub gives it in few, parallel requests."""
        self._index.storage.fetch(ByteRange(entry.file, entry.start, entry.end) for entry in entries if entry.nbytes)

    def _fill(self, entry: TensorEntry, offset: int, view: memoryview) -> None:
        count = self._index.storage.fill(entry.file, entry.start + offset, view)
        self.bytes_read += count
        if count < len(view):
            raise BrokenCheckpointError(
                f"Reading '{entry.name}' of {entry.file}: expected {len(view)} bytes, got {count}.",
                remedy=REMEDIES["corrupt_file"],
            )


def _needed(
    files: Sequence[str], weight_map: Mapping[str, str] | None, config: ModelConfig, need: Need | None
) -> list[str]:
    """The files whose headers are read."""
    if need is None or weight_map is None:
        return list(files)
    asked = need(frozenset(weight_map), config)
    holding = {file for name, file in weight_map.items() if asked(name)}
    listed = set(weight_map.values())
    return [file for file in files if file in holding or file not in listed]


def _no_weights(source: str, storage: Storage) -> SourceNotFoundError | UnsafeCheckpointError:
    pickles = sorted(name for name in storage.file_names() if name.endswith(PICKLE_SUFFIXES))
    if pickles:
        return UnsafeCheckpointError(
            f"Opening {source}: its weights are pickled ({', '.join(pickles[:3])}); reading them would run code.",
            remedy=CONVERT_PICKLES,
        )
    return SourceNotFoundError(
        f"Opening {source}: no *.safetensors file and no {INDEX_NAME} in it.",
        remedy="Point at the directory that holds the weights, or download them (`hf download org/name`).",
    )


def _entries(headers: Mapping[str, Header], weight_map: Mapping[str, str]) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for file, header in headers.items():
        for entry in header.entries:
            if entry.name not in entries or weight_map.get(entry.name) == file:
                entries[entry.name] = entry
    return entries


def _broken(message: str, problems: Iterable[Fault | str]) -> BrokenCheckpointError:
    problems = list(problems)
    remedies = [REMEDIES[problem.kind] for problem in problems if isinstance(problem, Fault)] or [REMEDIES["absent"]]
    return BrokenCheckpointError(message, remedy=remedies[0], problems=problems)
