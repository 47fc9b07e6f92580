"""Training on several ranks: every collective is reached by all of them, and one rank's failure ends all with its number."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from mtp_zoo.errors import DataError
from mtp_zoo.training.config import TrainConfig
from mtp_zoo.training.launch import own_accelerate_state
from mtp_zoo.training.trainer import Trainer, train
from tests.parallel.ranks import on_ranks
from tests.training.conftest import MakeConfig

LIMIT = 60
"""Seconds after which a rank must have heard of another's failure."""


def _launched(rank: int, size: int) -> None:
    """What torchrun tells a process; accelerate takes the process group that is there."""
    os.environ |= {"ACCELERATE_USE_CPU": "1", "RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{size}"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def _curve(rank: int, size: int, config: str) -> list[dict[str, float]]:
    """One run; few held-out rows, so that ranks of a larger group have none."""
    _launched(rank, size)
    result = train(TrainConfig.from_yaml(config))
    return [dict(result.metrics)]


def write(folder: Path, config: TrainConfig) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    return str(folder / "config.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_one_held_out_row_is_evaluated_on_any_number_of_ranks(
    size: int, make_config: MakeConfig, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"steps": 2, "eval_every": 1, "data__eval_fraction": 0.1}
    alone = make_config(**options, batch_size=6, run_dir=str(tmp_path / "one"), out=str(tmp_path / "one_out"))
    expected = train(alone).metrics
    config = make_config(**options, batch_size=6 // size, run_dir=str(tmp_path / "run"), out=str(tmp_path / "out"))
    found = on_ranks(_curve, tmp_path / "ranks", size, write(tmp_path, config), size=size)
    for records in found:
        assert records[-1]["eval/mtp/slots_1"] == expected["eval/mtp/slots_1"] > 0
        assert records[-1]["eval/loss"] == pytest.approx(expected["eval/loss"], rel=1e-4)


def _failing(rank: int, size: int, config: str, place: str, failing: int) -> tuple[str, float]:
    """What this rank raised where one rank fails in `place`, and after how many seconds."""
    _launched(rank, size)
    with own_accelerate_state():
        start = time.monotonic()
        try:
            trainer = Trainer(TrainConfig.from_yaml(config))
            if rank == failing:
                owner = trainer.accelerator if place == "backward" else trainer
                setattr(owner, place, _raise)
            start = time.monotonic()
            trainer.fit()
        except Exception as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "nothing", time.monotonic() - start


def _raise(*_: Any, **__: Any) -> None:
    raise DataError("a broken row", remedy="None.")


PLACES = [
    ("_batch", 2),
    ("_loss", 3),
    ("backward", 2),
    ("_clip", 3),
    ("evaluate", 2),
    ("_save", 3),
    ("_finish", 2),
]
"""Where a rank fails, and on how many ranks it is tried."""


@pytest.mark.slow
@pytest.mark.parametrize(("place", "size"), PLACES)
def test_a_rank_that_fails_ends_all_with_its_number(
    place: str, size: int, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(steps=2, eval_every=1, save_every=1, batch_size=1, data__eval_fraction=0.3)
    failing = 0 if place == "_finish" else size - 1
    found = on_ranks(_failing, tmp_path / "ranks", size, write(tmp_path, config), place, failing, size=size)
    for rank, (text, seconds) in enumerate(found):
        assert seconds < LIMIT
        if rank == failing:
            assert text.startswith("DataError: a broken row")
        else:
            assert text.startswith("RankError: ")
            assert f"rank {failing} failed: DataError: a broken row" in text
