"""What the engines' environments are made of: versions, the Pythons that have builds, sizes.

The lists themselves are `vllm/requirements.txt` and `sglang/requirements.txt`: every package with its version, resolved once,
installed with `pip install --no-deps`. Sizes were measured with Python 3.11 on x86-64 Linux.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mtp_zoo.spec import Engine

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Pins:
    """The pinned environment of an engine.

    Attributes:
        engine: which one.
        title: its name and version, for people.
        version: of the engine.
        pythons: versions of Python for which every pinned release has a build; the first is the one that conformance ran on.
        download: bytes of all wheels.
        installed: bytes of the environment.
    """

    engine: Engine
    title: str
    version: str
    pythons: tuple[str, ...]
    download: int
    installed: int

    @property
    def path(self) -> Path:
        """The list for pip."""
        return HERE / self.engine / "requirements.txt"

    @property
    def packages(self) -> tuple[str, ...]:
        """The pinned packages, `name==version`; comments say nothing to pip and change no key."""
        lines = (line.partition("#")[0].strip() for line in self.path.read_text(encoding="utf-8").splitlines())
        return tuple(line for line in lines if line)

    @property
    def torch(self) -> str:
        """The pin of torch's CPU build; PyPI itself has the CUDA build under the same version."""
        (pin,) = (package for package in self.packages if package.startswith("torch=="))
        return f"{pin}+cpu"

    def folder(self, root: Path, python: str) -> Path:
        """Where the environment for a version of Python lies; another list is another folder."""
        digest = hashlib.sha256("\n".join([python, *self.packages]).encode()).hexdigest()
        return root / "engines" / f"{self.engine}-{self.version}-py{python}-{digest[:12]}"


PINS: Mapping[Engine, Pins] = {
    "vllm": Pins(
        engine="vllm",
        title="vLLM 0.32.0 (CPU)",
        version="0.32.0",
        pythons=("3.11", "3.12", "3.13", "3.14"),
        download=485_000_000,
        installed=2_000_000_000,
    ),
    "sglang": Pins(
        engine="sglang",
        title="SGLang 0.5.23 (CPU)",
        version="0.5.23",
        pythons=("3.11", "3.12", "3.13"),
        download=664_000_000,
        installed=2_800_000_000,
    ),
}
