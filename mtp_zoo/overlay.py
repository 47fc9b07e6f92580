"""Writing a directory that looks like another one: links or clones where bytes are the same, new files where they are not.

The directory is built under a hidden name beside its goal and renamed when it is whole. Nothing that exists is opened
for writing, so the source can't be harmed through a link.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path
from typing import TypeAlias

from mtp_zoo.errors import ExportError, OutputExistsError

NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)
"""Why a file system refuses a hard link although the file can be copied; EPERM also stands for another user's file."""

FICLONE = 0x40049409
"""Linux's request for a second file with the same blocks (Btrfs, XFS): a copy that takes no space until written to."""

NO_CLONE = (*NO_LINK, errno.ENOTTY, errno.EINVAL, errno.EOPNOTSUPP)
"""Why a file system refuses a clone although the file can be copied."""

CHUNK = 1 << 20
"""Bytes that are read or written at a time. Calls that write 2 MiB or more took four times the processor's time on ext4
(Linux 6.18)."""

FLUSH_EVERY = 1 << 26
"""Bytes of a file after which they are sent to the disk, while further ones are made."""

WAITING = 64
"""Files that may wait for the disk at a time; each holds a descriptor."""

Piece: TypeAlias = bytes | bytearray | memoryview
"""What files are written from."""


@contextmanager
def staging(out: Path) -> Generator[Path]:
    """An empty hidden directory beside `out`, renamed to `out` when the block ends; removed when it raises.

    The directory is locked while this process lives. What a killed process left is found unlocked, and is removed.

    Raises:
        OutputExistsError: `out` has come to exist.
        ExportError: another process is writing the same output.
    """
    partial = out.with_name(f".{out.name}.mtp-zoo-partial")
    made = [folder for folder in out.parents if not folder.exists()]
    try:
        lock = _claim(partial, out)
    except OSError:
        _remove_empty(made)
        raise
    try:
        yield partial
        _publish(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        _remove_empty(made)
        raise
    finally:
        os.close(lock)


def _claim(partial: Path, out: Path) -> int:
    """Make and lock the directory and empty it; returns the descriptor that holds the lock."""
    partial.mkdir(parents=True, exist_ok=True)
    lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between the two calls above, the process that held the lock may have renamed or removed the directory.
        if not os.path.samestat(os.fstat(lock), os.stat(partial)):
            raise FileNotFoundError(errno.ENOENT, "renamed by another process", str(partial))
    except (BlockingIOError, FileNotFoundError) as error:
        os.close(lock)
        raise ExportError(
            f"Writing {out}: another process is writing it ({partial}).", remedy="Wait for it, or choose another path."
        ) from error
    for path in partial.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return lock


def _publish(partial: Path, out: Path) -> None:
    for folder, _, _ in os.walk(partial):
        sync(Path(folder))
    refuse_existing(out)
    partial.rename(out)
    try:
        sync(out.parent)
    except OSError:
        out.rename(partial)  # whoever is told of a failure finds no output
        raise


def _remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders, the inner ones first, as far as nothing is in them."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def refuse_existing(out: Path) -> None:
    """Raise OutputExistsError where `out` is taken, be it by a link to nothing."""
    if os.path.lexists(out):
        raise OutputExistsError(
            f"Writing {out}: the path exists.", remedy="Choose another path, or remove what is there yourself."
        )


def sync(path: Path) -> None:
    """Flush a file or directory to the disk."""
    _sync_and_close(os.open(path, os.O_RDONLY))


class Overlay:
    """Fills a staging directory and counts what that costs.

    As a context manager it brings files to the disk beside other work, and waits for them where the block ends; without, each
    file is on the disk when the call returns.

    Args:
        root: the staging directory.
        link: whether weight files may share their bytes with their source.
        advance: is told of the bytes that were put on the disk.

    Attributes:
        linked, cloned, copied, rewritten, written: files so far: hard-linked, copied without taking space (reflinks), copied
            whole, copied without some tensors, new.
        shared: names of those whose bytes on the disk are those of their source.
        bytes_written: bytes put on the disk so far; links and clones cost none.
    """

    def __init__(self, root: Path, *, link: bool, advance: Callable[[int], None] = lambda _: None) -> None:
        self.root = root
        self.linked = self.cloned = self.copied = self.rewritten = self.written = 0
        self.shared: set[str] = set()
        self.bytes_written = 0
        self._link = link
        self._advance = advance
        self._flusher: ThreadPoolExecutor | None = None
        self._flushes: deque[Future[None]] = deque()

    def __enter__(self) -> Overlay:
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="flush")
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._flusher is not None:
            self._flusher.shutdown()
        for flush in self._flushes if kind is None else ():
            flush.result()

    def link(self, source: Path, name: str) -> None:
        """Hard-link `source`; clone it where that is not possible, copy it where neither is or sharing is not wanted."""
        source, place = source.resolve(), self._place(name)
        if self._link and _try_link(source, place):
            self.linked += 1
        elif self._link and _try_clone(source, place):
            self.cloned += 1
        else:
            self.copy(source, name)
            return
        self.shared.add(name)

    def copy(self, source: Path, name: str) -> None:
        """Copy `source` with its mode and times; a link is copied as the file that it points to."""
        self._write(name, pieces(source), like=source)
        self.copied += 1

    def rewrite(self, name: str, pieces: Iterable[Piece]) -> None:
        """Write what is left of a source file."""
        self._write(name, pieces)
        self.rewritten += 1

    def write(self, name: str, pieces: Iterable[Piece]) -> None:
        """Write a new file."""
        self._write(name, pieces)
        self.written += 1

    def _write(self, name: str, pieces: Iterable[Piece], like: Path | None = None) -> None:
        """Write a file, with the mode and times of `like`."""
        behind = 0
        with self._place(name).open("xb") as stream:
            for part in _parts(pieces):
                stream.write(part)
                behind += len(part)
                self.bytes_written += len(part)
                self._advance(len(part))
                del part  # let go of a tensor before the next is made
                if self._flusher is not None and behind >= FLUSH_EVERY:
                    self._sync(stream)
                    behind = 0
            if like is not None:
                stream.flush()  # bytes that leave the buffer later would change the times
                shutil.copystat(like, stream.name)
            self._sync(stream)

    def _sync(self, stream: BufferedWriter) -> None:
        """Have what was written so far brought to the disk, beside other work where the end of a block waits for it."""
        stream.flush()
        if len(self._flushes) >= WAITING:
            self._flushes.popleft().result()
        descriptor = os.dup(stream.fileno())
        if self._flusher is None:
            _sync_and_close(descriptor)
        else:
            self._flushes.append(self._flusher.submit(_sync_and_close, descriptor))

    def _place(self, name: str) -> Path:
        place = self.root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        return place


