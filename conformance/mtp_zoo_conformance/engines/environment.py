"""The engines' own environments: found where they were made, or made from the pinned lists.

An environment lies in `$MTP_ZOO_CACHE/engines` (`~/.cache/mtp_zoo/engines` where that is not set), in a folder named by its
engine, its version, and a hash of its list and the version of Python. It counts only with the marker that is written last.
The log of its making lies beside it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mtp_zoo.errors import EnvironmentSetupError
from mtp_zoo.progress import progress
from mtp_zoo.spec import Engine
from mtp_zoo_conformance.engines.client import NOT_HANDED_ON, EnginePython, last_line
from mtp_zoo_conformance.engines.pins import PINS, Pins

MARKER = "complete.json"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
POLL_SECONDS = 0.25

OWN_ENVIRONMENT = "use an environment that has the engine: --engine-python {engine}=PATH"
UNREACHABLE = ("connection broken", "Connection refused", "ConnectTimeout", "Could not fetch URL", "name resolution")


def cache_root() -> Path:
    """Where environments are kept."""
    own = os.environ.get("MTP_ZOO_CACHE")
    shared = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(own) if own else shared / "mtp_zoo").expanduser().absolute()


def find(engine: Engine) -> EnginePython | None:
    """The environment that `install` made, for the first supported version of Python that has one."""
    pins = PINS[engine]
    for version in _by_preference(pins):
        folder = pins.folder(cache_root(), version)
        if (folder / MARKER).is_file():
            return EnginePython(engine, _python(folder), managed=True)
    return None


def install(engine: Engine) -> EnginePython:
    """Make the environment of an engine, or return the one that is there.

    Says on stderr what it downloads before it starts. Two processes never make the same one: the second waits.

    Raises:
        EnvironmentSetupError: no supported Python, too little disk space, no network, or a package that does not install.
            Nothing is left but the log.
    """
    found = find(engine)
    if found is not None:
        return found
    pins = PINS[engine]
    base, version = _interpreter(pins)
    folder = pins.folder(cache_root(), version)
    with _lock(folder):
        if not (folder / MARKER).is_file():
            _check_space(pins, folder)
            _make(pins, base, folder)
    return EnginePython(engine, _python(folder), managed=True)


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _by_preference(pins: Pins) -> list[str]:
    """Supported versions of Python, the one that runs this first."""
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    return sorted(pins.pythons, key=lambda version: version != ours)


def _interpreter(pins: Pins) -> tuple[str, str]:
    """A Python for which every pinned release has a build, and its version: the one that runs this, or one on PATH."""
    for version in _by_preference(pins):
        ours = version == f"{sys.version_info.major}.{sys.version_info.minor}"
        path = sys.executable if ours else shutil.which(f"python{version}")
        if path:
            return path, version
    names = " or ".join(f"python{version}" for version in pins.pythons)
    raise EnvironmentSetupError(
        f"Making the environment of {pins.title}: it needs {names}; this is Python {sys.version.split()[0]}, "
        "and none of them is on PATH.",
        remedy=f"Put one on PATH, or {OWN_ENVIRONMENT.format(engine=pins.engine)}.",
    )


def _check_space(pins: Pins, folder: Path) -> None:
    needed = pins.download + pins.installed
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        raise EnvironmentSetupError(
            f"Making the environment of {pins.title} in {folder.parent}: it needs {_size(needed)} of disk space, "
            f"{_size(free)} are free.",
            remedy="Free some, or set MTP_ZOO_CACHE to a directory on another disk.",
        )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _lock(folder: Path) -> Generator[None]:
    """Only one process at a time makes a folder."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        stream = folder.with_name(f"{folder.name}.lock").open("w")
    except OSError as error:
        raise EnvironmentSetupError(
            f"Making {folder}: {error.strerror}.", remedy="Set MTP_ZOO_CACHE to a directory that can be written to."
        ) from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"Another process is making {folder}; waiting for it.")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _make(pins: Pins, base: str, folder: Path) -> None:
    """Make an environment from nothing; its marker comes last, and without it nothing stays but the log."""
    began = time.monotonic()
    packages = pins.packages
    setup = _Setup(pins, folder)
    _say(
        f"Installing {pins.title} into {folder}: {len(packages)} packages, {_size(pins.download)} to download where pip "
        f"has not cached them, {_size(pins.installed)} on disk; two to three minutes without the download. Log: {setup.log}"
    )
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with progress(f"Installing {pins.title}", total=2 * len(packages)) as advance:
            setup.run("making a virtual environment", [base, "-m", "venv", str(folder)], advance)
            setup.install_torch(advance)
            setup.pip(["-r", str(pins.path)], advance)
            torch = setup.output("importing torch", "import torch; print(torch.__version__)")
        seconds = time.monotonic() - began
        facts = {
            "engine": pins.engine,
            "version": pins.version,
            "torch": torch,
            "packages": packages,
            "seconds": seconds,
        }
        (folder / MARKER).write_text(json.dumps(facts), encoding="utf-8")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    _say(f"{pins.title} is ready after {seconds:.0f} s.")


