"""Settings of the conformance tests, in the checkout and for `python -m pytest --pyargs mtp_zoo_conformance` elsewhere."""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # huggingface_hub reads it once, when it is imported

from mtp_zoo_conformance.engines import environment
from mtp_zoo_conformance.plugins import load_plugins
from mtp_zoo_conformance.record import TIERS, Record, Tier
from mtp_zoo_conformance.run import Selection, run

LIMIT_SECONDS = 600.0


def pytest_configure(config: pytest.Config) -> None:
    """Name the markers, and let installed projects register their cases before tests are collected."""
    for tier in TIERS:
        config.addinivalue_line("markers", f"{tier}: tier of conformance")
    load_plugins()


class Outcomes:
    """What each tier found: one run of a tier for all tests of it, made when the first of them asks."""

    def __init__(self, session: pytest.Session, factory: pytest.TempPathFactory) -> None:
        self._session, self._factory = session, factory
        self._records: dict[Tier, Record] = {}

    def of(self, tier: Tier) -> Record:
        """The record of a tier, for the families and engines of the collected tests."""
        if tier not in self._records:
            chosen = [_parameters(item) for item in self._session.items if _runs(item, tier)]
            families = tuple(dict.fromkeys(parameters["family"] for parameters in chosen))
            engines = tuple(dict.fromkeys(parameters["engine"] for parameters in chosen if "engine" in parameters))
            pythons = {engine: found for engine in engines if (found := environment.find(engine))}
            selection = Selection(families=families, engines=engines, tiers=(tier,))
            self._records[tier] = run(selection, pythons, self._factory.mktemp(tier), limit=LIMIT_SECONDS)
        return self._records[tier]


def _runs(item: pytest.Item, tier: Tier) -> bool:
    return item.get_closest_marker(tier) is not None and "outcomes" in getattr(item, "fixturenames", ())


def _parameters(item: Any) -> dict[str, Any]:
    return item.callspec.params


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What each tier found."""
    return Outcomes(request.session, tmp_path_factory)
