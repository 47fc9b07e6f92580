"""Where the files of one checkpoint lie, and how bytes come out of them.

A local directory is read in place. A repository on the Hub is read by byte ranges: its small files are put into the Hugging
Face cache, whose snapshot directory is then `root`, and the weight files stay where they are (`mtp_zoo.hub_storage`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from mtp_zoo.errors import BrokenCheckpointError
from mtp_zoo.safetensors_header import Header, read_header


class ByteRange(NamedTuple):
    """Bytes `start` up to `end` of one file."""

    file: str
    start: int
    end: int


class Headers(NamedTuple):
    """The headers that could be read, by file, and why the others could not."""

    read: dict[str, Header]
    corrupt: dict[str, str]


class Storage(Protocol):
    """One checkpoint's files."""

    @property
    def root(self) -> Path:
        """A local directory that holds at least config.json and, where there is one, the index."""
        ...

    @property
    def revision(self) -> str | None:
        """The commit, where the files have one."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether every file lies in `root`."""
        ...

    @property
    def notices(self) -> tuple[str, ...]:
        """What a reader of the checkpoint has to know of where it came from, in words."""
        ...

    @property
    def bytes_moved(self) -> int:
        """Bytes that came over the network so far."""
        ...

    def file_names(self) -> set[str]:
        """Every name at the top."""
        ...

    def weight_files(self) -> set[str]:
        """Safetensors files at the top, links to nothing included."""
        ...

    def small_file(self, file: str) -> Path | None:
        """Where a small file, a tokenizer's for example, lies on this machine, fetched if need be; None if there is none."""
        ...

    def exists(self, file: str) -> bool:
        """Whether there is such a file."""
        ...

    def headers(self, files: Sequence[str]) -> Headers:
        """The headers of `files`.

        Raises:
            UnsafeCheckpointError: one claims to be longer than readers allow.
        """
        ...

    def fetch(self, ranges: Iterable[ByteRange]) -> None:
        """Bring near what will be read with `fill`, all at once; a directory has nothing to do."""
        ...

    def fill(self, file: str, start: int, view: memoryview) -> int:
        """Fill `view` from byte `start` of a file; returns how many bytes there were, fewer where the file ends."""
        ...


@dataclass(frozen=True, slots=True)
class LocalStorage:
    """A directory, and the commit it is at where it lies in a Hugging Face cache."""

    root: Path
    revision: str | None = None
    notices: tuple[str, ...] = ()
    is_local: bool = True
    bytes_moved: int = 0

    def file_names(self) -> set[str]:
        """See `Storage.file_names`."""
        return set(os.listdir(self.root))

    def small_file(self, file: str) -> Path | None:
        """See `Storage.small_file`."""
        path = self.root / file
        return path if path.is_file() else None

    def weight_files(self) -> set[str]:
        """Safetensors files at the top of the directory, links to nothing included."""
        found = self.root.glob("*.safetensors")
        return {path.name for path in found if not path.name.startswith(".") and not path.is_dir()}

    def exists(self, file: str) -> bool:
        """Whether there is such a file, and no link to nothing."""
        return os.path.exists(self.root / file)

    def headers(self, files: Sequence[str]) -> Headers:
        """See `Storage.headers`."""
        found = Headers({}, {})
        for file in files:
            try:
                found.read[file] = read_header(self.root, file)
            except BrokenCheckpointError as error:
                found.corrupt[file] = error.message
        return found

    def fetch(self, ranges: Iterable[ByteRange]) -> None:
        """Nothing to do."""

    def fill(self, file: str, start: int, view: memoryview) -> int:
        """See `Storage.fill`."""
        wanted = len(view)
        with (self.root / file).open("rb", buffering=0) as stream:
            stream.seek(start)
            while view and (count := stream.readinto(view)):  # one call reads at most 2 GiB
                view = view[count:]
        return wanted - len(view)
