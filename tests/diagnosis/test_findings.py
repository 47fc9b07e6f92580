"""doctor: every finding is found where it is, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtp_zoo.diagnosis.examination import doctor
from mtp_zoo.diagnosis.finding import CATALOGUE
from tests.diagnosis.cases import CASES, Case
from tests.exporting import snapshot


def found(case: Case, folder: Path, *, broken: bool) -> set[str]:
    base = case.base(folder / "base") if case.base else None
    root = (case.broken if broken else case.sound)(folder / "model")
    before = snapshot(root)
    diagnosis = doctor(root, deep=case.deep, against=base)
    assert snapshot(root) == before
    return {finding.id for finding in diagnosis.findings}


def test_every_finding_has_a_case() -> None:
    assert CASES.keys() == CATALOGUE.keys()


@pytest.mark.parametrize("name", CASES)
def test_a_finding_is_found(name: str, tmp_path: Path) -> None:
    assert found(CASES[name], tmp_path, broken=True) == {name, *CASES[name].also}


@pytest.mark.parametrize("name", CASES)
def test_its_neighbour_is_not(name: str, tmp_path: Path) -> None:
    assert found(CASES[name], tmp_path, broken=False) == CASES[name].left
