"""`mtp_zoo.json`: what an exported checkpoint says of where its parts come from, and what its parts were.

    format        number of this layout; `read_record` refuses a later one
    mtp_zoo       version of the library that wrote it
    family, depths, conventions, engine, head_bytes
    base          where the trunk came from: source as given, path, revision (a commit, where it has one)
    head          where the head was loaded from, where that is not the base; else null
    training      what the caller said of the training, or null
    tensors       of the head: name -> dtype, shape, sha256 of its bytes
    trunk         every other weight file -> sha256 of its header, in which names, dtypes, shapes and sizes stand

`mtp-zoo verify` holds a checkpoint against it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mtp_zoo.cache_tree import commit_of
from mtp_zoo.errors import ExportError
from mtp_zoo.export_plan import PROVENANCE_NAME, ExportPlan
from mtp_zoo.json_text import parse_object, read_bounded
from mtp_zoo.version import __version__

if TYPE_CHECKING:
    from mtp_zoo.head import DraftHead

FORMAT = 1
RECORD_LIMIT = 1 << 26
"""Longest record in bytes: a thousand depths' worth of experts one by one."""

TABLES = ("tensors", "trunk")


def refuse_unprintable(facts: Mapping[str, Any]) -> None:
    """Raise ExportError for facts that are not JSON, before anything is written."""
    try:
        json.dumps(facts, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ExportError(
            f"Writing {PROVENANCE_NAME}: the training summary is not JSON ({error}).",
            remedy="Pass numbers, strings, lists and tables only.",
        ) from error


def provenance(
    plan: ExportPlan, head: DraftHead, digests: Mapping[str, str], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of `mtp_zoo.json`.

    Args:
        plan: of the export.
        head: what is exported.
        digests: sha256 of each stored tensor of the head.
        facts: `base` and `training`.
    """
    return {
        "format": FORMAT,
        "mtp_zoo": __version__,
        "family": head.family.name,
        "depths": head.num_depths,
        "conventions": head.spec.describe(),
        "engine": head.engine,
        "head_bytes": sum(tensor.nbytes for tensor in plan.head),
        "base": facts["base"],
        "head": _origin(head, facts["base"]["path"]),
        "training": facts["training"],
        "tensors": {
            tensor.name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "sha256": digests[tensor.name]}
            for tensor in plan.head
        },
        "trunk": {shard.name: {"header_sha256": shard.header_sha256} for shard in plan.shards},
    }


def _origin(head: DraftHead, base: str) -> dict[str, Any] | None:
    """Where the head was loaded from; None where that is the base."""
    root = head.origin.root
    if root.resolve() == Path(base).resolve():
        return None
    report = getattr(head, "report", None)  # a head that was put together from tensors has none
    return {"source": report.source if report else str(root), "path": str(root.absolute()), "revision": commit_of(root)}


def encode_record(record: Mapping[str, Any]) -> str:
    """The text of `mtp_zoo.json`."""
    return json.dumps(record, indent=2, ensure_ascii=False) + "\n"


def read_record(path: Path) -> dict[str, Any]:
    """The content of a `mtp_zoo.json`, as far as it is read again: format and the two tables are as written.

    Raises:
        ValueError: it can't be read, or is of a later format; in words.
    """
    try:
        record = parse_object(read_bounded(path, RECORD_LIMIT), unique=True)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} can't be read ({error})") from error
    written = record.get("format")
    if written != FORMAT:
        raise ValueError(f"{path.name} has format {written!r}, this version of mtp_zoo reads {FORMAT}")
    for table in TABLES:
        rows = record.get(table)
        if not isinstance(rows, dict) or not all(
            isinstance(row, dict) for row in cast("dict[str, Any]", rows).values()
        ):
            raise ValueError(f"{path.name} holds no table of {table}")
    return record
