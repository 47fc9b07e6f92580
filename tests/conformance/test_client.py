"""Our side of a worker: jobs go out, records come back, and a worker that fails says so in each of them."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from mtp_zoo_conformance.engines import client
from mtp_zoo_conformance.engines.client import EnginePython, last_line, run_jobs, worker_environment

HERE = EnginePython("vllm", Path(sys.executable), managed=False)
ENGINES = Path(client.__file__).parent


def worker(folder: Path, code: str) -> Path:
    """A worker script; `job_server` can be imported, `jobs` are those of the manifest, `finish(job, **more)` records one."""
    script = folder / "worker.py"
    head = f"""
    import json, os, sys, time
    from pathlib import Path
    sys.path.insert(0, {str(ENGINES)!r})
    jobs = json.loads(Path(sys.argv[1]).read_text())["jobs"]
    def finish(job, **more):
        record = {{"id": job["id"], "status": "ok", **more}}
        Path(job["folder"], "record.json").write_text(json.dumps(record))
        print(json.dumps({{"done": job["id"]}}), flush=True)
    """
    script.write_text(textwrap.dedent(head) + textwrap.dedent(code), encoding="utf-8")
    return script


def jobs(folder: Path, *names: str, limit: float = 5.0) -> list[dict[str, Any]]:
    made = [{"id": name, "kind": "module", "folder": str(folder / name), "limit": limit} for name in names]
    for job in made:
        Path(job["folder"]).mkdir(parents=True)
    return made


def test_every_job_has_its_record_and_advances_once(tmp_path: Path) -> None:
    script = worker(tmp_path, "print('loading the engine')\nfor job in jobs: finish(job, value=job['id'] * 2)")
    calls: list[None] = []
    found = run_jobs(HERE, jobs(tmp_path, "a", "b"), tmp_path, worker=script, advance=lambda: calls.append(None))
    assert {name: record["value"] for name, record in found.items()} == {"a": "aa", "b": "bb"}
    assert len(calls) == 2
    assert "loading the engine" in (tmp_path / "worker.log").read_text()


def test_a_worker_that_dies_leaves_a_record_for_each_job_it_did_not_finish(tmp_path: Path) -> None:
    script = worker(tmp_path, "finish(jobs[0])\nprint('no such kernel\\n', file=sys.stderr, flush=True)\nos._exit(7)")
    found = run_jobs(HERE, jobs(tmp_path, "a", "b", "c"), tmp_path, worker=script)
    assert [found[name]["status"] for name in "abc"] == ["ok", "died", "died"]
    assert found["b"]["error"] == "the worker ended with exit code 7; its last line: no such kernel"
    assert found["b"]["log"] == str(tmp_path / "worker.log")


def test_a_worker_ended_by_a_signal_says_which(tmp_path: Path) -> None:
    script = worker(tmp_path, "os.kill(os.getpid(), 11)")
    assert (
        "the worker ended with signal 11" in run_jobs(HERE, jobs(tmp_path, "a"), tmp_path, worker=script)["a"]["error"]
    )


def test_a_python_without_the_engine_is_told_by_its_last_line(tmp_path: Path) -> None:
    script = worker(tmp_path, "import an_engine_that_is_not_there")
    found = run_jobs(HERE, jobs(tmp_path, "a"), tmp_path, worker=script)["a"]
    assert found["status"] == "died"
    assert found["error"].endswith("ModuleNotFoundError: No module named 'an_engine_that_is_not_there'")


def test_a_python_that_is_not_there_is_told(tmp_path: Path) -> None:
    python = EnginePython("sglang", tmp_path / "python", managed=False)
    found = run_jobs(python, jobs(tmp_path, "a"), tmp_path)["a"]
    assert (found["status"], found["engine"]) == ("died", "sglang")
    assert found["error"] == f"{tmp_path / 'python'} can't be started: No such file or directory"


def test_a_record_of_an_earlier_run_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    made = jobs(tmp_path, "a")
    (tmp_path / "a" / "record.json").write_text('{"id": "a", "status": "ok"}')
    assert run_jobs(HERE, made, tmp_path, worker=worker(tmp_path, "sys.exit(1)"))["a"]["status"] == "died"


def test_a_worker_that_hangs_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "START_SECONDS", 1.0)
    monkeypatch.setattr(client, "GRACE_SECONDS", 0.2)
    code = """
    import signal, subprocess
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(jobs[0]["folder"], "child").write_text(str(child.pid))
    time.sleep(60)
    """
    made = jobs(tmp_path, "a", limit=0.5)
    began = time.monotonic()
    found = run_jobs(HERE, made, tmp_path, worker=worker(tmp_path, code))["a"]
    assert time.monotonic() - began < 20
    assert found["error"] == "the worker ran past its limit of 2 s and was ended"
    assert ended(int((tmp_path / "a" / "child").read_text()))


def test_a_job_ends_with_its_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_limit", lambda _: 2.0)
    code = """
    import job_server
    def run(job):
        Path(job["folder"], "child").write_text(str(os.getpid()))
        time.sleep(60)
    job_server.serve({"module": run}, lambda: {"engine": "vllm", "version": "0"}, fork=True)
    """
    found = run_jobs(HERE, jobs(tmp_path, "a", limit=60.0), tmp_path, worker=worker(tmp_path, code))["a"]
    assert found["status"] == "died"
    assert ended(int((tmp_path / "a" / "child").read_text()))


def ended(pid: int) -> bool:
    """Whether a process is gone, or dead and not yet collected by whoever took it over."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.05)
    return False


def test_the_loop_of_a_real_worker_loses_no_job_to_another(tmp_path: Path) -> None:
    code = """
    import job_server
    def run(job):
        if job["id"] == "dies": os.kill(os.getpid(), 9)
        if job["id"] == "fails": raise ValueError("no such layer")
        if job["id"] == "hangs": time.sleep(60)
        return {"value": 1}
    job_server.serve({"module": run}, lambda: {"engine": "vllm", "version": "0"}, fork=True)
    """
    calls: list[None] = []
    made = jobs(tmp_path, "dies", "fails", "hangs", "works", limit=1.0)
    found = run_jobs(HERE, made, tmp_path, worker=worker(tmp_path, code), advance=lambda: calls.append(None))
    assert {name: record["status"] for name, record in found.items()} == {
        "dies": "died",
        "fails": "error",
        "hangs": "timeout",
        "works": "ok",
    }
    assert found["fails"]["error"] == "ValueError: no such layer"
    assert len(calls) == 4


def test_a_worker_sees_neither_our_packages_nor_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        monkeypatch.setenv(name, "ours")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = worker_environment()
    assert found["HF_HUB_OFFLINE"] == "1"
    assert found["OMP_NUM_THREADS"] == "1"
    assert found["PATH"] == os.environ["PATH"]
    assert "ours" not in found.values()
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert worker_environment()["OMP_NUM_THREADS"] == "8"


def test_the_last_line_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_line(log) == ""
    log.write_bytes(b"first\n\xff second \n\n  \n")
    assert last_line(log) == "� second"
