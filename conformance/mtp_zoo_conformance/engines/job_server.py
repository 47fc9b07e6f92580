"""The loop of an engine's worker: many jobs, one import of the engine, each job in a process of its own.

Run by the engine's interpreter, so it knows the standard library only. A worker imports its engine once and calls `serve`.
On a CPU every job is a fork of that process. Where an accelerator is present a forked child could not use it, so a job is
a fresh interpreter that imports the engine again. Either way a job that dies or hangs takes nothing else with it.

Files of a job, in its folder: `record.json` (always written, by the parent if the child could not), `log.txt` (everything
that the child printed), and what the job itself makes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Job = dict[str, Any]
Runner = Callable[[Job], dict[str, Any]]
Facts = Callable[[], dict[str, Any]]

POLL_SECONDS = 0.05
ERROR_LINES = 3


class CountingError(RuntimeError):
    """What an engine gave and what it counted can't be brought together: a fault of the watching, not of the checkpoint."""


def serve(runners: dict[str, Runner], facts: Facts, *, fork: bool) -> None:
    """Run the jobs of the manifest named on the command line, or, with `--one`, the one job named there.

    Prints `{"done": id}` a job. A worker that is asked to end (SIGTERM, Ctrl-C) ends its job first.

    Args:
        runners: kind of job -> what runs it and returns its part of the record.
        facts: engine, version, torch and device, for every record.
        fork: whether a forked child can use the engine.
    """
    if sys.argv[1] == "--one":
        _run(json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")), runners, facts)
        return
    manifest = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    for job in manifest["jobs"]:
        folder = Path(job["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "record.json").unlink(missing_ok=True)
        began = time.monotonic()
        pid = _start(job, runners, facts, fork=fork)
        try:
            in_time = _wait(pid, limit=job["limit"])
        finally:
            status = _end(pid)
        _settle(job, status if in_time else None, time.monotonic() - began, facts)
        print(json.dumps({"done": job["id"]}), flush=True)


def _start(job: Job, runners: dict[str, Runner], facts: Facts, *, fork: bool) -> int:
    """Start the job in a session of its own, its output in its log; returns the process's id."""
    request = Path(job["folder"]) / "job.json"
    request.write_text(json.dumps(job), encoding="utf-8")
    if pid := os.fork():
        return pid
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _redirect(Path(job["folder"]) / "log.txt")
        if not fork:
            os.execv(sys.executable, [sys.executable, sys.argv[0], "--one", str(request)])
        faulthandler.enable()
        _run(job, runners, facts)
        os._exit(0)  # no exit handlers: they belong to the parent
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def _redirect(log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)


def _run(job: Job, runners: dict[str, Runner], facts: Facts) -> None:
    """Run the job and write its record; whatever ends it is its result, also an engine's `sys.exit`."""
    began = time.monotonic()
    try:
        found = {"status": "ok", **runners[job["kind"]](job)}
        _write(job, {**facts(), **found, "seconds": time.monotonic() - began})
    except BaseException as error:
        traceback.print_exc()
        _write(job, {**facts(), "status": "error", "error": _summary(error), "seconds": time.monotonic() - began})
    sys.stdout.flush()
    sys.stderr.flush()


def _summary(error: BaseException) -> str:
    """The error's class and first lines: some errors say what happened in the second."""
    lines = [line.strip() for line in str(error).strip().splitlines()[:ERROR_LINES]]
    return f"{type(error).__name__}: {' '.join(lines)}"


def _wait(pid: int, *, limit: float) -> bool:
    """Whether the child ended within the limit. It is not reaped yet, so its number is still its own."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return True
        time.sleep(POLL_SECONDS)
    return False


def _end(pid: int) -> int:
    """End the job, if it runs, and what it left behind: engines start processes of their own, in the job's session.

    The process is ended by its own number too: it may not have come to make its session yet. Returns its exit status.
    """
    for end in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            end(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _settle(job: Job, status: int | None, seconds: float, facts: Facts) -> None:
    """Write the record of a job that could not."""
    if (Path(job["folder"]) / "record.json").is_file():
        return
    if status is None:
        found = {"status": "timeout", "error": f"ran past its limit of {job['limit']:g} s and was ended"}
    elif os.WIFSIGNALED(status):
        found = {"status": "died", "error": f"its process ended with {signal.Signals(os.WTERMSIG(status)).name}"}
    else:
        found = {"status": "died", "error": f"its process ended with exit code {os.WEXITSTATUS(status)}"}
    _write(job, {**facts(), **found, "seconds": seconds})


def _write(job: Job, record: dict[str, Any]) -> None:
    """Write the record whole or not at all."""
    path = Path(job["folder"]) / "record.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"id": job["id"], "log": str(path.parent / "log.txt"), **record}), encoding="utf-8")
    part.replace(path)


def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
