from __future__ import annotations

import subprocess
import sys
from typing import Any, get_args

import pytest
import yaml

from mtp_zoo.errors import SettingsError
from mtp_zoo.training.config import LossName, ObjectiveConfig, TrainConfig


def settings(**changes: Any) -> dict[str, Any]:
    """The smallest configuration, with dotted changes such as `{"optimizer.lr": 1}`."""
    data: dict[str, Any] = {
        "model": "models/tiny",
        "out": "out",
        "run_dir": "run",
        "data": {"path": "train.jsonl", "text_field": "text"},
        "steps": 10,
    }
    for path, value in changes.items():
        *sections, leaf = path.split("__")
        place = data
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = value
    return data


def problems_of(data: dict[str, Any]) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        TrainConfig.from_dict(data)
    return [str(problem) for problem in caught.value.problems]


def test_the_smallest_configuration_gets_documented_defaults() -> None:
    config = TrainConfig.from_dict(settings())
    assert (config.objective.depths, config.objective.loss, config.precision) == (3, "kl", "bf16")
    assert config.objective.beta is None
    assert config.data.pack
    assert config.trainable == ["fusion", "attention", "mlp", "experts", "router", "norms", "lm_head"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"objective__depht": 2}, "objective.depht: no such field; did you mean 'objective.depths'?"),
        ({"optimiser": {}}, "optimiser: no such field; did you mean 'optimizer'?"),
        ({"lr": 1e-3}, "lr: no such field; did you mean 'optimizer.lr'?"),
        ({"optimizer__lr": -1}, "optimizer.lr: expected greater than 0, got -1"),
        ({"optimizer__lr": float("nan")}, "optimizer.lr: expected a finite number, got nan"),
        ({"optimizer__betas": [0.9]}, "optimizer.betas.1: expected a value, got none"),
        ({"precision": "fp16"}, "precision: expected 'bf16' or 'fp32', got 'fp16'"),
        (
            {"objective__loss": {"kl": 1, "tw": 1}},
            "objective.loss.tw: expected 'kl', 'ce', 'reverse_kl', 'tv' or 'lk', got 'tw'",
        ),
        ({"objective__loss": {}}, "objective.loss: expected a loss or a mix of losses, got an empty mapping"),
        ({"data": [1]}, "data: expected a mapping, got [1]"),
        ({"seed": True}, "seed: expected a number, got true"),
        ({"run_dir": "out/run"}, "run_dir: expected a directory outside out (out), got out/run"),
        ({"epochs": 2}, "epochs: expected exactly one of steps and epochs, got both"),
        ({"steps": None}, "epochs: expected exactly one of steps and epochs, got neither"),
        (
            {"data__messages_field": "messages"},
            "data.messages_field: expected exactly one of text_field and messages_field, got both",
        ),
        (
            {"data__eval_path": "e.jsonl", "data__eval_fraction": 0.1},
            "data.eval_fraction: expected at most one of eval_path and eval_fraction, got both",
        ),
        (
            {"objective__beta": 0.5, "objective__weights": [1, 1, 1]},
            "objective.weights: expected at most one of beta and weights, got both",
        ),
        (
            {"trainable": ["fusions"]},
            "trainable.0: expected 'fusion', 'attention', 'mlp', 'experts', 'router', 'norms' or 'lm_head', got 'f",
        ),
        (
            {"trainable": []},
            "trainable: expected at least one of fusion, attention, mlp, experts, router, norms, lm_head, got none",
        ),
        ({"objective__weights": [1, 1]}, "objective.weights: expected one weight for each of 3 depths, got 2"),
        ({"objective__weights": [0, 0, 0]}, "objective.weights: expected a weight above 0, got none"),
        (
            {"objective__depths": 2.5},
            "objective.depths: expected a valid integer, got a number with a",
        ),
    ],
)
def test_one_wrong_field_is_one_line_with_path_expected_and_got(change: dict[str, Any], line: str) -> None:
    found = problems_of(settings(**change))
    assert any(problem.startswith(line) for problem in found), found


def test_all_problems_come_at_once_and_the_remedy_with_them() -> None:
    data = settings(steps=0, optimizer__lr="fast", objective__rolout="chain", data__max_length=1)
    del data["model"]
    with pytest.raises(SettingsError) as caught:
        TrainConfig.from_dict(data, source="a.yaml")
    text = str(caught.value)
    assert text.startswith("Reading a.yaml: 5 problems.")
    for path in ("model:", "steps:", "optimizer.lr:", "objective.rolout:", "data.max_length:"):
        assert f"  - {path}" in text
    assert "Remedy:" in text


def test_an_unknown_field_that_resembles_nothing_gets_the_list_of_fields() -> None:
    (problem,) = problems_of(settings(optimizer__zzz=1))
    assert problem.startswith("optimizer.zzz: no such field; expected one of lr, weight_decay, betas")


def test_yaml_writes_back_to_an_equal_configuration(tmp_path) -> None:
    config = TrainConfig.from_dict(settings(objective__loss={"kl": 0.9, "ce": 0.1}, optimizer__lr=3e-4))
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert TrainConfig.from_yaml(path) == config


def test_a_rate_that_yaml_reads_as_text_is_a_number(tmp_path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings()) + "optimizer: {lr: 1e-3}\n", encoding="utf-8")
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["optimizer"]["lr"] == "1e-3"
    assert TrainConfig.from_yaml(path).optimizer.lr == 0.001


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- a\n- b\n", "expected a mapping of fields to values, got a list"),
        ("", "expected a mapping of fields to values, got nothing"),
        ("model: [unclosed\n", "not YAML"),
        ("steps: 1\nsteps: 2\n", "'steps' stands twice"),
        ("data: {path: a, path: b}\n", "'path' stands twice"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused_by_name(tmp_path, content: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(SettingsError, match=message) as caught:
        TrainConfig.from_yaml(path)
    assert str(path) in caught.value.message


def test_a_missing_file_is_refused_by_name(tmp_path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.yaml: No such file"):
        TrainConfig.from_yaml(tmp_path / "absent.yaml")


def test_curve_settings_hold_what_changes_the_curve_and_nothing_else() -> None:
    config = TrainConfig.from_dict(settings())
    kept = config.curve_settings()
    free = {"out", "run_dir", "save_every", "keep_checkpoints", "eval_every", "trackers", "data.path", "data.eval_path"}
    every = set(kept) | free
    assert free.isdisjoint(kept)
    assert {"model", "seed", "steps", "batch_size", "optimizer.lr", "objective.loss", "data.max_length"} <= set(kept)
    assert len(every) == sum(1 for _ in _leaves(TrainConfig))


def _leaves(model: Any) -> Any:
    for field in model.model_fields.values():
        if hasattr(field.annotation, "model_fields"):
            yield from _leaves(field.annotation)
        else:
            yield field


def test_every_field_is_documented_in_the_schema() -> None:
    assert all(field.description for field in _leaves(TrainConfig))
    schema = TrainConfig.model_json_schema()
    assert schema["properties"]["batch_size"]["description"] == "Rows in a micro-batch, for each process."


def test_losses_and_beta_agree_with_the_objective() -> None:
    from mtp_zoo.losses import LOSSES
    from mtp_zoo.objective import DEFAULT_BETA

    assert set(get_args(LossName)) == set(LOSSES)
    assert f"Default {DEFAULT_BETA}" in str(ObjectiveConfig.model_fields["beta"].description)


def test_reading_a_configuration_loads_no_torch() -> None:
    code = "import sys, mtp_zoo.training.config; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
