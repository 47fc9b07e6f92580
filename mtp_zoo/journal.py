"""Updates of a checkpoint in its own directory, which a kill can't leave half done and which can be taken back.

    .mtp-zoo-update/new/          the new files, built and checked while the old ones are still in place
    .mtp-zoo-update/journal.json  which files are replaced and which added; on the disk before the first one moves
    .mtp-zoo-update/old/          the replaced files, moved here
    .mtp-zoo-undo/                the same folder once the update is complete: the way back

`config.json` leaves first and comes last, the index next to it, so no reader takes what lies in between for a checkpoint.
Files are only ever renamed: what other directories share through hard links is not touched.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mtp_zoo.arguments import PATH, checked
from mtp_zoo.errors import BrokenCheckpointError, ExportError, RollbackError
from mtp_zoo.index_file import INDEX_NAME
from mtp_zoo.json_text import parse_object, read_bounded
from mtp_zoo.overlay import files_below, pieces, sync

UPDATE, UNDO = ".mtp-zoo-update", ".mtp-zoo-undo"
JOURNAL = "journal.json"
JOURNAL_LIMIT = 1 << 24
"""Longest journal in bytes; it holds file names."""

GUARDS = (INDEX_NAME, "config.json")
"""Files without which nothing reads a directory as a checkpoint."""


@dataclass(frozen=True)
class RollbackReport:
    """What was taken back.

    Attributes:
        directory: the checkpoint.
        undone: `finished`, a complete update; `interrupted`, one that was cut short while files moved; `unstarted`, one that
            had moved none yet.
        restored: files that came back.
        removed: files that the update had added.
    """

    directory: Path
    undone: Literal["finished", "interrupted", "unstarted"]
    restored: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


@checked("Rolling back an update", error=RollbackError, directory=PATH)
def rollback(directory: str | Path) -> RollbackReport:
    """Bring back the files that the last update in place replaced, or what an update that was cut short had moved.

    Args:
        directory: the checkpoint that was updated.

    Raises:
        RollbackError: there was no update, or its files have changed since.
        ExportError: another process is updating the directory.
        OSError: a file can't be moved; what was moved back stays, and a second call goes on from there.
    """
    root = Path(os.path.abspath(Path(directory).expanduser()))
    with _locked(root):
        if (root / UPDATE).exists():
            return _take_back(root)
        if not (root / UNDO / JOURNAL).exists():
            raise RollbackError(
                f"Rolling back {root}: no update in place is recorded there.",
                remedy="Nothing is to be done; a checkpoint that was exported to its own directory can be removed.",
            )
        _refuse_changed(root)
        (root / UNDO).rename(root / UPDATE)  # from here on it is an update that was cut short
        report = _take_back(root)
    return RollbackReport(root, "finished", report.restored, report.removed)


@checked("Discarding the undo of an update", error=RollbackError, directory=PATH)
def discard_undo(directory: str | Path) -> int:
    """Remove the files that the last update in place replaced; returns the bytes that this frees.

    Raises:
        RollbackError: there are none, or the update was cut short, so that they are needed.
    """
    root = Path(os.path.abspath(Path(directory).expanduser()))
    with _locked(root):
        refuse_half_updated(root)
        if not (root / UNDO / JOURNAL).exists():
            raise RollbackError(f"Discarding what {root} held before: nothing is kept.", remedy="Leave it.")
        old = root / UNDO / "old"
        freed = sum(os.lstat(old / name).st_size for name in files_below(old) if os.lstat(old / name).st_nlink == 1)
        _forget(root / UNDO)
    return freed


def refuse_half_updated(root: Path) -> None:
    """Raise BrokenCheckpointError where an update in place was cut short and not yet taken back."""
    if (root / UPDATE / JOURNAL).exists():
        raise BrokenCheckpointError(
            f"Opening {root}: an update in place is running, or was cut short; its files are half old, half new.",
            remedy=f"Wait for it, or run `mtp-zoo rollback {root}`.",
        )


@contextmanager
def owned(root: Path) -> Generator[None]:
    """Keep other updates of `root` away, and take back one that was cut short.

    Raises:
        ExportError: another process is updating it.
    """
    with _locked(root):
        if (root / UPDATE).exists():
            _take_back(root)
        yield


@contextmanager
def updating(root: Path, gone: Collection[str]) -> Generator[Path]:
    """An empty directory, whose files are moved to their places in `root` when the block ends; to be used inside `owned`.

    Files that are the same in both stay where they are. When the block or the moving raises, `root` is as it was.

    Args:
        root: the checkpoint.
        gone: its files that have no successor of the same name.

    Raises:
        ExportError: the moving failed, and so did bringing back what had moved.
    """
    new = root / UPDATE / "new"
    try:
        new.mkdir(parents=True)
        yield new
        _commit(root, gone)
    except BaseException as error:
        try:
            _take_back(root)
        except OSError as second:
            raise ExportError(
                f"Updating {root}: {error}. Bringing the old files back failed as well: {second}.",
                remedy=f"Mend the disk, then run `mtp-zoo rollback {root}`.",
            ) from error
        raise


def _commit(root: Path, gone: Collection[str]) -> None:
    update = root / UPDATE
    new, old = update / "new", update / "old"
    fresh = [name for name in files_below(new) if name in GUARDS or not _same(new / name, root / name)]
    _sync_all(new)
    added = [name for name in fresh if not os.path.lexists(root / name)]
    replaced = sorted({*gone, *fresh}.difference(added))
    _write_journal(update, replaced, added, {name: _stamp(new / name) for name in fresh})
    for name in reversed(_guards_last(replaced)):
        _move(root / name, old / name)
    for name in _guards_last(fresh):
        _move(new / name, root / name)
    _sync_all(old)
    _sync_folders(root, [*replaced, *fresh])
    shutil.rmtree(new)
    _forget(root / UNDO)
    update.rename(root / UNDO)
    try:
        sync(root)
    except OSError:
        (root / UNDO).rename(update)  # an update that may be lost is taken back
        raise


def _take_back(root: Path) -> RollbackReport:
    """Undo what `.mtp-zoo-update` has done so far; as often as it is cut short, the next call ends it."""
    update, old = root / UPDATE, root / UPDATE / "old"
    if not (update / JOURNAL).exists():
        shutil.rmtree(update, ignore_errors=True)
        return RollbackReport(root, "unstarted")
    journal = _read_journal(update)
    moved = [name for name in journal["replaced"] if os.path.lexists(old / name)]
    for name in _guards_last([*journal["added"], *(name for name in moved if name in GUARDS)])[::-1]:
        (root / name).unlink(missing_ok=True)
    for name in _guards_last(moved):
        _move(old / name, root / name)
    _sync_folders(root, [*journal["replaced"], *journal["added"]])
    _forget(update)
    return RollbackReport(root, "interrupted", tuple(journal["replaced"]), tuple(journal["added"]))


def _forget(folder: Path) -> None:
    """Remove a record; without its journal it is rubbish, whatever else of it a kill leaves behind."""
    if folder.exists():
        (folder / JOURNAL).unlink(missing_ok=True)
        sync(folder)
        shutil.rmtree(folder)


def _refuse_changed(root: Path) -> None:
    written = _read_journal(root / UNDO)["written"]
    changed = [name for name, stamp in written.items() if _stamp(root / name) != stamp]
    if changed:
        raise RollbackError(
            f"Rolling back {root}: {len(changed)} files are not as the update in place left them; what they hold now would be "
            "lost.",
            remedy=f"Take what you need from {root / UNDO / 'old'} by hand, or drop it with `mtp-zoo rollback --discard`.",
            problems=changed,
        )


def _write_journal(
    folder: Path, replaced: Sequence[str], added: Sequence[str], written: dict[str, list[int] | None]
) -> None:
    content = {"format": 1, "replaced": replaced, "added": added, "written": written}
    draft = folder / f"{JOURNAL}.draft"
    with draft.open("x", encoding="utf-8") as stream:
        json.dump(content, stream, indent=2)
        stream.flush()
        os.fsync(stream.fileno())
    draft.rename(folder / JOURNAL)
    sync(folder)


def _read_journal(folder: Path) -> dict[str, Any]:
    try:
        content = parse_object(read_bounded(folder / JOURNAL, JOURNAL_LIMIT))
        names = [*content["replaced"], *content["added"], *content["written"]]
        if content["format"] == 1 and all(_is_inside(folder, name) for name in names):
            return content
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _unreadable(folder) from error
    raise _unreadable(folder)


def _is_inside(folder: Path, name: Any) -> bool:
    """Whether both places of a file lie in the directory: a journal that came with a checkpoint could name any other."""
    if not isinstance(name, str) or "\0" in name or os.path.isabs(name) or ".." in Path(name).parts:
        return False
    root = folder.parent.resolve()
    return all((place / name).parent.resolve().is_relative_to(root) for place in (root, folder / "old"))


def _unreadable(folder: Path) -> RollbackError:
    return RollbackError(
        f"Reading {folder / JOURNAL}: it is not what an update in place writes.",
        remedy=f"Move the files in {folder / 'old'} back by hand, the index and config.json last.",
    )


def _stamp(path: Path) -> list[int] | None:
    """Size and time of the last change; None where there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return [found.st_size, found.st_mtime_ns]


def _same(new: Path, old: Path) -> bool:
    if not old.is_file() or old.stat().st_size != new.stat().st_size:
        return False
    return os.path.samefile(new, old) or all(a == b for a, b in zip(pieces(new), pieces(old), strict=True))


def _guards_last(names: Iterable[str]) -> list[str]:
    """Other names as they come, then the index, then config.json."""
    names = list(names)
    return [name for name in names if name not in GUARDS] + [name for name in GUARDS if name in names]


def _move(source: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    os.replace(source, place)


def _sync_all(folder: Path) -> None:
    for inner, _, _ in os.walk(folder):
        sync(Path(inner))


def _sync_folders(root: Path, names: Iterable[str]) -> None:
    for folder in {(root / name).parent for name in names} | {root}:
        sync(folder)


@contextmanager
def _locked(root: Path) -> Generator[None]:
    try:
        lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise RollbackError(f"Opening {root}: {error.strerror}.", remedy="Give a directory of your own.") from error
    try:
        _lock(lock, root)
        yield
    finally:
        os.close(lock)


def _lock(descriptor: int, root: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ExportError(f"Updating {root}: another process is doing so.", remedy="Wait for it.") from error
