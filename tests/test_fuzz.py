"""Mutated headers, indexes, configs and shards: typed errors or a right load, in bounded time and memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

import tests.fuzzing as fuzzing
from tests.fuzzing import ROOM, SECONDS, bases, mutated, run_cases

CASES = 200
"""`scripts/fuzz_checkpoints.py` runs thousands."""


def test_every_mutated_checkpoint_ends_in_a_typed_error_or_in_a_right_load() -> None:
    found = run_cases(range(CASES))
    assert found.failures == []
    assert (found.cases, sum(found.outcomes.values())) == (CASES, CASES)
    assert found.slowest < SECONDS
    assert found.peak < ROOM
    assert found.outcomes["loaded"] > CASES // 10, (
        "mutations that leave nothing readable test nothing behind the parser"
    )
    assert len(found.outcomes) >= 4


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda root: {}["a"], "KeyError"),
        (lambda root: bytearray(4 * ROOM), "MemoryError"),
        (lambda root: (root / "config.json").write_text("{}"), "the checkpoint was changed"),
    ],
)
def test_a_reader_that_fails_otherwise_is_found(
    monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], object], says: str
) -> None:
    monkeypatch.setattr(fuzzing, "inspect", harm)
    monkeypatch.setattr(fuzzing, "WARM_UP", 0)
    found = run_cases(range(2))
    assert [number for number, _ in found.failures] == [0, 1]
    assert all(says in what for _, what in found.failures)


def test_a_number_makes_the_same_case_each_time() -> None:
    files = bases()[0]
    one, again, other = (mutated(files, random.Random(number)) for number in (5, 5, 6))
    assert one == again != files
    assert other != one
