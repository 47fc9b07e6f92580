"""The figures of docs/parallel.md: the script runs, and its table is the one that is printed there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.pages import DOCS, ROOT

HEADERS = ("ranks", "head", "batch")


@pytest.mark.slow
def test_the_page_shows_the_rows_that_the_script_measures() -> None:
    command = [sys.executable, str(ROOT / "scripts/parallel_equality.py"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr  # 1 where a figure is above the limit
    rows = [[row[name] for name in HEADERS] for row in json.loads(done.stdout)]
    table = (DOCS / "parallel.md").read_text(encoding="utf-8").partition("## Figures")[2]
    lines = [line for line in table.splitlines() if line.startswith("| ")][1:]
    shown = [[cell.strip() for cell in line.split("|")[1:4]] for line in lines]
    assert shown == rows
