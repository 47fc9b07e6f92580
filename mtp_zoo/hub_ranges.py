"""Byte ranges of files on the Hub: planned into few requests, read in parallel into the cache, each answer checked.

A range has no hash of its own, so what can be checked is checked: status, exact place, size of the file, encoding, commit and
ETag. A connection that breaks is continued where it broke. A file that is not the listed one is an error, at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from itertools import pairwise
from threading import Event, Lock

from huggingface_hub import get_session, hf_hub_url
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, httpx

from mtp_zoo.errors import ChangedOnHubError
from mtp_zoo.hub_cache import RangeCache
from mtp_zoo.hub_http import BUSY, Patience, TryAgain, again, asked_wait
from mtp_zoo.hub_listing import Listing
from mtp_zoo.progress import progress_bytes
from mtp_zoo.storage import ByteRange
from mtp_zoo.version import __version__

THREADS = 8
SMALLEST_SEGMENT = 8 << 20
LARGEST_SEGMENT = 64 << 20
"""Bytes of one request: enough that requests are few, and no more than a broken process may lose."""

JOINED_SHARE = 0.01
"""Bytes that nobody asked for, between ranges that one request reads together, as a share of those asked for."""

JOINED_AT_LEAST = 1 << 16
WHOLE_FILE_LIMIT = 8 << 20
"""A server that ignores `Range` sends the whole file; up to this size that is read past."""

TIMEOUT = httpx.Timeout(10.0, read=30.0, pool=None)
RESOLVE_AGAIN = frozenset({400, 401, 403, 404, 410})
"""What a storage service says to an address whose signature has run out."""


def join_ranges(ranges: Iterable[ByteRange]) -> list[ByteRange]:
    """Ranges in order, overlaps and the smallest gaps closed as far as `JOINED_SHARE` goes.

    Example, with room for 10 bytes: 0-100, 104-200, 230-300 become 0-200 and 230-300.
    """
    ordered = sorted(set(ranges))
    wanted = sum(part.end - part.start for part in ordered)
    room = max(int(JOINED_SHARE * wanted), JOINED_AT_LEAST)
    gaps = sorted((b.start - a.end, b) for a, b in pairwise(ordered) if a.file == b.file)
    closed: set[ByteRange] = set()
    for gap, behind in gaps:
        room -= max(gap, 0)
        if room < 0:
            break
        closed.add(behind)
    joined: list[ByteRange] = []
    for part in ordered:
        last = joined[-1] if joined else None
        if last and last.file == part.file and (part in closed or part.start <= last.end):
            joined[-1] = ByteRange(part.file, last.start, max(last.end, part.end))
        else:
            joined.append(part)
    return joined


def cut_ranges(ranges: Sequence[ByteRange]) -> list[ByteRange]:
    """Ranges cut into segments of a size that keeps all threads busy."""
    share = sum(part.end - part.start for part in ranges) // THREADS
    size = min(max(share, SMALLEST_SEGMENT), LARGEST_SEGMENT)
    return [
        ByteRange(part.file, start, min(start + size, part.end))
        for part in ranges
        for start in range(part.start, part.end, size)
    ]


class RangeReader:
    """Reads ranges of one commit's files into the cache.

    Args:
        listing: the commit.
        cache: where bytes go.

    Attributes:
        bytes_moved: bytes of weight files that came over the network.
    """

    def __init__(self, listing: Listing, cache: RangeCache) -> None:
        self._listing = listing
        self._cache = cache
        self._headers = build_hf_headers(library_name="mtp_zoo", library_version=__version__)
        self._signed: dict[str, str] = {}
        self._lock = Lock()
        self.bytes_moved = 0
        get_session()  # one client for all threads, made before there are any

    def bring(self, ranges: Iterable[ByteRange]) -> None:
        """Read what the cache lacks of `ranges`; on an error what has arrived is kept.

        Raises:
            HubReadError: the Hub can't be reached, or does not give these bytes.
            ChangedOnHubError: a file is not the one that was listed.
        """
        segments = cut_ranges(join_ranges(ranges))
        if not segments:
            return
        stop = Event()
        total = sum(part.end - part.start for part in segments)
        with progress_bytes("Reading from the Hub", total=total) as advance, ThreadPoolExecutor(THREADS) as pool:
            tasks = [pool.submit(self._segment, part, stop, advance) for part in segments]
            try:
                for task in as_completed(tasks):
                    task.result()
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _segment(self, part: ByteRange, stop: Event, advance: Callable[[int], None]) -> None:
        etag = self._listing.files[part.file].etag
        act = f"Reading bytes {part.start:,} to {part.end:,} of {part.file} of '{self._listing.repo_id}'"
        patience = Patience(act, stop)
        with self._cache.writing(etag, part.start) as writer:
            while writer.end < part.end and not stop.is_set():
                try:
                    with closing(self._request(part._replace(start=writer.end), act)) as pieces:
                        for piece in pieces:
                            writer.write(piece)
                            patience.reset()
                            advance(len(piece))
                            if stop.is_set():
                                return
                except (httpx.RequestError, TryAgain) as error:
                    self._signed.pop(part.file, None)
                    patience.wait(error)

    def _request(self, part: ByteRange, act: str) -> Generator[bytes]:
        """The bytes of one answer, checked to be those of `part`; fewer where the connection ends early."""
        signed = self._signed.get(part.file)
        headers = {**self._headers, "Range": f"bytes={part.start}-{part.end - 1}", "Accept-Encoding": "identity"}
        if signed:
            headers.pop("authorization", None)  # the signature is the permission; the token is none of their business
        url = signed or hf_hub_url(self._listing.repo_id, part.file, revision=self._listing.commit)
        with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT, follow_redirects=True) as response:
            self._check_status(response, part, signed is not None, act)
            self._check_identity(response, part)
            skip = self._check_place(response, part)
            if not signed and response.history and _origin(response.url) != _origin(response.history[0].url):
                self._signed[part.file] = str(response.url)
            left = part.end - part.start
            for piece in response.iter_raw():
                with self._lock:
                    self.bytes_moved += len(piece)
                wanted = piece[skip : skip + left]
                skip = max(0, skip - len(piece))
                left -= len(wanted)
                if wanted:
                    yield wanted
                if not left:
                    return
        raise TryAgain(f"the answer ended {left:,} bytes early")

    def _check_status(self, response: httpx.Response, part: ByteRange, signed: bool, act: str) -> None:
        status = response.status_code
        if signed and status in RESOLVE_AGAIN:
            raise TryAgain(f"the storage behind the Hub answers {status}", 0.0)
        if status in BUSY:
            raise TryAgain(f"the Hub answers {status}", asked_wait(response.headers))
        if status == 416:
            total = response.headers.get("Content-Range", "").rpartition("/")[2]
            if total.isdigit():
                self._check_size(part.file, int(total))
            raise TryAgain("the Hub answers 416 to a range that is inside the file")
        if status >= 400:
            response.read()
            try:
                hf_raise_for_status(response)
            except EntryNotFoundError as error:
                raise self._changed(part.file, "it is gone") from error
            except Exception as error:
                raise again(error, act, self._listing.repo_id) from error

    def _check_identity(self, response: httpx.Response, part: ByteRange) -> None:
        """Commit and ETag, where the Hub sends them; the storage behind it has its own ETags."""
        for answer in (*response.history, response):
            commit = answer.headers.get("X-Repo-Commit")
            if commit is None:
                continue
            if commit != self._listing.commit:
                raise self._changed(part.file, f"it comes from commit {commit}")
            etag = answer.headers.get("X-Linked-Etag") or answer.headers.get("ETag") or ""
            plain = etag.removeprefix("W/").strip('"')
            if plain and plain != self._listing.files[part.file].etag:
                raise self._changed(part.file, f"its ETag is {plain}")

    def _check_place(self, response: httpx.Response, part: ByteRange) -> int:
        """How many bytes of the answer lie in front of the range."""
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise TryAgain("the server compresses a byte range")
        if response.status_code == 206:
            given = response.headers.get("Content-Range", "")
            place = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", given)
            if place and place[3] != "*":
                self._check_size(part.file, int(place[3]))
            if not place or (int(place[1]), int(place[2]) + 1) != (part.start, part.end):
                raise TryAgain(f"asked for bytes {part.start}-{part.end - 1}, the server gives '{given}'")
            return 0
        size = response.headers.get("Content-Length", "")
        if size.isdigit():
            self._check_size(part.file, int(size))
        if not size.isdigit() or int(size) > WHOLE_FILE_LIMIT:
            raise TryAgain(f"the server ignores byte ranges (it answers {response.status_code} with the whole file)")
        return part.start

    def _check_size(self, file: str, size: int) -> None:
        if size != self._listing.files[file].size:
            what = "a git-lfs pointer, or another version" if size < 1024 else "another version"
            raise self._changed(file, f"it has {size:,} bytes there ({what})")

    def _changed(self, file: str, how: str) -> ChangedOnHubError:
        listed = self._listing.files[file]
        return ChangedOnHubError(
            f"Reading {file} of '{self._listing.repo_id}' at commit {self._listing.commit}: it was listed with "
            f"{listed.size:,} bytes and ETag {listed.etag}, and {how}.",
            remedy="Open the repository again; if it stays so, the server or a proxy does not serve what the Hub lists.",
        )


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port
