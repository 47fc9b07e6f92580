"""Which of several copies of a tensor may go: those that equal the one that stays, or that are proven to be older."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, cast

from mtp_zoo.checkpoint import TensorEntry, TensorReader
from mtp_zoo.diagnosis.subject import Subject
from mtp_zoo.export_plan import PROVENANCE_NAME


def stale_copies(subject: Subject) -> tuple[dict[str, str], dict[str, set[str]]]:
    """For every tensor with copies of which one can be chosen: the file that keeps it, and by file the names that go.

    The copy that stays is the one whose sha256 `mtp_zoo.json` gives, else the one that the index names, else the first. Where
    bytes differ and nothing proves one of them, none goes.

    Example: "mtp.norm.weight" is in A, which the index names, and in B, with other bytes. If `mtp_zoo.json` has the hash of
    B's, the result is ({"mtp.norm.weight": "B"}, {"A": {"mtp.norm.weight"}}); if it has neither hash, ({}, {}).
    """
    reader = TensorReader(subject.index)
    proven = _proven(subject)
    kept: dict[str, str] = {}
    dropped: dict[str, set[str]] = defaultdict(set)
    for name, copies in subject.holders.items():
        keeper = _keeper(copies, subject.index.entries[name].file, proven.get(name), reader)
        if keeper is not None:
            kept[name] = keeper
            for copy in copies:
                if copy.file != keeper:
                    dropped[copy.file].add(name)
    return kept, dict(dropped)


def _keeper(copies: Sequence[TensorEntry], usual: str, proven: str | None, reader: TensorReader) -> str | None:
    digests = {copy.file: (copy.dtype, copy.shape, _digest(copy, reader)) for copy in copies}
    if len(set(digests.values())) == 1:
        return usual
    right = [file for file, (_, _, digest) in digests.items() if digest == proven]
    return usual if usual in right else next(iter(right), None)


def _digest(entry: TensorEntry, reader: TensorReader) -> str:
    found = hashlib.sha256()
    for piece in reader.raw(entry):
        found.update(piece)
    return found.hexdigest()


def _proven(subject: Subject) -> Mapping[str, str]:
    """sha256 by tensor, as an export wrote them down; empty where there is no such record."""
    try:
        tensors = json.loads((subject.index.root / PROVENANCE_NAME).read_text(encoding="utf-8"))["tensors"]
        return {str(name): str(row["sha256"]) for name, row in cast("dict[str, Any]", tensors).items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}
