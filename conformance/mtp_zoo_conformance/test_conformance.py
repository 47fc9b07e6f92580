"""Every registered family, on every tier. `-m keys`, `-m forward`, `-m module` and `-m serve` select one.

The tiers module and serve need an engine's environment, and skip with the reason where there is none.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from mtp_zoo.registry import list_families
from mtp_zoo.spec import Engine
from mtp_zoo_conformance.cases import get_case, list_cases
from mtp_zoo_conformance.conftest import Outcomes
from mtp_zoo_conformance.engines import environment
from mtp_zoo_conformance.record import Cell, Record
from mtp_zoo_conformance.tiers.module import no_environment

FAMILIES = [family.name for family in list_families()]
CASES = list_cases()
VARIANTS = [(case.family, variant.name) for case in CASES for variant in case.variants]
FP32 = [(case.family, variant.name) for case in CASES for variant in case.variants if variant.dtype == "float32"]
"""What the tier forward judges; variants in a lower precision are left to the engines."""
SERVED = [(case.family, engine) for case in CASES for engine in case.engines]
MODULES = [(*variant, engine) for variant in VARIANTS for family, engine in SERVED if family == variant[0]]


@pytest.mark.keys
@pytest.mark.parametrize("family", FAMILIES)
def test_a_registered_family_has_a_case(family: str) -> None:
    assert get_case(family).variants


@pytest.mark.keys
@pytest.mark.parametrize(("family", "variant"), VARIANTS)
def test_keys(outcomes: Outcomes, family: str, variant: str) -> None:
    judge(cell for cell in outcomes.of("keys").cells if (cell.family, cell.variant) == (family, variant))


@pytest.mark.forward
@pytest.mark.parametrize(("family", "variant"), FP32)
def test_forward(outcomes: Outcomes, family: str, variant: str) -> None:
    judge(cell for cell in outcomes.of("forward").cells if (cell.family, cell.variant) == (family, variant))


@pytest.mark.forward
@pytest.mark.parametrize("family", [case.family for case in CASES])
def test_forward_catches_wrong_conventions(outcomes: Outcomes, family: str) -> None:
    assert unseen(outcomes.of("forward"), family, "reference") == []


@pytest.mark.module
@pytest.mark.parametrize(("family", "variant", "engine"), MODULES)
def test_module(outcomes: Outcomes, family: str, variant: str, engine: Engine) -> None:
    need(engine)
    cells = outcomes.of("module").cells
    judge(c for c in cells if (c.family, c.variant, c.engine) == (family, variant, engine))


@pytest.mark.module
@pytest.mark.parametrize(("family", "engine"), SERVED)
def test_module_catches_wrong_conventions(outcomes: Outcomes, family: str, engine: Engine) -> None:
    need(engine)
    assert unseen(outcomes.of("module"), family, engine) == []


@pytest.mark.serve
@pytest.mark.parametrize(("family", "engine"), SERVED)
def test_serve(outcomes: Outcomes, family: str, engine: Engine) -> None:
    need(engine)
    judge(cell for cell in outcomes.of("serve").cells if (cell.family, cell.engine) == (family, engine))


def need(engine: Engine) -> None:
    """Skip where the engine has no environment."""
    if environment.find(engine) is None:
        pytest.skip(no_environment(engine))


def judge(cells: Iterable[Cell]) -> None:
    """Fail for what differs or could not be judged; skip where a case declares that nothing can be."""
    found = list(cells)
    wrong = [
        f"{cell.stage}: {cell.verdict}: {cell.reason}" for cell in found if cell.verdict != "pass" and not cell.expected
    ]
    assert wrong == []
    assert found
    if not any(cell.verdict == "pass" for cell in found):
        pytest.skip("; ".join(cell.reason for cell in found))


def unseen(record: Record, family: str, engine: str) -> list[str]:
    """Names of the wrong conventions that a judge did not catch.

    None made at all is a failure too: a tier that flips nothing shows nothing.
    """
    flips = [flip for flip in record.sensitivity if (flip.family, flip.engine) == (family, engine)]
    assert flips
    return [flip.flip for flip in flips if not flip.caught]
