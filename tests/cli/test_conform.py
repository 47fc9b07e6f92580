"""`mtp-zoo conform`: what is asked for reaches the runner, and what it found reaches the user and the exit code."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mtp_zoo.cli import app, main
from mtp_zoo.errors import ConformanceError, EnvironmentSetupError
from mtp_zoo_conformance import run as runner
from mtp_zoo_conformance.engines import environment
from mtp_zoo_conformance.engines.client import EnginePython
from mtp_zoo_conformance.record import Record
from tests.conformance.records import cell, parity


class Runs:
    """Stands in for the runner: notes what it was asked, gives what it was told."""

    def __init__(self) -> None:
        self.record = parity()
        self.asked: dict[str, Any] = {}

    def __call__(self, selection: Any, pythons: Any, folder: Path, *, limit: float) -> Record:
        self.asked = {"selection": selection, "pythons": pythons, "folder": folder, "limit": limit}
        (folder / "log.txt").touch()
        return self.record


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runs:
    made = Runs()
    monkeypatch.setattr(runner, "run", made)
    monkeypatch.setenv("MTP_ZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # what is no parity leaves its files
    return made


def conform(*words: str | Path) -> Any:
    return CliRunner().invoke(app, ["conform", *map(str, words)])


def test_everything_is_judged_by_default(runs: Runs) -> None:
    result = conform()
    assert result.exit_code == 0, result.output
    selection = runs.asked["selection"]
    assert (selection.families, selection.engines) == (None, ("vllm", "sglang"))
    assert selection.tiers == ("keys", "forward", "module", "serve")
    assert (runs.asked["pythons"], runs.asked["limit"]) == ({}, 600)
    assert "Parity. 321 s" in result.stdout
    assert not runs.asked["folder"].exists()


def test_options_reach_the_runner(runs: Runs, tmp_path: Path) -> None:
    words = ("--family", "qwen3_5", "--engine", "sglang", "--tier", "module", "--tier", "serve", "--limit", "9")
    assert conform(*words, "--keep", tmp_path / "kept").exit_code == 0
    selection = runs.asked["selection"]
    assert (selection.families, selection.engines) == (("qwen3_5",), ("sglang",))
    assert (selection.tiers, runs.asked["limit"]) == (("module", "serve"), 9)
    assert (tmp_path / "kept" / "log.txt").is_file()


@pytest.mark.parametrize(("verdict", "code"), [("differs", 1), ("not_judged", 3)])
def test_what_is_not_parity_is_no_success_and_its_files_stay(runs: Runs, verdict: Any, code: int) -> None:
    runs.record.cells.append(cell("vllm", "module", "mlp", verdict, reason="log: somewhere"))
    result = conform()
    assert result.exit_code == code
    assert "log: somewhere" in result.stdout
    assert f"Checkpoints, outputs and logs: {runs.asked['folder']}" in result.stderr
    assert runs.asked["folder"].is_dir()


def test_a_run_that_judged_nothing_is_no_success(runs: Runs) -> None:
    runs.record = Record(cells=[cell("vllm", "module", "all", "not_judged", reason="needs a GPU", expected=True)])
    result = conform()
    assert result.exit_code == 3
    assert "Nothing was judged." in result.stdout


def test_json_is_the_record_and_the_report_is_written(runs: Runs, tmp_path: Path) -> None:
    result = conform("--json", "--report", tmp_path / "report")
    assert Record.from_dict(json.loads(result.stdout)) == runs.record
    written = json.loads((tmp_path / "report" / "conformance.json").read_text())
    assert written == json.loads(result.stdout)
    assert "<svg" in (tmp_path / "report" / "index.html").read_text()


def test_an_environment_of_the_users_own(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find", lambda engine: EnginePython(engine, Path("managed"), managed=True))
    assert conform("--engine-python", f"vllm={sys.executable}").exit_code == 0
    own, managed = runs.asked["pythons"]["vllm"], runs.asked["pythons"]["sglang"]
    assert (own.python, own.managed) == (Path(sys.executable), False)
    assert (managed.python, managed.managed) == (Path("managed"), True)
    assert conform("--engine", "sglang", "--engine-python", sys.executable).exit_code == 0
    assert list(runs.asked["pythons"]) == ["sglang"]
    assert not runs.asked["pythons"]["sglang"].managed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--engine-python", sys.executable), "expected ENGINE=PATH with ENGINE one of vllm, sglang"),
        (
            ("--engine", "vllm", "--engine-python", f"sglang={sys.executable}"),
            "expected ENGINE=PATH with ENGINE one of vllm",
        ),
        (("--engine-python", "vllm=/no/such/python"), "there is no file /no/such/python"),
        (("--family", "no_such_family"), "no_such_family"),
        (("--plugin", "no_such_module"), "Importing the plugin no_such_module (--plugin): ModuleNotFoundError"),
        (("--keep", "/dev/null/x"), "Writing into --keep /dev/null/x: Not a directory"),
        (("--report", "/dev/null/x"), "Writing into --report /dev/null/x: Not a directory"),
    ],
)
def test_a_wrong_option_is_a_user_error(runs: Runs, words: tuple[str, ...], message: str) -> None:
    result = conform(*words)
    assert isinstance(result.exception, ConformanceError)
    assert message in result.exception.message


def test_a_plugin_of_the_working_directory_is_imported(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plugin_for_a_test.py").write_text("LOADED = True\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert conform("--plugin", "plugin_for_a_test").exit_code == 0
    assert sys.modules.pop("plugin_for_a_test").LOADED


def test_an_installed_plugin_is_imported(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "installed_plugin.py").write_text("LOADED = True\n", encoding="utf-8")
    (tmp_path / "installed-1.dist-info").mkdir()
    (tmp_path / "installed-1.dist-info" / "METADATA").write_text("Name: installed\nVersion: 1\n", encoding="utf-8")
    points = "[mtp_zoo.conformance]\nmine = installed_plugin\n"
    (tmp_path / "installed-1.dist-info" / "entry_points.txt").write_text(points, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert conform().exit_code == 0
    assert sys.modules.pop("installed_plugin").LOADED


def test_install_makes_environments_and_judges_nothing(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        environment, "install", lambda engine: EnginePython(engine, Path(f"/{engine}/python"), managed=True)
    )
    result = conform("--install", "vllm", "--install", "sglang", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"pythons": {"vllm": "/vllm/python", "sglang": "/sglang/python"}}
    assert runs.asked == {}


def test_an_environment_that_can_not_be_made_is_not_judged(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: str) -> None:
        raise EnvironmentSetupError("The disk is full. Log: /x.log", remedy="Free some.")

    monkeypatch.setattr(environment, "install", failing)
    result = conform("--install", "vllm")
    assert result.exit_code == 3
    assert "EnvironmentSetupError: The disk is full. Log: /x.log" in result.stderr
    assert result.stdout == ""


def test_the_command_ends_with_two_on_a_user_error(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mtp-zoo", "conform", "--family", "nothing"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "ConformanceError" in capsys.readouterr().err
