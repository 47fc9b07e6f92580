"""A checkpoint on the Hub, read by byte ranges: one commit, small files in the Hugging Face cache, weights where they are.

Bytes that came once are kept on this machine by the hash of their file, so a second run reads nothing, and needs no Hub.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.constants import is_offline_mode
from huggingface_hub.errors import RevisionNotFoundError
from huggingface_hub.utils import tqdm

from mtp_zoo.cache_tree import cached_snapshot, referenced, tree_of
from mtp_zoo.errors import BrokenCheckpointError, HubReadError, SourceNotFoundError
from mtp_zoo.hub_cache import RangeCache
from mtp_zoo.hub_http import patiently
from mtp_zoo.hub_listing import COMMIT, Listing, ask_listing, kept_listing
from mtp_zoo.hub_ranges import RangeReader
from mtp_zoo.index_file import INDEX_NAME
from mtp_zoo.safetensors_header import LFS_POINTER, decode_header, header_length
from mtp_zoo.storage import ByteRange, Headers, LocalStorage, Storage

CONFIG_NAME = "config.json"
FIRST_BYTES = 1 << 16
"""Bytes of a file that the first request for its header reads; a longer header takes a second."""

TRIES_WITH_CACHE = 2
"""Failures in a row after which a snapshot in the cache is taken instead of the Hub's answer."""

TRIES_OF_DOWNLOAD = 3
"""huggingface_hub's download has patience of its own."""


def open_repository(repo_id: str, revision: str | None) -> Storage:
    """The files of one commit: on this machine if the cache holds all weights, else on the Hub.

    Raises:
        SourceNotFoundError: there is no such repository or revision, or no access to it.
        HubReadError: the Hub can't be reached, and the cache doesn't hold the repository.
        ChangedOnHubError: a small file is not the one that is listed.
    """
    if is_offline_mode():
        return _from_cache(repo_id, revision, "huggingface_hub is offline (HF_HUB_OFFLINE)")
    try:
        listing = _pin(repo_id, revision)
    except (HubReadError, SourceNotFoundError) as error:
        if isinstance(error.__cause__, RevisionNotFoundError):
            raise
        return _instead_of_hub(repo_id, revision, error)
    storage = HubStorage(listing)
    if (local := storage.if_local()) is not None:
        return local
    for file in (CONFIG_NAME, INDEX_NAME):
        storage.small_file(file, revision or "main")
    return storage


def _pin(repo_id: str, revision: str | None) -> Listing:
    """The commit, and what it holds; a commit named in full whose listing is kept needs no request."""
    kept = kept_listing(repo_id, revision) if revision and COMMIT.fullmatch(revision) else None
    cached = (tree_of(repo_id) / "snapshots").is_dir()
    return kept or ask_listing(repo_id, revision, tries=TRIES_WITH_CACHE if cached else None)


def _instead_of_hub(repo_id: str, revision: str | None, error: HubReadError | SourceNotFoundError) -> Storage:
    """What the cache holds, with a notice of why it was not asked for anew.

    Raises:
        HubReadError, SourceNotFoundError: `error`, where it holds nothing.
    """
    try:
        commit = cached_snapshot(repo_id, revision).revision
    except SourceNotFoundError:
        if isinstance(error, SourceNotFoundError):
            raise error from error.__cause__
        raise HubReadError(
            f"Opening '{repo_id}': no such directory, and the Hub can't be asked for it. {error.message}",
            remedy="Correct the path, or restore the connection.",
        ) from error
    notice = f"commit {commit} is what the cache holds, and may not be the newest: {error.message}"
    return _from_cache(repo_id, revision, error.message, (notice,))


def _from_cache(repo_id: str, revision: str | None, reason: str, notices: tuple[str, ...] = ()) -> Storage:
    """A snapshot in the cache, and, where it lacks weights, the ranges of them that are kept."""
    snapshot = dataclasses.replace(cached_snapshot(repo_id, revision), notices=notices)
    listing = kept_listing(repo_id, snapshot.revision or "")
    if listing is None:
        return snapshot
    storage = HubStorage(listing, unreachable=reason, notices=notices)
    return storage.if_local() or storage


