from __future__ import annotations

import pytest

from mtp_zoo.training import bar as bar_module
from mtp_zoo.training.bar import TrainingBar

RECORD = {"step": 7.0, "loss": 1.5, "mtp/acc_1": 0.25, "mtp/acc_2": 0.125, "tokens": 100.0}


def test_away_from_a_terminal_a_line_comes_now_and_then_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bar_module, "SECONDS_BETWEEN_LINES", 0.0)
    with TrainingBar(9, 6, 2, shown=True) as bar:
        bar.step(RECORD)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("step 7/9  loss 1.5000  acc 0.250 0.125  ")
    assert captured.err.endswith(" tokens/s\n")
    assert bar.tokens == 100


def test_short_runs_and_other_processes_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    for shown in (True, False):
        with TrainingBar(9, 6, 2, shown=shown) as bar:
            bar.step(RECORD)
    assert capsys.readouterr() == ("", "")
