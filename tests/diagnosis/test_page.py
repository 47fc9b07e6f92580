"""docs/doctor.md lists every finding, as it is printed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mtp_zoo.diagnosis.finding import CATALOGUE
from tests.pages import DOCS, headings
from tests.test_docs_reference import load_script

PAGE = DOCS / "doctor.md"


def test_the_list_of_findings_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["make_doctor_docs.py", "--check"])
    assert load_script("make_doctor_docs").main() == 0


def test_a_stale_list_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "doctor.md"
    page.write_text(PAGE.read_text(encoding="utf-8").replace("MZ102 error", "MZ102 info"), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["make_doctor_docs.py", "--check", "--page", str(page)])
    script = load_script("make_doctor_docs")
    monkeypatch.setattr(script, "CATALOGUE", {"MZ102": CATALOGUE["MZ102"]})
    assert script.main() == 1


def test_every_finding_has_a_heading() -> None:
    named = [text.partition(":")[0] for text in headings(PAGE) if text.startswith("MZ")]
    assert named == list(CATALOGUE)
