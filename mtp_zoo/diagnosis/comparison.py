"""Whether a head that was trained differs from the one that its base ships."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mtp_zoo.checkpoint import CheckpointIndex, TensorEntry, TensorReader
from mtp_zoo.diagnosis.finding import Finding
from mtp_zoo.diagnosis.subject import Subject, is_float
from mtp_zoo.progress import progress
from mtp_zoo.registry import needed_by_head

TRAIN = "Check that the training ran, and that its last state is what was exported."


def check_against(subject: Subject, base: str | Path) -> Iterator[Finding]:
    """MZ404 to MZ406.

    Raises:
        CheckpointError: the base can't be read as a checkpoint.
    """
    if not subject.head:
        return
    other = CheckpointIndex.open(base, need=needed_by_head)
    pairs = [
        (entry, other.entries[entry.name])
        for entry in subject.head
        if entry.name in other.entries and not subject.left_alone(entry.name)
    ]
    pairs = [(ours, theirs) for ours, theirs in pairs if _comparable(ours, theirs)]
    if not pairs:
        yield Finding(
            "MZ406", {"base": str(base), "tensors": len(subject.head)}, "Name the checkpoint it was trained from."
        )
        return
    equal = _equal(subject.index, other, pairs)
    facts = {"base": str(base), "compared": len(pairs)}
    if len(equal) == len(pairs):
        yield Finding("MZ404", facts, TRAIN)
    elif equal:
        yield Finding("MZ405", {**facts, "tensors": equal})


def _comparable(ours: TensorEntry, theirs: TensorEntry) -> bool:
    """Whether both stand for numbers that can be compared: stored alike, or both as floats."""
    return ours.shape == theirs.shape and (ours.dtype == theirs.dtype or (is_float(ours) and is_float(theirs)))


def _equal(ours: CheckpointIndex, theirs: CheckpointIndex, pairs: list[tuple[TensorEntry, TensorEntry]]) -> list[str]:
    """Names of the tensors that are the same: byte for byte, or, in two dtypes, number for number."""
    reader, other = TensorReader(ours), TensorReader(theirs)
    reader.fetch(entry for entry, _ in pairs)
    other.fetch(entry for _, entry in pairs)
    same: list[str] = []
    with progress("Comparing with the base", total=len(pairs)) as advance:
        for entry, base in pairs:
            if entry.dtype == base.dtype:
                equal = all(a == b for a, b in zip(reader.raw(entry), other.raw(base), strict=True))
            else:
                equal = bool((reader.read(entry).double() == other.read(base).double()).all())
            same += [entry.name] if equal else []
            advance()
    return same
