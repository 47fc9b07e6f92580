"""Writes down which stand-ins a job really used, in every process that it runs in.

The file is named by the environment variable `LOG`, which processes that SGLang spawns inherit. Each process appends a
line the first time that it uses a stand-in.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

LOG = "MTP_ZOO_SHIM_LOG"

P = ParamSpec("P")
T = TypeVar("T")
_written: set[tuple[str, str]] = set()


def note(what: str) -> None:
    """Write down that `what` was used, once for a process and a file."""
    path = os.environ.get(LOG)
    if path is None or (path, what) in _written:
        return
    _written.add((path, what))
    with open(path, "a", encoding="utf-8") as file:
        file.write(what + "\n")  # one short write: lines of several processes do not mix


def stand_in(body: Callable[P, T]) -> Callable[P, T]:
    """Decorator: a call is noted under the function's name and the first line of its docstring."""
    what = f"{body.__name__}: {(inspect.getdoc(body) or '').splitlines()[0].rstrip('.')}"

    @functools.wraps(body)
    def noted(*args: P.args, **kwargs: P.kwargs) -> T:
        note(what)
        return body(*args, **kwargs)

    return noted


def used(path: str | os.PathLike[str]) -> list[str]:
    """The stand-ins noted in a file, sorted, each once."""
    file = Path(path)
    return sorted(set(file.read_text(encoding="utf-8").splitlines())) if file.is_file() else []


def bodies(namespace: dict[str, Any], suffix: str = "_cpu") -> dict[str, Callable[..., Any]]:
    """The functions of a module that carry SGLang's suffix for CPU kernels."""
    return {name: value for name, value in namespace.items() if name.endswith(suffix) and callable(value)}
