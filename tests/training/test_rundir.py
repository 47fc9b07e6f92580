from __future__ import annotations

from pathlib import Path

import pytest

from mtp_zoo.errors import OutputExistsError, ResumeError
from mtp_zoo.training.rundir import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run")
    made.create({"lr": 0.1, "seed": 0, "betas": [0.9, 0.95]})
    for step in (1, 2, 3):
        made.append({"step": step, "loss": 1 / step})
    return made


def test_floats_are_written_in_full(run: RunDirectory) -> None:
    assert run.records()[2]["loss"] == 1 / 3


def test_rewinding_drops_later_steps_and_a_line_cut_off_by_a_kill(run: RunDirectory) -> None:
    whole = run.metrics.read_text(encoding="utf-8")
    run.metrics.write_text(whole + '{"step": 4, "lo', encoding="utf-8")
    assert [record["step"] for record in run.records()] == [1, 2, 3]
    run.rewind(2)
    assert run.metrics.read_text(encoding="utf-8") == "".join(whole.splitlines(keepends=True)[:2])


def test_metrics_that_miss_earlier_steps_are_refused_and_left_alone(run: RunDirectory) -> None:
    before = run.metrics.read_bytes()
    with pytest.raises(ResumeError, match="to hold steps 1 to 5, got 3 lines"):
        run.rewind(5)
    assert run.metrics.read_bytes() == before


def test_every_setting_that_differs_is_listed(run: RunDirectory) -> None:
    run.require({"lr": 0.1, "betas": [0.9, 0.95]})
    with pytest.raises(ResumeError) as caught:
        run.require({"lr": 0.2, "seed": 1, "new": None, "betas": [0.9, 0.95]})
    assert list(caught.value.problems) == [
        "lr: the run has 0.1, got 0.2",
        "seed: the run has 0, got 1",
        "new: the run has no such setting, got null",
    ]


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_directory_without_a_run_is_refused(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "run").mkdir()
    if content is not None:
        (tmp_path / "run" / "run.json").write_text(content, encoding="utf-8")
    with pytest.raises(ResumeError, match="no run in it"):
        RunDirectory(tmp_path / "run").require({})


def test_a_path_that_is_taken_is_refused_also_by_a_dead_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(OutputExistsError, match="the path exists"):
            RunDirectory(tmp_path / name).create({})
    assert not (tmp_path / "nowhere").exists()
