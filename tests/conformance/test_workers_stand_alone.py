"""What runs inside an engine's interpreter finds neither our packages nor the other engine there."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mtp_zoo
import mtp_zoo_conformance

PACKAGE = Path(mtp_zoo_conformance.__file__).parent
WORKERS = {name: PACKAGE / "engines" / name for name in ("vllm", "sglang")}
OURS = {"mtp_zoo", "mtp_zoo_conformance"}


def sources(folder: Path) -> list[Path]:
    """Python files under the folder."""
    return sorted(folder.rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Top-level names of the packages that the file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("engine", WORKERS)
def test_a_worker_imports_none_of_ours_and_not_the_other_engine(engine: str) -> None:
    assert sources(WORKERS[engine])
    foreign = OURS | (WORKERS.keys() - {engine})
    found = {path.name: foreign & set(imported(path)) for path in sources(WORKERS[engine])}
    assert {name: names for name, names in found.items() if names} == {}


def test_the_job_server_knows_the_standard_library_only() -> None:
    assert set(imported(PACKAGE / "engines" / "job_server.py")) <= sys.stdlib_module_names


def test_engines_are_imported_by_their_workers_only() -> None:
    inside = {path for folder in WORKERS.values() for path in sources(folder)}
    outside = {*sources(PACKAGE), *sources(Path(mtp_zoo.__file__).parent)} - inside
    assert {path.name for path in outside if WORKERS.keys() & set(imported(path))} == set()


@pytest.mark.parametrize("engine", WORKERS)
def test_a_workers_folder_is_no_package(engine: str) -> None:
    """Its folder is the worker's own place on sys.path; as a package it would be found under the engine's own name."""
    assert not (WORKERS[engine] / "__init__.py").exists()
