"""The page of faults names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_test_that_the_page_names_exists() -> None:
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    missing: list[str] = []
    file = ""
    for name in re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?|::\w+)`", text):
        path, _, test = name.partition("::")
        file = path or file
        there = (ROOT / file).is_file()
        if not there or (test and f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8")):
            missing.append(f"{file}::{test}")
    assert missing == []
    assert len(re.findall(r"^\| [A-F]\d", text, re.MULTILINE)) > 40
