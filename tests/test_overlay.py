"""The staging directory: one writer at a time, and nothing that a killed one left can be taken for an output."""

from __future__ import annotations

import errno
import importlib
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mtp_zoo.errors import ExportError, OutputExistsError
from mtp_zoo.exporter import export
from mtp_zoo.loader import load_head
from mtp_zoo.overlay import FICLONE, Overlay, staging
from tests.children import run_forked
from tests.exporting import TENSORS, make_base, same, snapshot, stored

KILLED = {
    "linking": "mtp_zoo.overlay:os.link",
    "rewriting": "mtp_zoo.export_write:_shorter",
    "writing_the_head": "mtp_zoo.export_write:native_tensors",
    "checking": "mtp_zoo.exporter:check_output",
    "renaming": "mtp_zoo.overlay:Path.rename",
}
"""Where the exporting process is killed: the function that is replaced by the kill."""


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _export_and_be_killed(base: Path, outs: dict[str, Path]) -> None:
    head = load_head(base)
    for moment, out in outs.items():
        pid = os.fork()
        if pid == 0:
            module, _, attribute = KILLED[moment].partition(":")
            owner: Any = importlib.import_module(module)
            *parts, last = attribute.split(".")
            for part in parts:
                owner = getattr(owner, part)
            with mock.patch.object(owner, last, _die):
                export(head, base, out)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def test_kill_at_any_moment_leaves_no_output_and_a_rerun_cleans_up(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    before = snapshot(base)
    outs = {moment: tmp_path / moment for moment in KILLED}
    done = run_forked(tmp_path, _export_and_be_killed, base, outs)
    assert done.status == 0, done.stderr
    assert done.stdout.split() == [str(-signal.SIGKILL)] * len(KILLED)
    assert snapshot(base) == before
    head = load_head(base)
    for out in outs.values():
        partial = out.with_name(f".{out.name}.mtp-zoo-partial")
        assert not out.exists()
        assert partial.is_dir()
        (partial / "left-over").write_text("x")
        export(head, base, out)
        assert not partial.exists()
        assert not (out / "left-over").exists()
        assert same(stored(out), TENSORS, TENSORS)
    assert snapshot(base) == before


def test_second_writer_of_one_output_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with staging(out) as partial:
        (partial / "a").write_text("mine")
        with pytest.raises(ExportError, match="another process is writing it"), staging(out):
            pytest.fail("two writers")
        assert (partial / "a").read_text() == "mine"
    assert (out / "a").read_text() == "mine"


def test_output_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def write() -> None:
        with staging(out) as partial:
            (partial / "a").write_text("mine")
            out.mkdir()
            (out / "a").write_text("theirs")

    with pytest.raises(OutputExistsError):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "a").read_text() == "theirs"


def test_interrupt_removes_what_was_written(tmp_path: Path) -> None:
    def write() -> None:
        with staging(tmp_path / "out") as partial:
            (partial / "a").write_text("mine")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert list(tmp_path.iterdir()) == []


def test_leftover_that_is_a_link_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "a").write_text("keep")
    os.symlink("precious", tmp_path / ".out.mtp-zoo-partial")
    with pytest.raises(OSError, match=r"mtp-zoo-partial"), staging(tmp_path / "out"):
        pytest.fail("wrote through a link")
    assert (tmp_path / "precious" / "a").read_text() == "keep"


def test_parents_of_the_output_are_made(tmp_path: Path) -> None:
    with staging(tmp_path / "runs" / "one" / "out") as partial:
        (partial / "a").write_text("mine")
    assert (tmp_path / "runs" / "one" / "out" / "a").is_file()


def test_existing_files_are_never_written_through(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"base")
    overlay = Overlay(tmp_path / "out", link=True)
    overlay.link(source, "a")
    with pytest.raises(FileExistsError):
        overlay.write("a", [b"new"])
    assert source.read_bytes() == b"base"


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr("mtp_zoo.overlay.os.link", refuse)


