"""Checks of the head's tensors by their headers: complete, of the right shapes, of the right dtypes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from mtp_zoo.checkpoint import TensorEntry, TensorReader
from mtp_zoo.copies import compare_copies
from mtp_zoo.diagnosis.finding import Finding
from mtp_zoo.diagnosis.subject import Planned, Subject
from mtp_zoo.errors import MTPZooError
from mtp_zoo.groups import group_of
from mtp_zoo.keymap import FLOAT_DTYPES
from mtp_zoo.quantization import quantization_settings

OF_PROBLEM: Mapping[str, str] = {
    "missing": "MZ201",
    "unexpected": "MZ202",
    "shape": "MZ203",
    "dtype": "MZ204",
    "ambiguous": "MZ204",
}
"""Findings by the kind of a key map's problem."""

SAME_FORM = "Convert them with the tool that wrote them, so that all parts have one form and dtype."


def check_tensors(subject: Subject) -> Iterator[Finding]:
    """MZ201 to MZ208."""
    if not subject.head:
        return
    try:
        planned = subject.planned
    except MTPZooError as error:
        yield Finding("MZ101", {"reason": error.message}, error.remedy)
        return
    assert planned is not None
    if subject.untrainable is None:
        yield from _misfits(subject, planned)
    yield from _rounded(subject, planned)
    yield from _copies(subject)
    yield from _other_dtype(subject, planned)


def _misfits(subject: Subject, planned: Planned) -> Iterator[Finding]:
    found: dict[str, dict[str, str]] = {}
    for problem in planned.problems:
        if problem.name not in subject.lost:
            found.setdefault(OF_PROBLEM[problem.kind], {})[problem.name] = problem.detail
    fixes = {
        "MZ202": "Remove them if they are left over; else the family in the config is not the one that wrote them.",
        "MZ204": SAME_FORM,
    }
    for finding, tensors in sorted(found.items()):
        yield Finding(finding, {"tensors": tensors}, fixes.get(finding, subject.graft))


def _rounded(subject: Subject, planned: Planned) -> Iterator[Finding]:
    """A router's bias, which is added to scores in FP32. A router's matrix is released as BF16, and so is an indexer."""
    by_name = {entry.name: entry.dtype for entry in subject.head}
    ends = planned.head.factory.float_names
    lower = {
        native: by_name[native]
        for binding in planned.bindings
        if any(group_of(name) is None and name.endswith(ends) for name in binding.heads)
        for native in binding.natives
        if by_name.get(native, "F32") in ("BF16", "F16")
    }
    if lower:
        yield Finding("MZ205", {"expected": "F32", "tensors": lower}, subject.graft)


def _copies(subject: Subject) -> Iterator[Finding]:
    assert subject.site is not None
    names = [entry.name for entry in subject.copies]
    compared = compare_copies(subject.index, subject.site, names, TensorReader(subject.index), whole=subject.deep)
    different = {name: one.of for name, one in compared.items() if one.of is not None and not one.equal}
    if different:
        fix = "Train against the model's own tensors; for serving nothing needs to be done."
        yield Finding("MZ207", {"copies": different}, fix)


def _other_dtype(subject: Subject, planned: Planned) -> Iterator[Finding]:
    """Of most of the bytes; a quantised model's floats are too few to tell what it was."""
    if quantization_settings(subject.index.config):
        return
    kept = {n for b in planned.bindings for n in b.natives if not all(map(planned.head.rounds, b.heads))}
    head = _mostly(_sizes(e for e in subject.head if e.name not in kept))
    model = _mostly(_sizes(subject.index.entries.values()) - _sizes(subject.head))
    if head and model and head != model:
        short = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}.get(model, "bf16")
        yield Finding("MZ208", {"head": head, "model": model}, f"mtp-zoo export {subject.place} OUT --dtype {short}")


def _sizes(entries: Iterable[TensorEntry]) -> Counter[str]:
    """Bytes of each float dtype."""
    sizes: dict[str, int] = dict.fromkeys(FLOAT_DTYPES, 0)
    for _, dtype, _, _, start, end in entries:
        if dtype in sizes:
            sizes[dtype] += end - start
    return Counter(sizes)


def _mostly(sizes: Counter[str]) -> str | None:
    """The dtype of most bytes."""
    name, size = max(sizes.items(), key=lambda item: item[1], default=("", 0))
    return name if size else None
