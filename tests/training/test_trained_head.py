"""A training checkpoint says which head it holds: it can be loaded and exported like any other checkpoint's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import mtp_zoo as mz
from mtp_zoo.cli import app
from mtp_zoo.errors import HeadMismatchError, SettingsError, SourceNotFoundError
from mtp_zoo.trained_head import WEIGHTS
from mtp_zoo.training.trainer import train
from tests.exporting import stored
from tests.training.conftest import MakeConfig


@pytest.fixture
def run(make_config: MakeConfig) -> Path:
    config = make_config(save_every=2, keep_checkpoints=2)
    train(config)
    return config.run_dir


def test_an_export_of_the_last_training_checkpoint_is_what_the_run_exported(
    run: Path, base: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    step = run / "checkpoints" / "step-000004"
    told = CliRunner().invoke(app, ["export", str(base), str(tmp_path / "again"), "--head", str(step), "--json"])
    assert told.exit_code == 0, told.output
    ours, theirs = stored(tmp_path / "again"), stored(make_config().out)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    earlier = mz.load_head(run / "checkpoints" / "step-000002")
    assert earlier.report.family == "qwen3_5"
    assert {value.dtype for value in earlier.parameters()} == {torch.float32}
    trained = load_file(run / "checkpoints" / "step-000002" / WEIGHTS)
    assert all(torch.equal(value, trained[name]) for name, value in earlier.weights().items())


def test_a_mesh_is_refused_and_not_forgotten(run: Path) -> None:
    mesh = type("Mesh", (), {"device_type": "cpu"})()
    with pytest.raises(SettingsError, match="mesh: expected none with a training checkpoint"):
        mz.load_head(run / "checkpoints" / "step-000004", mesh=mesh)


def test_a_dry_run_takes_a_training_checkpoint(run: Path, base: Path, tmp_path: Path) -> None:
    step = str(run / "checkpoints" / "step-000004")
    told = CliRunner().invoke(app, ["export", str(base), str(tmp_path / "x"), "--head", step, "--dry-run", "--json"])
    assert told.exit_code == 0, told.output
    assert not (tmp_path / "x").exists()


def test_the_directory_of_a_run_is_refused_and_its_newest_checkpoint_named(run: Path) -> None:
    with pytest.raises(SourceNotFoundError, match="it is the directory of a training run") as caught:
        mz.load_head(run)
    assert str(run / "checkpoints" / "step-000004") in caught.value.remedy


def test_a_training_checkpoint_that_does_not_describe_itself_is_refused(run: Path) -> None:
    state = run / "checkpoints" / "step-000004" / "state.json"
    told = json.loads(state.read_text(encoding="utf-8"))
    assert told["head"]["family"] == "qwen3_5"
    assert told["head"]["conventions"]["hidden_tap"] == "post_norm"
    del told["head"]
    state.write_text(json.dumps(told), encoding="utf-8")
    with pytest.raises(SourceNotFoundError, match="does not say which head it holds"):
        mz.load_head(state.parent)


def test_weights_of_another_head_are_refused(run: Path) -> None:
    path = run / "checkpoints" / "step-000004" / WEIGHTS
    tensors = load_file(path)
    first, second, *_ = sorted(tensors)
    tensors[first] = tensors[first][:1].clone()
    tensors["more"] = tensors.pop(second)
    save_file(tensors, path)
    with pytest.raises(HeadMismatchError, match="its tensors are not those of the qwen3_5 head") as caught:
        mz.load_head(path.parent)
    assert len(caught.value.problems) == 3
