"""Requests: the layout that both sides read."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from mtp_zoo_conformance.inputs import LENGTHS, STEPS, Requests


def test_requests_lie_one_behind_the_other() -> None:
    requests = Requests.random(vocab=10, hidden=4, lengths=(2, 3))
    assert requests.spans == (slice(0, 2), slice(2, 5))
    assert requests.last == [1, 4]
    assert [requests.where(row) for row in (0, 1, 2, 4)] == [
        "request 0, position 0",
        "request 0, position 1",
        "request 1, position 0",
        "request 1, position 2",
    ]


def test_the_default_requests_are_ragged_and_take_three_chained_steps() -> None:
    assert len(set(LENGTHS)) == len(LENGTHS) >= 3
    assert STEPS >= 4


def test_a_seed_decides_everything(tmp_path: Path) -> None:
    first, again = (load_file(Requests.random(vocab=9, hidden=4, seed=3).save(tmp_path / name)) for name in "ab")
    other = Requests.random(vocab=9, hidden=4, seed=4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["hidden_states"], other.hidden_states)


def test_the_file_holds_what_workers_read(tmp_path: Path) -> None:
    requests = Requests.random(vocab=9, hidden=4, lengths=(2, 3))
    stored = load_file(requests.save(tmp_path / "inputs.safetensors"))
    assert {name: (tuple(value.shape), value.dtype) for name, value in stored.items()} == {
        "input_ids": ((5,), torch.int64),
        "hidden_states": ((5, 4), torch.float32),
        "target_ids": ((5,), torch.int64),
        "seq_lens": ((2,), torch.int64),
    }
