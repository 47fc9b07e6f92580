"""`mtp-zoo list`: the registered families."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mtp_zoo.cli.output import JsonOption, show

if TYPE_CHECKING:
    from mtp_zoo.registry import Family

COLUMNS = ("name", "model_types", "depth_policy", "hidden_tap", "recycle", "fuse_order", "norm_weight")


def command(as_json: JsonOption = False) -> None:
    """List the registered families and their conventions."""
    from mtp_zoo.registry import list_families
    from mtp_zoo.tables import render_table

    rows = [_row(family) for family in list_families()]
    cells = [[", ".join(row[c]) if c == "model_types" else row[c] for c in COLUMNS] for row in rows]
    show({"families": rows}, render_table("Families", COLUMNS, cells), as_json=as_json)


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
    }
