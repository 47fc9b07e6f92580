"""How much of every published inventory the key maps claim.

MTP_ZOO_INVENTORIES=../shared/inventories python scripts/inventory_table.py           # a table
MTP_ZOO_INVENTORIES=../shared/inventories python scripts/inventory_table.py --json    # the same, for programs

Ends with 1 where a published tensor is not claimed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from mtp_zoo.errors import MTPZooError, UnsupportedQuantizationError
from mtp_zoo.tables import render_table
from mtp_zoo_conformance.inventories import SOURCES, Source, claim, read_inventory
from mtp_zoo_conformance.tiers.keys import INVENTORIES

HEADERS = ("inventory", "family", "claimed / published", "notes")


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.add_argument("--root", type=Path, default=os.environ.get(INVENTORIES), help=f"default: ${INVENTORIES}")
    arguments = parser.parse_args()
    if arguments.root is None:
        print(f"{INVENTORIES} names no folder of inventories; set it, or pass --root.", file=sys.stderr)
        return 2
    rows = [row(arguments.root / name, source) for name, source in SOURCES.items()]
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        cells = [(r["inventory"], r["family"], _share(r), r["notes"]) for r in rows]
        print(render_table("Published inventories", HEADERS, cells, right=(2,)))
    return 0 if all(r["claimed"] == r["published"] or r["refused"] for r in rows) else 1


def row(folder: Path, source: Source) -> dict[str, Any]:
    """One inventory; what is refused for its form of storage is refused by name and claimed in no part."""
    notes = [source.partial, source.because]
    found: dict[str, Any] = {"inventory": folder.name, "family": source.family, "claimed": 0, "refused": False}
    inventory = read_inventory(folder, source)
    try:
        made = claim(inventory)
    except MTPZooError as error:
        quantized = isinstance(error, UnsupportedQuantizationError)
        notes = [f"{'refused' if quantized else 'WRONG'}: {error.message.rpartition(': ')[2]}", *notes]
        found |= {"published": len(inventory.names), "refused": quantized}
    else:
        fp8 = len(made.paired.quantized)
        notes = [f"{fp8} FP8 tensors, each with its scale" if fp8 else "", _skipped(made.plan.skipped), *notes]
        found |= {"claimed": len(made.claimed), "published": len(made.published)}
    return {**found, "notes": "; ".join(filter(None, notes))}


def _skipped(names: Any) -> str:
    return f"{len(names)} copies left alone" if names else ""


def _share(row: dict[str, Any]) -> str:
    return f"- / {row['published']}" if row["refused"] else f"{row['claimed']} / {row['published']}"


if __name__ == "__main__":
    sys.exit(main())
