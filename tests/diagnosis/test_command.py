"""`mtp-zoo doctor`: exit codes, JSON, and the text."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mtp_zoo.cli import app
from mtp_zoo.diagnosis.finding import CATALOGUE, Finding
from mtp_zoo.errors import SourceNotFoundError
from tests.diagnosis.cases import CASES, whole


def run(*words: str | Path) -> Any:
    return CliRunner().invoke(app, ["doctor", *map(str, words)])


@pytest.mark.parametrize(
    ("name", "code"),
    [("MZ004", 1), ("MZ102", 1), ("MZ009", 0), ("MZ011", 0)],
    ids=["error", "error", "warning", "info"],
)
def test_only_errors_end_with_one(name: str, code: int, tmp_path: Path) -> None:
    result = run(CASES[name].broken(tmp_path / "model"), "--json")
    assert result.exit_code == code
    (found,) = json.loads(result.stdout)["findings"]
    assert found.keys() == {"id", "severity", "facts", "fix"}
    assert (found["id"], found["severity"]) == (name, CATALOGUE[name].severity)


def test_a_sound_checkpoint_ends_with_zero(tmp_path: Path) -> None:
    result = run(whole(tmp_path / "model"), "--deep", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"findings": []})
    assert "nothing found" in run(whole(tmp_path / "again")).stdout


def test_a_place_that_is_no_checkpoint_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError):
        CliRunner().invoke(app, ["doctor", str(tmp_path / "nothing")], catch_exceptions=False)


def test_what_was_mended_is_told_and_the_rest_decides_the_exit_code(tmp_path: Path) -> None:
    result = run(CASES["MZ004"].broken(tmp_path / "model"), "--fix", "--json")
    data = json.loads(result.stdout)
    assert (result.exit_code, [found["id"] for found in data["findings"]], len(data["fixed"])) == (0, ["MZ015"], 1)
    result = run(CASES["MZ201"].broken(tmp_path / "other"), "--fix", "--json")
    data = json.loads(result.stdout)
    assert (result.exit_code, [found["id"] for found in data["findings"]], data["fixed"]) == (1, ["MZ201"], [])


def test_the_command_of_a_finding_names_the_checkpoint_as_a_shell_reads_it(tmp_path: Path) -> None:
    root = CASES["MZ004"].broken(tmp_path / "my model's")
    command = json.loads(run(root, "--json").stdout)["findings"][0]["fix"]
    assert shlex.split(command) == ["mtp-zoo", "doctor", str(root), "--fix"]
    assert CliRunner().invoke(app, shlex.split(command)[1:]).exit_code == 0


def test_long_lists_are_shortened_in_the_text_only() -> None:
    finding = Finding("MZ005", {"tensors": [f"t{number}" for number in range(9)]}, "do that")
    assert "tensors: t0, t1, t2, and 6 more" in str(finding)
    assert len(finding.as_dict()["facts"]["tensors"]) == 9
    assert str(finding).splitlines()[-1] == "  fix: do that"