@pytest.mark.usefixtures("no_links")
def test_files_are_cloned_where_they_cannot_be_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that clones is played by one that copies: what is asked of it is what counts."""

    def clone(new: int, request: int, old: int) -> int:
        assert request == FICLONE
        return os.sendfile(new, old, 0, 1 << 20)

    monkeypatch.setattr("mtp_zoo.overlay.fcntl.ioctl", clone)
    source = tmp_path / "source"
    source.write_bytes(b"base")
    source.chmod(0o640)
    overlay = Overlay(tmp_path / "out", link=True)
    overlay.link(source, "a")
    assert (overlay.linked, overlay.cloned, overlay.copied, overlay.bytes_written) == (0, 1, 0, 0)
    assert overlay.shared == {"a"}
    assert (tmp_path / "out" / "a").read_bytes() == b"base"
    assert (tmp_path / "out" / "a").stat().st_mode & 0o777 == 0o640


@pytest.mark.usefixtures("no_links")
@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY])
def test_files_are_copied_where_they_cannot_be_cloned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("mtp_zoo.overlay.fcntl.ioctl", refuse)
    source = tmp_path / "source"
    source.write_bytes(bytes(range(256)) * 20000)  # more than one piece
    seen: list[int] = []
    overlay = Overlay(tmp_path / "out", link=True, advance=seen.append)
    overlay.link(source, "a")
    assert (overlay.linked, overlay.cloned, overlay.copied) == (0, 0, 1)
    assert overlay.shared == set()
    assert (tmp_path / "out" / "a").read_bytes() == source.read_bytes()
    assert sum(seen) == overlay.bytes_written == source.stat().st_size


@pytest.mark.usefixtures("no_links")
def test_clone_that_finds_no_space_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("mtp_zoo.overlay.fcntl.ioctl", full)
    (tmp_path / "source").write_bytes(b"base")
    with pytest.raises(OSError, match="No space"):
        Overlay(tmp_path / "out", link=True).link(tmp_path / "source", "a")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("waiting", [1, 64])
def test_files_reach_the_disk_beside_other_work_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waiting: int
) -> None:
    flushed: list[tuple[bool, int]] = []

    def fsync(descriptor: int) -> None:
        flushed.append((threading.current_thread() is threading.main_thread(), os.fstat(descriptor).st_size))

    monkeypatch.setattr("mtp_zoo.overlay.CHUNK", 10)
    monkeypatch.setattr("mtp_zoo.overlay.FLUSH_EVERY", 20)
    monkeypatch.setattr("mtp_zoo.overlay.WAITING", waiting)
    monkeypatch.setattr("mtp_zoo.overlay.os.fsync", fsync)
    with Overlay(tmp_path / "out", link=True) as overlay:
        overlay.write("large", [b"x" * 35, b"x" * 15])
        overlay.write("small", [b"x" * 10])
    assert not any(main for main, _ in flushed)
    assert len(flushed) == 4  # behind 20 and 45 bytes of the large one, and where each ends
    assert [size for _, size in flushed[-2:]] == [50, 10]


def test_without_a_block_that_waits_each_file_is_on_the_disk_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    monkeypatch.setattr("mtp_zoo.overlay.os.fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_size))
    Overlay(tmp_path / "out", link=True).write("small", [b"x" * 10])
    assert flushed == [10]


@pytest.mark.parametrize("waiting", [1, 64])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_failure_of_a_disk_beside_other_work_is_the_export_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, waiting: int
) -> None:
    """Whichever file meets it."""
    base = make_base(tmp_path / "base")
    before = snapshot(base)
    head = load_head(base)
    seen: list[int] = []
    failing = 0

    def fsync(_: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            seen.append(1)
            if len(seen) == failing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("mtp_zoo.overlay.WAITING", waiting)
    monkeypatch.setattr("mtp_zoo.overlay.os.fsync", fsync)
    export(head, base, tmp_path / "whole")
    shutil.rmtree(tmp_path / "whole")
    failing = {"first": 1, "middle": len(seen) // 2, "last": len(seen)}[place]
    seen.clear()
    with pytest.raises(ExportError, match="No space left"):
        export(head, base, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [base]
    assert snapshot(base) == before


def test_a_copy_keeps_mode_and_times(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"text")
    source.chmod(0o440)
    os.utime(source, ns=(10**18, 10**18 + 5))
    with Overlay(tmp_path / "out", link=True) as overlay:
        overlay.copy(source, "a")
    found = (tmp_path / "out" / "a").stat()
    assert (found.st_mode & 0o777, found.st_mtime_ns, found.st_size) == (0o440, 10**18 + 5, 4)


def test_folders_made_for_an_output_that_fails_are_removed(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(ValueError, match="stop"), staging(tmp_path / "runs" / "one" / "deep" / "out"):
        raise ValueError("stop")
    assert [path.name for path in tmp_path.rglob("*")] == ["runs"]


def test_output_whose_name_may_not_last_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = os.fsync

    def fail(descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), tmp_path.stat()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        synced(descriptor)

    monkeypatch.setattr("mtp_zoo.overlay.os.fsync", fail)
    with pytest.raises(OSError, match="Input/output"), staging(tmp_path / "out") as partial:
        (partial / "a").write_text("mine")
    assert list(tmp_path.iterdir()) == []
