"""Tier keys: names, shapes and bytes. Nothing is computed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

import mtp_zoo as mz
from mtp_zoo.errors import MTPZooError
from mtp_zoo.keymap import to_native
from mtp_zoo_conformance.case import ConformanceCase
from mtp_zoo_conformance.inventories import SOURCES, Source, claim, read_inventory
from mtp_zoo_conformance.prepared import Prepared
from mtp_zoo_conformance.record import Cell, Verdict

INVENTORIES = "MTP_ZOO_INVENTORIES"
"""Environment variable that names the folder of published inventories; where it is unset no cell claims to have read them."""

SHOWN = 5
"""Problems of a plan that a cell names; it counts all of them."""


def judge(prepared: Prepared) -> list[Cell]:
    """Every name claimed, a map that runs both ways, and the same bytes behind load and export."""
    checks: dict[str, Callable[[Prepared], str]] = {
        "claimed": unclaimed,
        "bijective": not_bijective,
        "round_trip": changed_bytes,
    }
    return [_cell(prepared.case, prepared.variant.name, stage, check, prepared) for stage, check in checks.items()]


def judge_inventories(case: ConformanceCase) -> list[Cell]:
    """The case's published inventories, where their folder is known."""
    root = os.environ.get(INVENTORIES)
    return [
        _cell(case, name, "inventory", unlike_published, case, Path(root) / name) for name in case.inventories if root
    ]


def _cell(case: ConformanceCase, variant: str, stage: str, check: Callable[..., str], *args: object) -> Cell:
    verdict: Verdict = "differs"
    try:
        wrong = check(*args)
    except MTPZooError as error:
        named = "; ".join(map(str, error.problems[:SHOWN]))
        wrong = f"{error.message} {named}".strip()
    except FileNotFoundError as error:
        verdict, wrong = "not_judged", f"there is no file {error.filename}"
    return Cell(
        family=case.family,
        variant=variant,
        engine="none",
        engine_version="",
        tier="keys",
        stage=stage,
        verdict=verdict if wrong else "pass",
        reason=wrong,
    )


def unclaimed(prepared: Prepared) -> str:
    """What is wrong with the names that were read, or ''."""
    expected = set(prepared.case.shapes_of(prepared.variant))
    report = mz.load_head(prepared.checkpoint).report
    claimed = {tensor.name for tensor in report.tensors} | set(report.skipped)
    return "" if claimed == expected else f"claimed and listed names differ in {sorted(claimed ^ expected)}"


def not_bijective(prepared: Prepared) -> str:
    """Names that do not come back from the head's names, or ''."""
    head = mz.load_head(prepared.checkpoint)
    back = list(to_native(head.origin.bindings, head.weights()))
    expected = sorted({tensor.name for tensor in head.report.tensors})
    return "" if sorted(back) == expected else f"{expected} came back as {sorted(back)}"


def changed_bytes(prepared: Prepared) -> str:
    """Tensors whose dtype or bytes changed on the way through the head, or ''."""
    stored = load_file(prepared.checkpoint / "model.safetensors")
    head = mz.load_head(prepared.checkpoint)
    natives = to_native(head.origin.bindings, head.weights())
    changed = [name for name, value in natives.items() if not same_bytes(value, stored[name])]
    return f"changed: {changed}" if changed else ""


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree in dtype, shape and every byte (NaNs too)."""
    return a.dtype == b.dtype and a.shape == b.shape and bool((_raw(a) == _raw(b)).all())


def _raw(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def unlike_published(case: ConformanceCase, folder: Path) -> str:
    """Where the key map, built from a published config, claims other names or shapes than were published, or ''."""
    inventory = read_inventory(folder, SOURCES.get(folder.name) or Source(family=case.family))
    found = claim(inventory)
    left = found.published - found.claimed
    return f"not claimed: {sorted(left)}" if left else ""