def _parts(pieces: Iterable[Piece]) -> Iterator[memoryview]:
    """The same bytes, at most `CHUNK` at a time; no piece is held here while the next one is made."""
    for piece in pieces:
        whole = memoryview(piece)
        del piece
        for start in range(0, len(whole), CHUNK):
            yield whole[start : start + CHUNK]
        del whole


def _sync_and_close(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _try_link(source: Path, place: Path) -> bool:
    try:
        os.link(source, place)
    except OSError as error:
        if error.errno in NO_LINK:
            return False
        raise
    return True


def _try_clone(source: Path, place: Path) -> bool:
    try:
        with source.open("rb") as old, place.open("xb") as new:
            fcntl.ioctl(new.fileno(), FICLONE, old.fileno())
            os.fsync(new.fileno())
    except OSError as error:
        place.unlink(missing_ok=True)
        if error.errno in NO_CLONE:
            return False
        raise
    shutil.copystat(source, place)
    return True


def pieces(source: Path) -> Iterator[memoryview]:
    """A file's bytes; each piece is overwritten by the next."""
    buffer = memoryview(bytearray(CHUNK))
    with source.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            yield buffer[:count]


def files_below(root: Path, *, skip_folders: Iterable[str] = ()) -> Iterator[str]:
    """Relative paths of all files, sorted by folder; linked folders are entered.

    Raises:
        ExportError: a linked folder holds itself.
    """
    skip = set(skip_folders)
    for folder, subfolders, files in os.walk(root, followlinks=True):
        subfolders[:] = sorted(set(subfolders) - skip)
        here = os.path.realpath(folder)
        for subfolder in subfolders:
            if (here + os.sep).startswith(os.path.realpath(os.path.join(folder, subfolder)) + os.sep):
                raise ExportError(
                    f"Copying {root}: {os.path.join(folder, subfolder)} links to a folder that holds it.",
                    remedy="Remove the link.",
                )
        yield from (os.path.relpath(os.path.join(folder, file), root) for file in sorted(files))
