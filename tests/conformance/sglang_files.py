"""Imports the files of SGLang's worker that need no SGLang, by path and under names of their own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import mtp_zoo_conformance
from mtp_zoo_conformance.engines import job_server

FOLDER = Path(mtp_zoo_conformance.__file__).parent / "engines" / "sglang"
SHIM = "sglang_shim"


def shim(name: str) -> ModuleType:
    """A module of the stand-ins."""
    if SHIM not in sys.modules:
        _load(SHIM, FOLDER / "shim" / "__init__.py", [str(FOLDER / "shim")])
    return importlib.import_module(f"{SHIM}.{name}")


def worker_file(name: str) -> ModuleType:
    """A file of the worker that imports none of the others but the job server."""
    # Not by their folder on sys.path: it has folders that are called vllm and sglang, and libraries look for those.
    sys.modules.setdefault("job_server", job_server)
    return sys.modules.get(f"sglang_{name}") or _load(f"sglang_{name}", FOLDER / f"{name}.py", None)


def _load(name: str, path: Path, inside: list[str] | None) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=inside)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
