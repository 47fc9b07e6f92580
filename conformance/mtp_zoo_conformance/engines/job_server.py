"""The loop of an engine's worker: many jobs, one import of the engine, each job in a process of its own.

Run by the engine's interpreter, so it knows the standard library only. A worker imports its engine once and calls `serve`.
On a CPU every job is a fork of that process. Where an accelerator is present a forked child could not use it, so a job is
a fresh interpreter that imports the engine again. Either way a job that dies or hangs takes nothing else with it.

Files of a job, in its folder: `record.json` (always written, by the parent if the child could not), `log.txt` (everything
that the child printed), and what the job itself makes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Job = dict[str, Any]
Runner = Callable[[Job], dict[str, Any]]

POLL_SECONDS = 0.05


def serve(runners: dict[str, Runner], facts: Callable[[], dict[str, Any]], *, fork: bool) -> None:
    """Run the jobs of the manifest named on the command line, or, with `--one`, the one job named there.

    Args:
        runners: kind of job -> what runs it and returns its part of the record.
        facts: engine, version, torch and device, for every record.
        fork: whether a forked child can use the engine.
    """
    if sys.argv[1] == "--one":
        _child(json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")), runners, facts)
        return
    manifest = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for job in manifest["jobs"]:
        folder = Path(job["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "record.json").unlink(missing_ok=True)
        began = time.monotonic()
        pid = _forked(job, runners, facts) if fork else _started(job)
        status = _wait(pid, limit=job["limit"])
        _settle(job, status, time.monotonic() - began, facts)
        print(json.dumps({"done": job["id"]}), flush=True)


def _forked(job: Job, runners: dict[str, Runner], facts: Callable[[], dict[str, Any]]) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    code = 1
    try:
        code = _child(job, runners, facts)
    finally:
        os._exit(code)  # no exit handlers: they belong to the parent


def _started(job: Job) -> int:
    request = Path(job["folder"]) / "job.json"
    request.write_text(json.dumps(job), encoding="utf-8")
    return subprocess.Popen([sys.executable, sys.argv[0], "--one", str(request)], start_new_session=True).pid


def _child(job: Job, runners: dict[str, Runner], facts: Callable[[], dict[str, Any]]) -> int:
    folder = Path(job["folder"])
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    began = time.monotonic()
    try:
        found = {"status": "ok", **runners[job["kind"]](job)}
    except BaseException as error:  # an engine may call sys.exit; whatever ends the job is its result
        traceback.print_exc()
        lines = str(error).strip().splitlines()
        found = {"status": "error", "error": f"{type(error).__name__}: {lines[0] if lines else ''}"}
    sys.stdout.flush()
    sys.stderr.flush()
    _write(job, {**facts(), **found, "seconds": time.monotonic() - began})
    return 0


def _wait(pid: int, *, limit: float) -> int | None:
    """Exit status of the child, or None where it ran past the limit and was ended with all that it started."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            _end_group(pid)
            return status
        time.sleep(POLL_SECONDS)
    _end_group(pid)
    os.waitpid(pid, 0)
    return None


def _end_group(pid: int) -> None:
    """End what a job left behind: engines start processes of their own. Its session was made for it alone."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _settle(job: Job, status: int | None, seconds: float, facts: Callable[[], dict[str, Any]]) -> None:
    """Write the record of a job that could not."""
    if status is None:
        error = f"ran past its limit of {job['limit']:.0f} s and was ended"
        _write(job, {**facts(), "status": "timeout", "error": error, "seconds": seconds})
    elif not (Path(job["folder"]) / "record.json").is_file():
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
        _write(job, {**facts(), "status": "died", "error": f"its process ended with {how}", "seconds": seconds})


def _write(job: Job, record: dict[str, Any]) -> None:
    path = Path(job["folder"]) / "record.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"id": job["id"], "log": str(path.parent / "log.txt"), **record}), encoding="utf-8")
    part.replace(path)
