"""The figures of docs/parallel.md: the script runs, and its table is the one that is printed there."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.children import run_forked, run_script
from tests.pages import DOCS, ROOT

HEADERS = ("ranks", "head", "batch")
SCRIPT = ROOT / "scripts/parallel_equality.py"


def measured(folder: Path, *options: str) -> list[list[str]]:
    """Names of the rows that the script measures."""
    done = run_forked(folder, run_script, str(SCRIPT), "--json", *options)
    assert done.status == 0, done.stdout + done.stderr  # 1 where a figure is above the limit
    return [[row[name] for name in HEADERS] for row in json.loads(done.stdout)]


@pytest.mark.slow
def test_the_script_measures_a_row_of_each_way_to_share(tmp_path: Path) -> None:
    rows = measured(tmp_path, "--first")
    assert [row[0] for row in rows] == ["DDP", "FSDP2", "context, zigzag", "context, contiguous"]
    assert all(row in shown() for row in rows)


def test_the_page_shows_every_row_of_the_script() -> None:
    script: dict[str, Any] = runpy.run_path(str(SCRIPT))
    assert shown() == [list(script["labels"](step)) for step in script["STEPS"]]


def shown() -> list[list[str]]:
    """Names of the rows on the page."""
    table = (DOCS / "parallel.md").read_text(encoding="utf-8").partition("## Figures")[2]
    lines = [line for line in table.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.split("|")[1:4]] for line in lines]
