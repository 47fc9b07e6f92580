"""A tiny checkpoint with a tokenizer and a little text, shared by the tests of a session; runs are made in tmp_path."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mtp_zoo.training.config import TrainConfig
from tests.tiny import tiny_config, tiny_tensors, write_checkpoint
from tests.training.words import CHATML, WORDS, save_tokenizer

LENGTHS = (3, 50, 4, 17, 30, 3, 9, 26)
"""Tokens of the texts: from one slot at depth 1 and none behind it to far more, so that means of means stand out."""

MakeConfig = Callable[..., TrainConfig]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with one depth, two trunk layers and a tokenizer; never written to."""
    directory = tmp_path_factory.mktemp("base")
    config = tiny_config()
    write_checkpoint(directory, config, tiny_tensors(config))
    save_tokenizer(directory, CHATML, vocab_size=config["vocab_size"])
    return directory


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A jsonl file of texts of `LENGTHS` random words."""
    words = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    lines = [{"text": " ".join(words.choice(WORDS) for _ in range(length))} for length in LENGTHS]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def _own_accelerate_state() -> Iterator[None]:
    from mtp_zoo.training.launch import own_accelerate_state

    with own_accelerate_state():
        yield


@pytest.fixture
def make_config(base: Path, texts: Path, tmp_path: Path) -> MakeConfig:
    """Make a short fp32 run in tmp_path; keywords change fields, with `__` for dots."""

    def make(**changes: Any) -> TrainConfig:
        data: dict[str, Any] = {
            "model": str(base),
            "out": str(tmp_path / "out"),
            "run_dir": str(tmp_path / "run"),
            "data": {"path": str(texts), "text_field": "text", "max_length": 64, "pack": False},
            "optimizer": {"lr": 1e-3, "warmup_steps": 2},
            "steps": 4,
            "batch_size": 2,
            "precision": "fp32",
        }
        for path, value in changes.items():
            *sections, leaf = path.split("__")
            place = data
            for section in sections:
                place = place.setdefault(section, {})
            place[leaf] = value
        return TrainConfig.from_dict(data)

    return make
