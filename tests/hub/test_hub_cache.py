"""Ranges that are kept: what is missing, what was damaged, what a killed process left, and a disk that takes no more."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

import pytest

from mtp_zoo.errors import HubReadError
from mtp_zoo.hub_cache import ABANDONED_SECONDS, RangeCache, RangeWriter

ETAG = "a" * 40
DATA = bytes(range(256)) * 2


def keep(cache: RangeCache, start: int, end: int) -> Path:
    """Write one range as a download does, in pieces; returns its file."""
    with cache.writing(ETAG, start) as writer:
        for at in range(start, end, 7):
            writer.write(DATA[at : min(at + 7, end)])
    return cache._overlapping(ETAG, start, start + 1)[-1].path


def read(cache: RangeCache, start: int, end: int) -> bytes:
    view = bytearray(end - start)
    cache.read(ETAG, start, memoryview(view))
    return bytes(view)


def test_gaps_between_what_is_kept_are_missing(tmp_path: Path) -> None:
    cache = RangeCache(tmp_path)
    assert cache.missing(ETAG, 150, 400) == [(150, 400)]
    keep(cache, 180, 300)
    keep(cache, 100, 180)
    for seen in (cache, RangeCache(tmp_path)):
        assert seen.missing(ETAG, 150, 400) == [(300, 400)]
        assert seen.missing(ETAG, 50, 120) == [(50, 100)]
        assert seen.missing(ETAG, 50, 301) == [(50, 100), (300, 301)]
        assert seen.missing(ETAG, 100, 300) == []
        assert seen.missing("b" * 40, 100, 300) == [(100, 300)]
        assert read(seen, 110, 290) == DATA[110:290]
        assert read(seen, 179, 181) == DATA[179:181]


def test_ranges_that_overlap_are_read_right(tmp_path: Path) -> None:
    cache = RangeCache(tmp_path)
    for start, end in ((100, 200), (120, 140), (150, 260), (100, 130)):
        keep(cache, start, end)
    assert cache.missing(ETAG, 100, 260) == []
    assert read(cache, 101, 259) == DATA[101:259]


@pytest.mark.parametrize("damage", [lambda data: b"x" + data[1:], lambda data: data[:-1], lambda data: data + b"x"])
def test_damaged_range_is_missing_and_removed(tmp_path: Path, damage: object) -> None:
    path = keep(RangeCache(tmp_path), 100, 200)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    assert RangeCache(tmp_path).missing(ETAG, 120, 130) == [(120, 130)]
    assert not path.exists()


def test_foreign_files_in_the_folder_are_no_ranges(tmp_path: Path) -> None:
    folder = keep(RangeCache(tmp_path), 100, 200).parent
    for name in ("0-50", "0-50-xyz", "0-50-" + "0" * 15, "notes.txt", "9" * 30 + "-0-" + "0" * 16):
        (folder / name).write_bytes(b"")
    assert RangeCache(tmp_path).missing(ETAG, 0, 200) == [(0, 100)]


def test_what_arrived_before_an_interruption_is_kept(tmp_path: Path) -> None:
    cache = RangeCache(tmp_path)
    with suppress(KeyboardInterrupt), cache.writing(ETAG, 100) as writer:
        writer.write(DATA[100:150])
        raise KeyboardInterrupt
    assert RangeCache(tmp_path).missing(ETAG, 100, 200) == [(150, 200)]
    with cache.writing(ETAG, 300):
        pass
    assert [path.name.split("-")[:2] for path in (tmp_path / ETAG).iterdir()] == [["100", "150"]]


def test_leftover_of_a_killed_process_goes_after_a_day_and_no_sooner(tmp_path: Path) -> None:
    cache = RangeCache(tmp_path)
    folder = keep(cache, 0, 10).parent
    old, young = folder / ".old.part", folder / ".young.part"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (0, young.stat().st_mtime - ABANDONED_SECONDS - 1))
    keep(cache, 10, 20)
    assert (old.exists(), young.exists()) == (False, True)


def test_full_disk_says_where_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: RangeWriter, piece: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RangeWriter, "write", write)
    with pytest.raises(HubReadError, match=r"No space left(.|\n)*HF_ASSETS_CACHE"):
        keep(RangeCache(tmp_path), 0, 10)
    assert list((tmp_path / ETAG).iterdir()) == []


def test_folder_that_can_not_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / ETAG).write_text("a file")
    with pytest.raises(HubReadError, match="Keeping bytes"):
        keep(RangeCache(tmp_path), 0, 10)
