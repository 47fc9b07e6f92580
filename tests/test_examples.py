"""The examples run as they stand, learn, and leave a checkpoint whose head loads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import mtp_zoo as mz
from tests.children import run_forked, run_script

EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = ("plain_loop", "accelerate_loop", "hf_trainer", "trl_sft", "rl_step")
ROW = re.compile(r"^(loss|reward|mtp_loss|accept length) +([0-9.]+) +([0-9.]+)$", re.MULTILINE)

MOST_LINES = 90
"""An example is read in one go."""


def test_every_example_is_run_here() -> None:
    found = {path.stem for path in EXAMPLES.glob("*.py")} - {"tiny_checkpoint"}
    assert found == set(NAMES)
    assert all(len((EXAMPLES / f"{name}.py").read_text().splitlines()) < MOST_LINES for name in NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_example_learns_and_saves(name: str, tmp_path: Path) -> None:
    done = run_forked(tmp_path, run_script, str(EXAMPLES / f"{name}.py"), "--out", str(tmp_path))
    assert done.status == 0, done.stderr
    measured = {found[1]: (float(found[2]), float(found[3])) for found in ROW.finditer(done.stdout)}
    first, last = measured["mtp_loss"]
    assert last < 0.3 * first
    first, last = measured["accept length"]
    assert last > 1.5 > 1.2 > first
    saved = tmp_path / "trained"
    assert f"saved: {saved}" in done.stdout
    untrained, trained = mz.load_head(tmp_path / "tiny").state_dict(), mz.load_head(saved).state_dict()
    assert all(not torch.equal(trained[weight], value) for weight, value in untrained.items())
    if name == "rl_step":
        assert "with and without the MTP loss: equal" in done.stdout
        assert measured["reward"][1] > measured["reward"][0] + 0.5
