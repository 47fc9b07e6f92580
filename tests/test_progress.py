"""A bar on stderr for work that takes a while, and nothing otherwise."""

from __future__ import annotations

import time

import pytest

from mtp_zoo.progress import SHOW_AFTER_SECONDS, progress, progress_bytes


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def test_quick_work_shows_nothing(clock: Clock, capfd: pytest.CaptureFixture[str]) -> None:
    with progress("Reading", total=3) as advance:
        for _ in range(3):
            advance()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("failure", [None, KeyError])
def test_slow_work_shows_a_bar_on_stderr_and_ends_it(
    clock: Clock, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, failure: type[Exception] | None
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich draws a moving bar on terminals only
    raised = False
    try:
        with progress("Reading the head", total=3) as advance:
            advance()
            clock.now += SHOW_AFTER_SECONDS + 0.1
            advance()
            if failure:
                raise failure
    except KeyError:
        raised = True
    out, err = capfd.readouterr()
    assert out == ""
    assert "Reading the head" in err
    assert "2/3" in err
    assert raised is (failure is not None)


def test_bytes_are_shown_with_their_rate(
    clock: Clock, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four MiB every two seconds is a rate of 2 MB/s, as rich counts: 4 * 1,048,576 / 2 = 2,097,152 bytes a second."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with progress_bytes("Writing", total=12 << 20) as advance:
        for _ in range(2):
            clock.now += 2.0
            advance(4 << 20)
    out, err = capfd.readouterr()
    assert out == ""
    assert "8.0/12.0 MiB" in err
    assert "2.1 MB/s" in err
