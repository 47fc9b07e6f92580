"""Bytes of files on the Hub that were read before, kept by the content they belong to.

One folder a file version, named by its hash; in it one file a range, `<start>-<end>-<16 digits of its sha256>`, moved into
place when it is whole and compared with its hash before it is first used. Processes share the folder without locks: what one
writes is whole, and what two write is the same. Example: of 150-400, with 100-180 and 180-300 kept, 300-400 is missing.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
import uuid
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import RLock
from typing import NamedTuple

from huggingface_hub import cached_assets_path

from mtp_zoo.errors import HubReadError

PIECE = 1 << 20
ABANDONED_SECONDS = 24 * 3600.0
"""Age after which an unfinished file was left by a process that was killed."""

NAME = re.compile(r"(\d{1,16})-(\d{1,16})-([0-9a-f]{16})")


class Kept(NamedTuple):
    """One range on this machine: bytes `start` up to `end` of the version."""

    start: int
    end: int
    path: Path


class RangeCache:
    """The ranges that are kept.

    Args:
        folder: where; huggingface_hub's assets folder where not given (HF_ASSETS_CACHE, or `assets` in HF_HOME).
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or cached_assets_path("mtp_zoo", namespace="ranges", subfolder="v1")
        self._kept: dict[str, list[Kept]] = {}
        self._whole: set[Path] = set()
        self._lock = RLock()

    def missing(self, etag: str, start: int, end: int) -> list[tuple[int, int]]:
        """The parts of bytes `start` up to `end` of a version that are not kept, in order."""
        gaps: list[tuple[int, int]] = []
        for kept in self._overlapping(etag, start, end):
            if kept.start > start:
                gaps.append((start, kept.start))
            start = max(start, kept.end)
        return [*gaps, (start, end)] if start < end else gaps

    def read(self, etag: str, start: int, view: memoryview) -> None:
        """Fill `view` from byte `start` of a version; nothing of it may be missing."""
        at, end = start, start + len(view)
        for kept in self._overlapping(etag, start, end):
            stop = min(kept.end, end)
            if stop <= at:
                continue
            assert kept.start <= at
            with kept.path.open("rb", buffering=0) as stream:
                stream.seek(at - kept.start)
                while at < stop:  # one call reads at most 2 GiB
                    at += stream.readinto(view[at - start : stop - start])
        assert at == end

    @contextmanager
    def writing(self, etag: str, start: int) -> Generator[RangeWriter]:
        """A writer of bytes from `start` on; what it got is kept when the block ends, in whatever way that is.

        Raises:
            HubReadError: the folder can't be written.
        """
        folder = self._folder / etag
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _drop_abandoned(folder)
            with RangeWriter(folder / f".{uuid.uuid4().hex}.part", start) as writer:
                try:
                    yield writer
                finally:
                    self._keep(etag, writer)
        except OSError as error:
            raise HubReadError(
                f"Keeping bytes that were read from the Hub in {folder}: {error.strerror or error}.",
                remedy="Make room there, or point HF_ASSETS_CACHE (or HF_HOME) at another disk.",
            ) from error

    def _keep(self, etag: str, writer: RangeWriter) -> None:
        kept = writer.publish()
        if kept is not None:
            with self._lock:
                self._whole.add(kept.path)
                self._kept[etag] = sorted([*self._kept.get(etag, ()), kept])

    def _overlapping(self, etag: str, start: int, end: int) -> list[Kept]:
        """Whole ranges that overlap this one, by start; the folder is listed once a version."""
        with self._lock:
            if etag not in self._kept:
                self._kept[etag] = sorted(_listed(self._folder / etag))
            touching = [kept for kept in self._kept[etag] if kept.start < end and kept.end > start]
            damaged = [kept for kept in touching if not self._is_whole(kept)]
            for kept in damaged:
                self._kept[etag].remove(kept)
                with suppress(OSError):
                    kept.path.unlink()
            return [kept for kept in touching if kept not in damaged]

    def _is_whole(self, kept: Kept) -> bool:
        if kept.path not in self._whole:
            digest = hashlib.sha256()
            try:
                with kept.path.open("rb") as stream:
                    while piece := stream.read(PIECE):
                        digest.update(piece)
                    size = stream.tell()
            except OSError:
                return False
            if size != kept.end - kept.start or not kept.path.name.endswith(digest.hexdigest()[:16]):
                return False
            self._whole.add(kept.path)
        return True


class RangeWriter:
    """One range on its way into the cache."""

    def __init__(self, path: Path, start: int) -> None:
        self._path = path
        self._start = self.end = start
        self._digest = hashlib.sha256()

    def __enter__(self) -> RangeWriter:
        self._stream = self._path.open("xb")
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._path.unlink(missing_ok=True)

    def write(self, piece: bytes) -> None:
        """Append."""
        self._stream.write(piece)
        self._digest.update(piece)
        self.end += len(piece)

    def publish(self) -> Kept | None:
        """Move what arrived into place; None where nothing did."""
        self._stream.close()
        if self.end == self._start:
            return None
        name = f"{self._start}-{self.end}-{self._digest.hexdigest()[:16]}"
        place = self._path.with_name(name)
        os.replace(self._path, place)
        return Kept(self._start, self.end, place)


def _listed(folder: Path) -> Iterator[Kept]:
    with suppress(FileNotFoundError):
        for path in folder.iterdir():
            if name := NAME.fullmatch(path.name):
                yield Kept(int(name[1]), int(name[2]), path)


def _drop_abandoned(folder: Path) -> None:
    oldest = time.time() - ABANDONED_SECONDS
    for path in folder.glob(".*.part"):
        with suppress(OSError):
            if path.stat().st_mtime < oldest:
                path.unlink()
