"""The table of cases: one import line a family."""

from __future__ import annotations

import importlib

from mtp_zoo.errors import ConformanceError
from mtp_zoo_conformance.case import ConformanceCase

_CASES: dict[str, ConformanceCase] = {}
_BUILT_IN = (
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
)


def register_case(case: ConformanceCase) -> ConformanceCase:
    """Add a case to the table and return it.

    Raises:
        ConformanceError: the family has a case already.
    """
    if case.family in _CASES:
        raise ConformanceError(
            f"Registering the conformance case of family '{case.family}': it has one.",
            remedy="Add a variant to the registered case, or give the new family another name.",
        )
    _CASES[case.family] = case
    return case


def list_cases() -> tuple[ConformanceCase, ...]:
    """Every registered case, by family."""
    for name in _BUILT_IN:
        importlib.import_module(f"mtp_zoo_conformance.cases.{name}")
    return tuple(_CASES[name] for name in sorted(_CASES))


def get_case(family: str) -> ConformanceCase:
    """The case of a family.

    Raises:
        ConformanceError: it has none.
    """
    cases = {case.family: case for case in list_cases()}
    if family not in cases:
        raise ConformanceError(
            f"Looking for the conformance case of family '{family}': it has none.",
            remedy=f"Register one (mtp_zoo_conformance.cases.register_case), or pick one of {', '.join(cases)}.",
        )
    return cases[family]
