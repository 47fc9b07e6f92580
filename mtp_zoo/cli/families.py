"""`mtp-zoo list`: the registered families."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from mtp_zoo.cli.output import JsonOption, show

if TYPE_CHECKING:
    from mtp_zoo.registry import Family

COLUMNS = ("name", "model_types", "depth_policy", "hidden_tap", "recycle", "fuse_order", "norm_weight", "engines")


def command(as_json: JsonOption = False) -> None:
    """List the registered families and their conventions."""
    from mtp_zoo.registry import list_families
    from mtp_zoo.tables import render_table

    rows = [_row(family) for family in list_families()]
    cells = [[_in_words(row[column]) for column in COLUMNS] for row in rows]
    show({"families": rows}, render_table("Families", COLUMNS, cells), as_json=as_json)


def _in_words(value: Any) -> str:
    """Lists by commas, mappings one entry a line."""
    if isinstance(value, dict):
        return "\n".join(f"{key}: {item}" for key, item in cast("dict[str, Any]", value).items())
    return ", ".join(value) if isinstance(value, list) else str(value)


def _row(family: Family) -> dict[str, Any]:
    spec = family.spec
    return {
        "name": family.name,
        "model_types": list(family.model_types),
        "depth_policy": spec.depth_policy,
        "hidden_tap": spec.hidden_tap,
        "recycle": spec.recycle.describe(),
        "fuse_order": spec.fuse_order,
        "norm_weight": spec.norm_weight,
        "engines": dict(family.engines),
    }