class _NoBar(tqdm):
    """huggingface_hub's bar of a small file, which is not worth one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})


class HubStorage:
    """See `Storage`. A weight file that the Hugging Face cache holds whole is read there.

    Args:
        listing: the commit and its files.
        unreachable: why the Hub can't be asked; None where it can.
        notices: what a reader has to know of where this came from.
    """

    is_local = False

    def __init__(self, listing: Listing, *, unreachable: str | None = None, notices: tuple[str, ...] = ()) -> None:
        self.root = tree_of(listing.repo_id) / "snapshots" / listing.commit
        self.revision = listing.commit
        self.notices = notices
        self._listing = listing
        self._unreachable = unreachable
        self._local = LocalStorage(self.root, listing.commit)
        self._cache = RangeCache()
        self._reader = None if unreachable else RangeReader(listing, self._cache)
        self._small_bytes = 0

    @property
    def bytes_moved(self) -> int:
        """See `Storage.bytes_moved`."""
        return self._small_bytes + (self._reader.bytes_moved if self._reader else 0)

    def if_local(self) -> LocalStorage | None:
        """The snapshot in the cache, if all weight files are in it, and config and index."""
        weights = self.weight_files()
        needed = weights | ({CONFIG_NAME, INDEX_NAME} & self.file_names())
        if not weights or not all(map(self._local.exists, needed)):
            return None
        return dataclasses.replace(self._local, notices=self.notices)

    def file_names(self) -> set[str]:
        """See `Storage.file_names`."""
        return {file for file in self._listing.files if "/" not in file}

    def weight_files(self) -> set[str]:
        """See `Storage.weight_files`."""
        return {file for file in self.file_names() if file.endswith(".safetensors") and not file.startswith(".")}

    def exists(self, file: str) -> bool:
        """See `Storage.exists`."""
        return file in self._listing.files

    def small_file(self, file: str, named: str | None = None) -> Path | None:
        """See `Storage.small_file`; `named` is the branch that led to this commit, for the Hugging Face cache to remember.

        Raises:
            HubReadError: the Hub can't be reached, and the cache lacks the file.
            ChangedOnHubError: the file is not the one that is listed.
        """
        if file not in self._listing.files:
            return None
        path = self.root / file
        remembered = named in (None, self.revision) or referenced(self.root.parents[1], named or "") == self.revision
        if not self._unreachable and not (path.is_file() and remembered):
            self._download(file, named)
        if not path.is_file():
            raise self._out_of_reach(f"Reading {file} of '{self._listing.repo_id}'")
        self._listing.check(file, path)
        return path

    def _download(self, file: str, named: str | None) -> None:
        """Let huggingface_hub put a file into its cache; also under the branch's name, if that is still at this commit."""
        repo_id, commit = self._listing.repo_id, self._listing.commit
        there = (self.root / file).is_file()
        for revision in (named, commit) if named else (commit,):
            if revision == commit and (self.root / file).is_file():
                break
            patiently(
                f"Reading {file} of '{repo_id}'",
                lambda revision=revision: hf_hub_download(repo_id, file, revision=revision, tqdm_class=_NoBar),
                source=repo_id,
                tries=TRIES_OF_DOWNLOAD,
            )
        self._small_bytes += 0 if there else self._listing.files[file].size

    def headers(self, files: Sequence[str]) -> Headers:
        """See `Storage.headers`."""
        found = self._local.headers([file for file in files if self._local.exists(file)])
        sizes = {file: self._listing.files[file].size for file in files if not self._local.exists(file)}
        self.fetch(ByteRange(file, 0, min(FIRST_BYTES, size)) for file, size in sizes.items())
        ends: dict[str, int] = {}
        for file, size in sizes.items():
            try:
                ends[file] = 8 + header_length(self._read(file, 0, min(len(LFS_POINTER), size)), file, size)
            except BrokenCheckpointError as error:
                found.corrupt[file] = error.message
        self.fetch(ByteRange(file, 0, end) for file, end in ends.items())
        for file, end in ends.items():
            try:
                found.read[file] = decode_header(self._read(file, 8, end), file, sizes[file])
            except BrokenCheckpointError as error:
                found.corrupt[file] = error.message
        return found

    def fetch(self, ranges: Iterable[ByteRange]) -> None:
        """See `Storage.fetch`.

        Raises:
            HubReadError: the Hub can't be reached, or does not give these bytes.
            ChangedOnHubError: a file is not the one that was listed.
        """
        missing = [
            ByteRange(file, *gap)
            for file, start, end in set(ranges)
            if not self._local.exists(file)
            for gap in self._cache.missing(self._listing.files[file].etag, start, end)
        ]
        if not missing:
            return
        if self._reader is None:
            total = sum(part.end - part.start for part in missing)
            files = sorted({part.file for part in missing})
            raise self._out_of_reach(f"Reading {total:,} bytes of {', '.join(files)} of '{self._listing.repo_id}'")
        self._reader.bring(missing)

    def fill(self, file: str, start: int, view: memoryview) -> int:
        """See `Storage.fill`; what was not brought near is read now."""
        if self._local.exists(file):
            return self._local.fill(file, start, view)
        listed = self._listing.files[file]
        end = max(start, min(start + len(view), listed.size))
        self.fetch([ByteRange(file, start, end)])
        self._cache.read(listed.etag, start, view[: end - start])
        return end - start

    def _read(self, file: str, start: int, end: int) -> bytes:
        content = bytearray(end - start)
        self.fill(file, start, memoryview(content))
        return bytes(content)

    def _out_of_reach(self, act: str) -> HubReadError:
        return HubReadError(
            f"{act}: not on this machine, and {self._unreachable or 'the cache does not keep them'}.",
            remedy="Unset HF_HUB_OFFLINE or restore the connection, and read it once; what was read is kept.",
        )
