"""Write the recorded conformance run into docs/conformance.md and the README's table of families.

mtp-zoo conform --report build/conformance
python scripts/make_conformance_docs.py build/conformance/conformance.json    # record that run, rewrite both pages
python scripts/make_conformance_docs.py                                       # rewrite both from docs/conformance.json
python scripts/make_conformance_docs.py --check                               # change nothing; 1 where a page is stale
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from mtp_zoo.registry import list_families
from mtp_zoo_conformance import tables
from mtp_zoo_conformance.record import Record
from mtp_zoo_conformance.report import markdown, markdown_table
from mtp_zoo_conformance.tiers.module import ALL

ROOT = Path(__file__).parents[1]
RECORD = "docs/conformance.json"
START = "<!-- conformance: written by scripts/make_conformance_docs.py -->"
END = "<!-- end of conformance -->"
HEADERS = ("family", "covers", "plain torch", "vLLM", "SGLang")
NOT_MEASURED = "not measured yet"


def main() -> int:
    """Rewrite the pages, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", nargs="?", type=Path, help="conformance.json of a run")
    parser.add_argument("--check", action="store_true", help="only compare")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout")
    arguments = parser.parse_args()
    kept = arguments.root / RECORD
    record = Record.from_dict(json.loads((arguments.record or kept).read_text(encoding="utf-8")))
    parts = {"docs/conformance.md": markdown(record), "README.md": "\n".join(families(record)) + "\n"}
    pages = {arguments.root / name: part for name, part in parts.items()}
    stale = [page for page, part in pages.items() if page.read_text(encoding="utf-8") != with_part(page, part)]
    if arguments.check:
        for page in stale:
            print(f"{page} is stale: run `python scripts/make_conformance_docs.py`.", file=sys.stderr)
        return 1 if stale else 0
    kept.write_text(json.dumps(record.as_dict(), indent=1) + "\n", encoding="utf-8")
    for page in stale:
        page.write_text(with_part(page, pages[page]), encoding="utf-8")
    return 0


def with_part(path: Path, part: str) -> str:
    """The content of a page with `part` between the markers.

    Raises:
        ValueError: the page lacks a marker, or holds one twice.
    """
    page = path.read_text(encoding="utf-8")
    if page.count(START) != 1 or page.count(END) != 1 or page.index(END) < page.index(START):
        raise ValueError(f"{path}: expected one {START!r} with one {END!r} behind it")
    before, _, rest = page.partition(START)
    return f"{before}{START}\n\n{part}\n{END}{rest.partition(END)[2]}"


def families(record: Record) -> Iterator[str]:
    """The README's table: a row a registered family, a column a judge; and what stood in for parts of an engine."""
    judges = ("reference", "vllm", "sglang")
    names = [family.name for family in list_families()]
    rows = [(f"`{name}`", covers(name), *(parity(record, name, judge) for judge in judges)) for name in names]
    yield from markdown_table(HEADERS, rows)
    for engine in record.engines:
        ours = ", ".join(f"`{shim.partition(':')[0]}`" for shim in engine.shims) or "nothing"
        yield from ("", f"{engine.engine} {engine.version} on {engine.device}, ours and not the engine's: {ours}.")


def covers(family: str) -> str:
    """The models of a family: the first line of its file, up to the bracket."""
    document = inspect.getdoc(importlib.import_module(f"mtp_zoo.families.{family}")) or ""
    return document.partition("\n")[0].partition(" (")[0].rstrip(".")


def parity(record: Record, family: str, judge: str) -> str:
    """Verdict, largest difference with its tolerance on the first variant, flips, and the verdict on serving."""
    cells = [cell for cell in record.cells if (cell.family, cell.engine) == (family, judge)]
    groups = [group for group in tables.groups(cells) if group.tier in tables.STAGED_TIERS]
    if not groups:
        return NOT_MEASURED
    verdicts = [group.verdict.partition(",")[0] for group in groups]
    words = f"{verdicts.count('pass')} of {len(verdicts)} variants"
    nearest = groups[0].nearest
    if nearest is not None:
        words += f", {tables.number(nearest.max_abs_diff)} (tolerance {tables.number(nearest.tolerance)})"
    flips = [flip for flip in record.sensitivity if (flip.family, flip.engine) == (family, judge)]
    if flips:
        words += f", {sum(flip.caught for flip in flips)} of {len(flips)} flips caught"
    parts = {cell.stage for cell in cells if cell.tier == "serve" and cell.variant == ALL and cell.expected}
    runs = [group for group in tables.groups(cells) if group.tier == "serve" and not (parts and group.variant == ALL)]
    served = [group.verdict.partition(",")[0] for group in runs]
    if served:
        words += f", {served.count('pass')} of {len(served)} served runs"
    return words + "".join(f", {part} not judged" for part in sorted(parts))


if __name__ == "__main__":
    sys.exit(main())