class _Setup:
    """The commands that make one environment, with one log and one count of what is done."""

    def __init__(self, pins: Pins, folder: Path) -> None:
        self.pins, self.folder = pins, folder
        self.log = folder.with_name(f"{folder.name}.log")
        self.log.write_bytes(b"")
        self._shown = 0
        self._at_start: int | None = None

    def install_torch(self, advance: Callable[[], None]) -> None:
        """The CPU build, from where pip looks by default if it is there, else from PyTorch's own index."""
        try:
            self.pip([self.pins.torch], advance)
        except EnvironmentSetupError:
            self.pip([self.pins.torch, "--index-url", TORCH_INDEX], advance)

    def pip(self, words: list[str], advance: Callable[[], None]) -> None:
        """Install exactly what is named."""
        command = [str(_python(self.folder)), "-m", "pip", "install", "--no-deps", "--no-compile", *words]
        self.run("installing packages", command, advance)

    def output(self, act: str, code: str) -> str:
        """Last line that a piece of code prints in the new environment."""
        self.run(act, [str(_python(self.folder)), "-c", code], lambda: None)
        return last_line(self.log)

    def run(self, act: str, words: list[str], advance: Callable[[], None]) -> None:
        """Run a command to its end, its output in the log.

        Raises:
            EnvironmentSetupError: it failed.
        """
        start = self.log.stat().st_size
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=_environment()
            )
            try:
                while process.poll() is None:
                    time.sleep(POLL_SECONDS)
                    self._show(advance)
            finally:
                process.kill()
                process.wait()
        self._show(advance)
        if process.returncode:
            raise self._failed(act, self.log.read_bytes()[start:].decode(errors="replace"))

    def _show(self, advance: Callable[[], None]) -> None:
        """Advance by the packages that were collected and those that were installed since the last time."""
        installed = len(list(self.folder.glob("lib/python*/site-packages/*.dist-info")))
        if self._at_start is None and installed:
            self._at_start = installed  # pip itself
        collected = self.log.read_bytes().count(b"\nCollecting ")
        done = collected + max(0, installed - (self._at_start or 0))
        for _ in range(self._shown, min(done, 2 * len(self.pins.packages))):
            advance()
            self._shown += 1

    def _failed(self, act: str, output: str) -> EnvironmentSetupError:
        own = OWN_ENVIRONMENT.format(engine=self.pins.engine)
        if "No space left on device" in output:
            cause, remedy = "the disk is full", "Free some space, or set MTP_ZOO_CACHE to a directory on another disk."
        elif any(sign in output for sign in UNREACHABLE):
            cause = "a package index can't be reached"
            remedy = f"Connect to the network, point pip at a mirror (PIP_INDEX_URL), or {own}."
        elif "No matching distribution found" in output:
            cause = "a pinned release has no build for this machine or Python"
            remedy = f"Use x86-64 Linux with Python {self.pins.pythons[0]}, or {own}."
        else:
            cause, remedy = "the command failed", f"Read the log, or {own}."
        return EnvironmentSetupError(
            f"Making the environment of {self.pins.title}, {act}: {cause} ({last_line(self.log)}). Log: {self.log}",
            remedy=remedy,
        )


def _environment() -> Mapping[str, str]:
    """Ours, without what would make pip install elsewhere or ask questions."""
    elsewhere = (*NOT_HANDED_ON, "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_ROOT")
    ours = {name: value for name, value in os.environ.items() if name not in elsewhere}
    return {**ours, "PIP_NO_INPUT": "1", "PIP_PROGRESS_BAR": "off", "PYTHONUNBUFFERED": "1"}
