"""Engines' environments: made once, whole or not at all, and every failure is one message. No engine is installed here."""

from __future__ import annotations

import fcntl
import json
import shutil
import stat
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mtp_zoo.errors import EnvironmentSetupError
from mtp_zoo_conformance.engines import environment, pins
from mtp_zoo_conformance.engines.environment import cache_root, find, install
from mtp_zoo_conformance.engines.pins import PINS

STUB = """#!{python}
# Makes an environment without installing anything: `-m venv` copies this script, `-m pip` makes empty packages.
import os, shutil, sys
from pathlib import Path
state = Path({state!r})
with (state / "calls").open("a") as calls:
    print(*sys.argv[1:], file=calls)
words = sys.argv[1:]
if words[:2] == ["-m", "venv"]:
    folder = Path(words[2])
    (folder / "bin").mkdir(parents=True)
    shutil.copy(__file__, folder / "bin" / "python")
elif words[:2] == ["-m", "pip"]:
    packages = Path(__file__).parents[1] / "lib/python3/site-packages"
    for name in [words[5]] if "==" in words[5] else Path(words[6]).read_text().split():
        print("Collecting", name, flush=True)
        (packages / (name + ".dist-info")).mkdir(parents=True, exist_ok=True)
    failure = state / "failure"
    if failure.exists():
        print("ERROR: half of a line that says more", failure.read_text(), flush=True)
        sys.exit(1)
elif words[0] == "-c":
    print("2.13.0+cpu")
"""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for what the stub did and shall do; a list of two packages; an empty cache."""
    folder = tmp_path / "state"
    folder.mkdir()
    stub = folder / "python"
    stub.write_text(STUB.format(python=sys.executable, state=str(folder)), encoding="utf-8")
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("MTP_ZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(environment, "_interpreter", lambda _: (str(stub), "3.11"))
    monkeypatch.setattr(environment, "_by_preference", lambda _: ["3.11"])
    monkeypatch.setattr(environment, "POLL_SECONDS", 0.02)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "requirements.txt").write_text("torch==2.13.0\na==1\n", encoding="utf-8")
    monkeypatch.setattr(pins, "HERE", tmp_path)
    return folder


def calls(state: Path) -> list[str]:
    return (state / "calls").read_text().splitlines()


def environments() -> list[Path]:
    return [path for path in (cache_root() / "engines").iterdir() if path.is_dir()]


def test_an_environment_is_made_once(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert find("vllm") is None
    made = install("vllm")
    assert made.managed
    assert made.python.is_file()
    assert [line.partition(" /")[0] for line in calls(state)] == [
        "-m venv",
        "-m pip install --no-deps --no-compile torch==2.13.0+cpu",
        "-m pip install --no-deps --no-compile -r",
        "-c import torch; print(torch.__version__)",
    ]
    said = capsys.readouterr()
    assert said.out == ""
    assert "2 packages, 0.5 GB to download where pip has not cached them, 2.0 GB on disk" in said.err
    (folder,) = environments()
    marker = json.loads((folder / "complete.json").read_text())
    assert (marker["torch"], marker["version"], marker["packages"]) == (
        "2.13.0+cpu",
        "0.32.0",
        ["torch==2.13.0", "a==1"],
    )

    assert install("vllm") == made == find("vllm")
    assert len(calls(state)) == 4


def test_another_list_is_another_environment_and_a_comment_is_not(state: Path, tmp_path: Path) -> None:
    made = install("vllm")
    path = tmp_path / "vllm" / "requirements.txt"
    path.write_text("# for a CPU\ntorch==2.13.0\n\na==1\n", encoding="utf-8")
    assert find("vllm") == made
    path.write_text("torch==2.13.0\na==2\n", encoding="utf-8")
    assert find("vllm") is None


def test_torch_comes_from_its_own_index_where_pip_finds_no_cpu_build(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = environment._Setup.pip

    def pip(self: environment._Setup, words: list[str], advance: object) -> None:
        if "--index-url" in words:
            (state / "failure").unlink()
        original(self, words, lambda: None)

    (state / "failure").write_text("No matching distribution found")

    monkeypatch.setattr(environment._Setup, "pip", pip)
    install("vllm")
    index = "--index-url https://download.pytorch.org/whl/cpu"
    assert [index in line for line in calls(state)] == [False, False, True, False, False]


@pytest.mark.parametrize(
    ("output", "cause", "remedy"),
    [
        ("Retrying after connection broken by NewConnectionError", "a package index can't be reached", "PIP_INDEX_URL"),
        ("OSError: [Errno 28] No space left on device", "the disk is full", "MTP_ZOO_CACHE"),
        ("No matching distribution found for a==1", "no build for this machine or Python", "Python 3.11"),
        ("Segmentation fault", "the command failed", "Read the log, or use an environment that has the engine"),
    ],
)
def test_a_failed_installation_leaves_the_log_only(state: Path, output: str, cause: str, remedy: str) -> None:
    (state / "failure").write_text(output)
    with pytest.raises(EnvironmentSetupError) as caught:
        install("vllm")
    assert cause in caught.value.message
    assert remedy in caught.value.remedy
    log = Path(caught.value.message.rpartition("Log: ")[2])
    assert output in log.read_text()
    assert find("vllm") is None
    assert environments() == []


def test_what_was_half_made_is_made_anew(state: Path) -> None:
    made = install("vllm")
    (made.python.parents[1] / "complete.json").unlink()
    (made.python.parents[1] / "half").touch()
    assert find("vllm") is None
    assert install("vllm") == made
    assert not (made.python.parents[1] / "half").exists()


def test_an_interrupted_installation_leaves_nothing(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(environment._Setup, "pip", interrupted)
    with pytest.raises(KeyboardInterrupt):
        install("vllm")
    assert environments() == []


def test_the_second_of_two_waits(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = PINS["vllm"].folder(cache_root(), "3.11")
    folder.parent.mkdir(parents=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=install, args=("vllm",))
        second.start()
        time.sleep(0.3)
        assert not (state / "calls").exists()
        (folder / "bin").mkdir(parents=True)
        (folder / "complete.json").write_text("{}")
    second.join(10)
    assert not second.is_alive()
    assert not (state / "calls").exists()
    assert "waiting for it" in capsys.readouterr().err


def test_too_little_space_is_told_before_anything_is_made(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=10**9)
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(EnvironmentSetupError, match=r"needs 2.5 GB of disk space, 1.0 GB are free"):
        install("vllm")
    assert not (state / "calls").exists()


def test_a_cache_that_can_not_be_written_to(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MTP_ZOO_CACHE", str(tmp_path / "file"))
    with pytest.raises(EnvironmentSetupError, match="Not a directory"):
        install("vllm")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MTP_ZOO_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "mtp_zoo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "mtp_zoo"


def test_a_python_without_builds_looks_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.sys, "version_info", SimpleNamespace(major=3, minor=9))
    monkeypatch.setattr(environment.shutil, "which", lambda name: f"/usr/bin/{name}" if name == "python3.12" else None)
    assert environment._interpreter(PINS["sglang"]) == ("/usr/bin/python3.12", "3.12")
    monkeypatch.setattr(environment.shutil, "which", lambda _: None)
    with pytest.raises(EnvironmentSetupError, match=r"needs python3.11 or python3.12 or python3.13") as caught:
        environment._interpreter(PINS["sglang"])
    assert "--engine-python sglang=PATH" in caught.value.remedy


@pytest.mark.parametrize("engine", list(PINS))
def test_every_list_pins_every_package(engine: str) -> None:
    found = PINS[engine].packages
    assert all("==" in package for package in found)
    assert PINS[engine].torch.endswith("+cpu")
    assert any(PINS[engine].version == package.partition("==")[2] for package in found)
