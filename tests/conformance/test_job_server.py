"""The worker's loop, with runners that behave as engines do at their worst. No engine: the standard library only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtp_zoo_conformance import engines

ENGINES = Path(engines.__file__).parent

WORKER = f"""
import os, signal, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {str(ENGINES)!r})
import job_server

print("imported by", os.getpid())

def ok(job): print("ran"); return {{"value": job["value"], "pid": os.getpid()}}
def raises(job): raise ValueError("one\\ntwo\\nthree\\nfour")
def leaves(job): sys.exit("no device")
def not_json(job): return {{"value": object()}}
def vanishes(job): os._exit(7)
def segfaults(job): os.kill(os.getpid(), signal.SIGSEGV)
def hangs(job): Path(job["folder"], "pid").write_text(str(os.getpid())); time.sleep(600)
def litters(job):
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    return {{"started": started.pid}}
def hangs_with_others(job): Path(job["folder"], "pid").write_text(str(litters(job)["started"])); time.sleep(600)
def finishes_late(job):
    import atexit
    atexit.register(time.sleep, 600)
    return {{}}

runners = {{name: value for name, value in globals().items() if getattr(value, "__module__", "") == "__main__"}}
job_server.serve(runners, lambda: {{"engine": "fake", "version": "1"}}, fork=sys.argv[1] == "--one" or {{fork}})
"""

Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture(params=[True, False], ids=["fork", "fresh interpreter"])
def worker(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A worker with the runners above, its jobs forked or in fresh interpreters."""
    path = tmp_path / "worker.py"
    path.write_text(WORKER.replace("{fork}", str(request.param)), encoding="utf-8")
    return path


@pytest.fixture
def run(worker: Path, tmp_path: Path) -> Run:
    """Runs jobs of the given kinds and returns their records; `fields` go into every job."""

    def run_kinds(*kinds: str, limit: float = 60, **fields: Any) -> list[dict[str, Any]]:
        manifest, jobs = write_manifest(tmp_path, kinds, limit=limit, **fields)
        output = subprocess.run(
            [sys.executable, str(worker), str(manifest)], capture_output=True, text=True, timeout=120
        )
        assert output.returncode == 0, output.stderr
        done = [json.loads(line)["done"] for line in output.stdout.splitlines() if line.startswith("{")]
        assert done == [job["id"] for job in jobs]
        return [json.loads((Path(job["folder"]) / "record.json").read_text(encoding="utf-8")) for job in jobs]

    return run_kinds


def write_manifest(
    folder: Path, kinds: tuple[str, ...], *, limit: float, **fields: Any
) -> tuple[Path, list[dict[str, Any]]]:
    jobs = [
        {"id": f"{number}-{kind}", "kind": kind, "folder": str(folder / str(number)), "limit": limit, **fields}
        for number, kind in enumerate(kinds)
    ]
    path = folder / "manifest.json"
    path.write_text(json.dumps({"jobs": jobs}), encoding="utf-8")
    return path, jobs


def is_running(pid: int) -> bool:
    """Whether the process runs; one that ended and was not waited for does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_a_job_that_runs_leaves_its_record_and_its_log(run: Run) -> None:
    first, second = run("ok", "ok", value=[1, 2])
    assert first["id"] == "0-ok"
    assert first["status"] == "ok"
    assert (first["engine"], first["version"], first["value"]) == ("fake", "1", [1, 2])
    assert first["seconds"] >= 0
    assert "ran" in Path(first["log"]).read_text(encoding="utf-8")
    assert first["pid"] != second["pid"]


@pytest.mark.parametrize(
    ("kind", "status", "error"),
    [
        ("raises", "error", "ValueError: one two three"),
        ("leaves", "error", "SystemExit: no device"),
        ("not_json", "error", "TypeError: Object of type object is not JSON serializable"),
        ("unheard_of", "error", "KeyError: 'unheard_of'"),
        ("vanishes", "died", "its process ended with exit code 7"),
        ("segfaults", "died", "its process ended with SIGSEGV"),
    ],
)
def test_a_job_that_fails_says_how_and_the_next_one_runs(run: Run, kind: str, status: str, error: str) -> None:
    failed, after = run(kind, "ok", value=1)
    assert (failed["status"], failed["error"]) == (status, error)
    assert (failed["engine"], failed["id"]) == ("fake", f"0-{kind}")
    assert after["status"] == "ok"


def test_the_log_has_the_traceback(run: Run) -> None:
    (failed,) = run("raises")
    assert "ValueError: one\ntwo" in Path(failed["log"]).read_text(encoding="utf-8")


def test_a_job_that_hangs_is_ended_at_its_limit(run: Run, tmp_path: Path) -> None:
    (hung,) = run("hangs", limit=1.5)
    assert (hung["status"], hung["error"]) == ("timeout", "ran past its limit of 1.5 s and was ended")
    assert not is_running(int((tmp_path / "0" / "pid").read_text()))


def test_a_limit_too_short_to_start_does_not_block(run: Run) -> None:
    hung, after = run("hangs", "hangs", limit=0)
    assert hung["status"] == after["status"] == "timeout"


def test_what_a_job_started_ends_with_it(run: Run, tmp_path: Path) -> None:
    (littered,) = run("litters")
    assert littered["status"] == "ok"
    assert wait_until(lambda: not is_running(littered["started"]))
    (hung,) = run("hangs_with_others", limit=1.5)
    assert hung["status"] == "timeout"
    assert wait_until(lambda: not is_running(int((tmp_path / "0" / "pid").read_text())))


def test_a_record_of_an_earlier_run_is_not_taken_for_this_one(run: Run, tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "record.json").write_text('{"status": "ok"}', encoding="utf-8")
    (tmp_path / "0" / "record.part").write_text("{", encoding="utf-8")
    (tmp_path / "0" / "log.txt").write_text("of yesterday", encoding="utf-8")
    (died,) = run("vanishes")
    assert died["status"] == "died"
    assert "yesterday" not in Path(died["log"]).read_text(encoding="utf-8")


def test_a_job_that_is_done_and_hangs_on_its_way_out_is_done(run: Run) -> None:
    (late,) = run("finishes_late", limit=3)
    assert late["status"] == "ok"


def test_a_worker_that_is_asked_to_end_ends_its_job(worker: Path, tmp_path: Path) -> None:
    manifest, _ = write_manifest(tmp_path, ("hangs", "ok"), limit=600)
    with subprocess.Popen([sys.executable, str(worker), str(manifest)], stdout=subprocess.PIPE) as process:
        started = tmp_path / "0" / "pid"
        assert wait_until(lambda: started.is_file() and bool(started.read_text()))
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
    assert not is_running(int(started.read_text()))
    assert not (tmp_path / "1").exists()


def test_a_fresh_interpreter_logs_from_its_import_on(worker: Path, run: Run) -> None:
    first, second = run("ok", "ok", value=1)
    logs = [Path(record["log"]).read_text(encoding="utf-8") for record in (first, second)]
    fresh = "or False" in worker.read_text(encoding="utf-8")
    assert all(("imported by" in log) == fresh for log in logs)
