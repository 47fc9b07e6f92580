"""A Hub, and a way to it, on which things go wrong: each ends in the right bytes or in one typed error, and nothing twice."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest

from mtp_zoo.checkpoint import CheckpointIndex, TensorReader
from mtp_zoo.checkpoint_source import locate
from mtp_zoo.errors import BrokenCheckpointError, ChangedOnHubError, HubReadError, MTPZooError
from mtp_zoo.hub_http import LONGEST_ASKED_WAIT, TRIES, asked_wait
from mtp_zoo.hub_ranges import THREADS, cut_ranges, join_ranges
from mtp_zoo.index_file import INDEX_NAME
from mtp_zoo.registry import needed_by_head
from mtp_zoo.storage import ByteRange
from tests.exporting import HEAD, ONE, THREE, TWO, make_base
from tests.hub.loopback import LoopbackHub

REPO = "acme/tiny"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture
def repo(hub: LoopbackHub, base: Path) -> str:
    hub.publish(REPO, hub.files_of(base))
    return REPO


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What would have been waited, instead of waiting."""
    waited: list[float] = []
    monkeypatch.setattr("mtp_zoo.hub_http.Event", lambda: _Stop(waited))
    monkeypatch.setattr("mtp_zoo.hub_ranges.Event", lambda: _Stop(waited))
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda seconds: None))
    return waited


class _Stop(Event):
    def __init__(self, waited: list[float]) -> None:
        super().__init__()
        self._waited = waited

    def wait(self, timeout: float | None = None) -> bool:
        self._waited.append(timeout or 0.0)
        return self.is_set()


