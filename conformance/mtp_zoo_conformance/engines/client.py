"""Our side of an engine's worker: hand it the jobs, wait for them, read what it found.

The worker runs in the engine's own interpreter and shares nothing with this process but files and one line a finished job.
Whatever happens to it, every job has a record in the end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mtp_zoo.spec import Engine

HERE = Path(__file__).parent

START_SECONDS = 600.0
"""Time for a worker to import its engine on a busy machine with cold disks; ten to thirty seconds are usual."""

GRACE_SECONDS = 10.0
"""Time between asking a worker to end and ending it."""

POLL_SECONDS = 0.05

NOT_HANDED_ON = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV")
"""What of our environment would change which packages the engine's interpreter finds."""

Record = dict[str, Any]


@dataclass(frozen=True)
class EnginePython:
    """An interpreter that can import an engine.

    Attributes:
        engine: which one.
        python: path of the interpreter.
        managed: made by `environment.install`, from the pinned requirements; otherwise the user's own.
    """

    engine: Engine
    python: Path
    managed: bool


def _nothing() -> None:
    pass


def run_jobs(
    engine: EnginePython,
    jobs: Sequence[Mapping[str, Any]],
    folder: Path,
    *,
    advance: Callable[[], None] = _nothing,
    worker: Path | None = None,
) -> dict[str, Record]:
    """Run jobs in one worker.

    Args:
        engine: interpreter of the engine.
        jobs: what to do; paths in them are absolute. See `job_server` and the engine's `worker.py`.
        folder: for `jobs.json` and `worker.log`; made if need be.
        advance: called once a job, as they end.
        worker: script to run; the engine's own where left out.

    Returns:
        Job id -> its record. A worker that can't start, that dies, or that runs past the sum of its jobs' limits leaves a
        record with the status `died` for each job that it did not finish.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "worker.log"
    manifest = folder / "jobs.json"
    for job in jobs:
        (Path(job["folder"]) / "record.json").unlink(missing_ok=True)  # of an earlier run in the same place
    manifest.write_text(json.dumps({"jobs": [dict(job) for job in jobs]}), encoding="utf-8")
    script = worker or HERE / engine.engine / "worker.py"
    end = _work(engine, [str(script), str(manifest)], log, limit=_limit(jobs), advance=advance)
    return {job["id"]: _read(job) or _died(engine, job, log, end) for job in jobs}


def _limit(jobs: Iterable[Mapping[str, Any]]) -> float:
    """Seconds for a whole worker: each job may take its limit, and may import the engine anew."""
    return START_SECONDS + sum(job["limit"] + GRACE_SECONDS for job in jobs)


def _work(engine: EnginePython, words: list[str], log: Path, *, limit: float, advance: Callable[[], None]) -> str:
    """Run the worker to its end; how it ended, in words."""
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                [str(engine.python), *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=log.parent,
                env=worker_environment(),
                start_new_session=True,
            )
        except OSError as error:
            return f"{engine.python} can't be started: {error.strerror}"
        overdue = _Overdue(process, limit)
        try:
            assert process.stdout is not None
            _follow(process.stdout, output, advance)
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        finally:
            overdue.cancel()
            overdue.join()
            _end(process)
    if overdue.struck:
        return f"the worker ran past its limit of {limit:.0f} s and was ended"
    code = process.returncode
    return f"the worker ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"


class _Overdue(threading.Timer):
    """Ends a process when its time is over."""

    def __init__(self, process: subprocess.Popen[bytes], limit: float) -> None:
        super().__init__(limit, self._strike)
        self.process, self.struck, self.daemon = process, False, True
        self.start()

    def _strike(self) -> None:
        self.struck = True
        _signal(self.process.pid)


def worker_environment() -> dict[str, str]:
    """Environment of a worker: ours without our packages, offline, and with one thread unless the user set another number."""
    ours = {name: value for name, value in os.environ.items() if name not in NOT_HANDED_ON}
    return {"OMP_NUM_THREADS": "1", **ours, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def _follow(lines: IO[bytes], log: IO[bytes], advance: Callable[[], None]) -> None:
    """Count finished jobs; keep all else that the engine prints in the log."""
    with lines:
        for line in lines:
            if line.startswith(b'{"done"'):
                advance()
            else:
                log.write(line)
                log.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a worker and what is left of its process group, then take its exit status."""
    _signal(process.pid)
    process.wait()


def _signal(pid: int) -> None:
    """Ask a process that nobody has waited for to end its jobs and itself; then end the group that was made for it.

    While its exit status is not taken, no other process can have its number.
    """
    ask_until = time.monotonic() + GRACE_SECONDS
    os.kill(pid, signal.SIGTERM)
    while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) and time.monotonic() < ask_until:
        time.sleep(POLL_SECONDS)
    os.killpg(pid, signal.SIGKILL)


def _read(job: Mapping[str, Any]) -> Record | None:
    try:
        return json.loads((Path(job["folder"]) / "record.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _died(engine: EnginePython, job: Mapping[str, Any], log: Path, end: str) -> Record:
    last = last_line(log)
    return {
        "id": job["id"],
        "status": "died",
        "error": f"{end}; its last line: {last}" if last else end,
        "log": str(log),
        "seconds": 0.0,
        "engine": engine.engine,
        "version": "",
    }


def last_line(path: Path) -> str:
    """The last line of a log that says something; empty where there is none."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
