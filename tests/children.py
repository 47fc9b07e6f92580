"""Child processes that start with what takes long to import: torch, transformers and what they load with a model.

Each of them is forked from one server, which is a new interpreter without anything of the test that asks: a child is as
fresh as one that is spawned, but for the modules below. Nothing of mtp_zoo is among them, so that its own imports run in
every child. The server is started once a worker of pytest, at the first use, and ends with it.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

METHOD = "forkserver"

PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",  # an optimiser imports it at its first step
    "transformers.modeling_utils",
    "transformers.trainer",
    "pytest",
]


def forked() -> ForkServerContext:
    """Like `multiprocessing.get_context("spawn")`, some ten seconds faster a process."""
    context = multiprocessing.get_context(METHOD)
    context.set_forkserver_preload(PRELOADED)
    return context


@dataclass(frozen=True)
class Done:
    """What an ended child left; a negative exit status is the signal that ended it."""

    status: int | None
    stdout: str
    stderr: str


def run_forked(folder: Path, function: Callable[..., Any], *args: Any, limit: float = 300) -> Done:
    """`function(*args)` in a child; its output is kept in two files of `folder`."""
    out, err = folder / "child.stdout", folder / "child.stderr"
    process = forked().Process(target=_redirected, args=(str(out), str(err), function, args))
    process.start()
    process.join(limit)
    if process.exitcode is None:
        process.kill()
        process.join()
    return Done(process.exitcode, *(path.read_text(encoding="utf-8") for path in (out, err)))


def _redirected(out: str, err: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    for path, stream in ((out, sys.stdout), (err, sys.stderr)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
    function(*args)


def run_script(path: str, *words: str) -> None:
    """What `python path words` does."""
    sys.argv = [path, *words]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")