@pytest.fixture
def small_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers are read alone, so that tensors take requests of their own although these checkpoints are tiny."""
    monkeypatch.setattr("mtp_zoo.hub_storage.FIRST_BYTES", 64)
    monkeypatch.setattr("mtp_zoo.hub_ranges.JOINED_AT_LEAST", 0)


def read_head(repo: str) -> dict[str, bytes]:
    index = CheckpointIndex.open(repo, need=needed_by_head)
    entries = index.require(HEAD)
    reader = TensorReader(index)
    reader.fetch(entries)
    return {entry.name: b"".join(map(bytes, reader.raw(entry))) for entry in entries}


PASSING = [
    ("GET cdn", "status", {"status": 503}),
    ("GET cdn", "status", {"status": 429, "headers": {"Retry-After": "7"}}),
    ("GET cdn", "status", {"status": 416, "headers": {}}),
    ("GET hub .*resolve", "status", {"status": 500}),
    ("GET cdn", "reset", {}),
    ("GET cdn", "drop", {"after": 10}),
    ("GET cdn", "slow", {"seconds": 0.05}),
    ("GET cdn", "wrong_range", {}),
    ("GET cdn", "ignore_range", {}),
    ("GET cdn", "gzip", {}),
    ("GET hub /api/models", "status", {"status": 503}),
    ("GET hub /api/models", "reset", {}),
    ("hub .*config.json", "status", {"status": 503}),
    ("hub .*config.json", "reset", {}),
]


@pytest.mark.usefixtures("small_headers")
@pytest.mark.parametrize(("where", "what", "options"), PASSING, ids=lambda value: str(value))
def test_fault_that_passes_is_ridden_out(
    hub: LoopbackHub, repo: str, base: Path, where: str, what: str, options: dict[str, object]
) -> None:
    hub.fail(where, what, times=2, **options)
    assert read_head(repo) == read_head(str(base))
    assert hub.pending == 0


LASTING = [
    ("GET cdn", "status", {"status": 503}, r"the Hub answers 503, 6 failures in a row"),
    ("GET cdn", "status", {"status": 416}, r"answers 416 to a range that is inside the file"),
    ("GET cdn", "status", {"status": 451}, r"the Hub answers 451"),
    ("GET cdn", "reset", {}, r"Reading bytes .* of model-"),
    ("GET cdn", "wrong_range", {}, r"asked for bytes \d+-\d+, the server gives"),
    ("GET cdn", "gzip", {}, r"compresses a byte range"),
    ("GET hub /api/models", "reset", {}, r"Opening 'acme/tiny'"),
    ("GET hub /api/models", "status", {"status": 418}, r"Opening 'acme/tiny': the Hub answers 418"),
    ("GET hub /api/models", "status", {"status": 200}, r"Opening 'acme/tiny': KeyError"),
    ("hub .*config.json", "status", {"status": 200}, r"Reading config.json of 'acme/tiny': FileMetadataError"),
    ("hub .*config.json", "status", {"status": 503}, r"Reading config.json of 'acme/tiny': the Hub answers 503"),
]


@pytest.mark.parametrize(("where", "what", "options", "message"), LASTING, ids=lambda value: str(value))
def test_fault_that_stays_is_an_error_that_says_what_it_was(
    hub: LoopbackHub, repo: str, where: str, what: str, options: dict[str, object], message: str
) -> None:
    hub.fail(where, what, times=10**6, **options)
    with pytest.raises(HubReadError, match=message):
        read_head(repo)


def test_server_that_ignores_ranges_is_read_past_up_to_a_limit(
    hub: LoopbackHub, repo: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.fail("GET cdn", "ignore_range", times=10**6)
    assert read_head(repo) == read_head(str(base))
    monkeypatch.setattr("mtp_zoo.hub_ranges.WHOLE_FILE_LIMIT", 1000)
    with pytest.raises(HubReadError, match="ignores byte ranges"):
        locate(repo).fetch([ByteRange(ONE, 70000, 70001)])


@pytest.mark.usefixtures("small_headers")
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("etag", "its ETag is eeee"),
        ("commit", "it comes from commit cccc"),
        ("pointer", r"bytes there \(a git-lfs pointer"),
    ],
)
@pytest.mark.parametrize("skip", [0, 2])
def test_file_that_is_not_the_listed_one_is_refused_at_once(
    hub: LoopbackHub, repo: str, waits: list[float], what: str, message: str, skip: int
) -> None:
    hub.uses_per_signature = 1  # so that every range asks the hub anew
    hub.fail("GET hub .*safetensors$", what, skip=skip)
    with pytest.raises(ChangedOnHubError, match=message):
        read_head(repo)
    assert not any(waits), "there is nothing to wait for"


def test_file_that_grew_or_went_away_behind_the_listing_is_refused(hub: LoopbackHub, repo: str, base: Path) -> None:
    storage = locate(repo)
    commit = hub.repos[REPO].commits[storage.revision or ""]
    blob = commit.pop(THREE)
    with pytest.raises(ChangedOnHubError, match="it is gone"):
        storage.fetch([ByteRange(THREE, 0, 10)])
    hub.blobs[blob.sha256] = type(blob)(blob.data + b"more", lfs=True)
    commit[THREE] = blob
    with pytest.raises(ChangedOnHubError, match=r"another version"):
        storage.fetch([ByteRange(THREE, 0, 10)])


def test_small_file_with_other_bytes_than_listed_is_refused(hub: LoopbackHub, repo: str) -> None:
    hub.fail("GET hub .*config.json", "flip")
    with pytest.raises(MTPZooError, match=r"config.json of acme/tiny at .*: expected [0-9a-f]{40}, got [0-9a-f]{40}"):
        CheckpointIndex.open(repo)


@pytest.mark.usefixtures("small_headers")
def test_connection_that_breaks_is_continued_where_it_broke(hub: LoopbackHub, repo: str, base: Path) -> None:
    entry = CheckpointIndex.open(base).entries["mtp.fc.weight"]
    index = CheckpointIndex.open(repo)
    hub.forget()
    hub.fail("GET cdn", "drop", after=1000, times=TRIES + 2)  # progress starts the count of failures anew
    index.storage.fetch([ByteRange(entry.file, entry.start, entry.end)])
    ranges = [request.range for request in hub.requests if request.origin == "cdn"]
    assert ranges == [f"bytes={entry.start + done}-{entry.end - 1}" for done in range(0, 1000 * (TRIES + 3), 1000)]
    assert index.storage.bytes_moved - sum(request.sent for request in hub.requests) == header_bytes(index)


def header_bytes(index: CheckpointIndex) -> int:
    """What opening moved: the small files and every header."""
    return index.header_bytes + (index.root / "config.json").stat().st_size


@pytest.mark.usefixtures("small_headers")
def test_what_arrived_before_a_failure_is_not_read_again(hub: LoopbackHub, repo: str, base: Path) -> None:
    entry = CheckpointIndex.open(base).entries["mtp.fc.weight"]
    index = CheckpointIndex.open(repo)
    hub.fail("GET cdn", "drop", after=5000)
    hub.fail("GET cdn", "reset", times=10**6, skip=1)
    with pytest.raises(HubReadError):
        index.storage.fetch([ByteRange(entry.file, entry.start, entry.end)])
    hub.heal()
    hub.forget()
    again = CheckpointIndex.open(repo)
    read = b"".join(map(bytes, TensorReader(again).raw(entry)))
    assert read == b"".join(map(bytes, TensorReader(CheckpointIndex.open(base)).raw(entry)))
    assert hub.sent("cdn") == entry.nbytes - 5000


@pytest.mark.usefixtures("small_headers")
def test_many_segments_in_parallel_over_a_bad_line_are_the_right_bytes_and_none_twice(
    hub: LoopbackHub, repo: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtp_zoo.hub_ranges.SMALLEST_SEGMENT", 1000)
    monkeypatch.setattr("mtp_zoo.hub_ranges.LARGEST_SEGMENT", 1000)
    storage = locate(repo)
    for skip in range(0, 60, 3):
        hub.fail("GET cdn", "drop", after=300, skip=skip)
    sizes = {file: (base / file).stat().st_size for file in (ONE, TWO, THREE)}
    storage.fetch(ByteRange(file, 0, size) for file, size in sizes.items())
    assert hub.pending == 0
    for file, size in sizes.items():
        view = bytearray(size)
        assert storage.fill(file, 0, memoryview(view)) == size
        assert bytes(view) == (base / file).read_bytes()
    assert hub.sent("cdn") == sum(sizes.values())


@pytest.mark.usefixtures("small_headers")
def test_signed_address_is_used_again_until_it_expires(
    hub: LoopbackHub, repo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtp_zoo.hub_ranges.THREADS", 1)
    storage = locate(repo)
    for uses, asked in ((None, 1), (2, 3)):
        hub.uses_per_signature = uses
        hub.forget()
        for start in range(0, 60, 10):
            storage.fetch([ByteRange(THREE if uses else TWO, start, start + 10)])
        assert sum("/resolve/" in request.path for request in hub.requests) == asked


def test_waits_are_those_the_server_asks_for(hub: LoopbackHub, repo: str, waits: list[float]) -> None:
    hub.fail("GET cdn", "status", status=429, headers={"RateLimit": '"resolvers";r=0;t=33', "Retry-After": "5"})
    hub.fail("GET cdn", "status", status=503, headers={"Retry-After": "4"})
    locate(repo).fetch([ByteRange(TWO, 0, 10)])
    assert waits == [33.0, 4.0]
    hub.fail("GET cdn", "status", status=429, headers={"Retry-After": str(int(LONGEST_ASKED_WAIT) + 1)})
    with pytest.raises(HubReadError, match="answers 429"):
        locate(repo).fetch([ByteRange(ONE, 0, 10)])


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": " 12 "}, 12.0),
        ({"Retry-After": "soon"}, None),
        ({"RateLimit": '"api";r=3;t=55'}, None),
        ({"RateLimit": '"api"; r=0; t=55'}, 55.0),
        ({"RateLimit": '"api";r=30;t=55', "Retry-After": "2"}, 2.0),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
    ],
)
def test_wait_that_a_server_asks_for(headers: dict[str, str], seconds: float | None) -> None:
    assert asked_wait(headers) == seconds


def test_date_to_wait_for_is_seconds_from_now() -> None:
    hour = asked_wait({"Retry-After": format_datetime(datetime.now(timezone.utc) + timedelta(hours=1))})
    assert hour is not None
    assert 3500 < hour <= 3600


def test_waits_grow_to_a_limit(hub: LoopbackHub, repo: str, waits: list[float]) -> None:
    hub.fail("GET hub /api/models", "status", status=503, times=10**6)
    with pytest.raises(HubReadError):
        CheckpointIndex.open(repo)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0]


def test_ranges_are_joined_over_small_gaps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtp_zoo.hub_ranges.JOINED_AT_LEAST", 10)
    parts = [ByteRange("b", 0, 5), ByteRange("a", 230, 300), ByteRange("a", 0, 100), ByteRange("a", 104, 200)]
    assert join_ranges([*parts, parts[2]]) == [ByteRange("a", 0, 200), ByteRange("a", 230, 300), ByteRange("b", 0, 5)]
    within = [ByteRange("a", 0, 100), ByteRange("a", 10, 20), ByteRange("a", 90, 120), ByteRange("a", 120, 130)]
    assert join_ranges(within) == [ByteRange("a", 0, 130)]
    # Ten gaps of 3 bytes: there is room for three of them, the bytes that nobody asked for stay below the share.
    spread = [ByteRange("a", start, start + 5) for start in range(0, 88, 8)]
    joined = join_ranges(spread)
    assert len(joined) == len(spread) - 3
    assert sum(part.end - part.start for part in joined) == 5 * len(spread) + 9


def test_long_ranges_are_cut_so_that_all_threads_have_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtp_zoo.hub_ranges.SMALLEST_SEGMENT", 10)
    monkeypatch.setattr("mtp_zoo.hub_ranges.LARGEST_SEGMENT", 100)
    assert [part.end - part.start for part in cut_ranges([ByteRange("a", 0, 25)])] == [10, 10, 5]
    assert [part.end - part.start for part in cut_ranges([ByteRange("a", 7, 7 + 16 * THREADS)])] == [16] * THREADS
    long = cut_ranges([ByteRange("a", 5, 2005)])
    assert {part.end - part.start for part in long} == {100}
    assert (long[0].start, long[-1].end) == (5, 2005)


def test_index_is_compared_with_headers_as_in_a_directory(hub: LoopbackHub, base: Path) -> None:
    files = hub.files_of(base)
    files[INDEX_NAME] = files[INDEX_NAME].replace(THREE.encode(), TWO.encode())
    hub.publish(REPO, files)
    with pytest.raises(BrokenCheckpointError, match=f"{TWO}: the index puts .* does not hold them; {THREE} does"):
        read_head(REPO)
