"""Checks of weight files and their index: what one says and the other holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mtp_zoo.checkpoint import INDEX_NAME
from mtp_zoo.checkpoint_faults import REMEDIES, Fault, FaultKind
from mtp_zoo.diagnosis.finding import Finding
from mtp_zoo.diagnosis.subject import Subject
from mtp_zoo.export_plan import SINGLE_FILE
from mtp_zoo.journal import JOURNAL, UNDO

OPENED_UNLISTED = "mtp.safetensors"
"""SGLang opens a file of this name though no index lists it, for the architectures below; vLLM does not.

Source: SGLang 0.5.23 srt/model_loader/weight_utils.py, maybe_add_mtp_safetensors.
"""

OPENED_FOR = (
    "Glm4MoeForCausalLM",
    "Glm4MoeForCausalLMNextN",
    "Glm4MoeLiteForCausalLM",
    "Glm4MoeLiteForCausalLMNextN",
)


def check_files(subject: Subject) -> Iterator[Finding]:
    """MZ002 to MZ012, and MZ015."""
    for fault in subject.index.faults:
        yield _FOUND[fault.kind](subject, fault)
    yield from _single_file(subject)
    yield from _total_size(subject)
    if not subject.index.listed and len(subject.index.files) > 1:
        yield Finding("MZ012", {"files": list(subject.index.files)}, subject.mend)
    if (subject.index.root / UNDO / JOURNAL).exists():
        yield Finding("MZ015", {"folder": UNDO}, f"mtp-zoo rollback {subject.place} --discard")


def _missing(subject: Subject, fault: Fault) -> Finding:
    moved = {subject.index.entries[name].file for name in fault.tensors if name in subject.index.entries}
    facts = {"file": fault.file, "tensors": list(fault.tensors)}
    if moved:  # the same tensors lie in files of other names: the index is stale, and nothing is lost
        return Finding("MZ002", {**facts, "found_in": sorted(moved)}, subject.mend)
    return Finding("MZ002", facts, REMEDIES[fault.kind])


def _corrupt(_: Subject, fault: Fault) -> Finding:
    return Finding(
        "MZ003",
        {"file": fault.file, "reason": fault.message, "tensors": list(fault.tensors)},
        REMEDIES[fault.kind],
    )


def _misplaced(subject: Subject, fault: Fault) -> Finding:
    entries = subject.index.entries
    found = sorted({entries[name].file for name in fault.tensors})
    return Finding("MZ004", {"listed_in": fault.file, "found_in": found, "tensors": list(fault.tensors)}, subject.mend)


def _absent(subject: Subject, fault: Fault) -> Finding:
    of_head = subject.site is not None and subject.site.inside(fault.tensors)
    fix = subject.graft if of_head else REMEDIES[fault.kind]
    return Finding("MZ005", {"listed_in": fault.file, "tensors": list(fault.tensors)}, fix)


def _duplicate(subject: Subject, fault: Fault) -> Finding:
    index = subject.index
    listed = sorted({index.weight_map[name] for name in fault.tensors if name in index.weight_map})
    files = sorted({copy.file for name in fault.tensors for copy in subject.holders.get(name, ())})
    facts: dict[str, Any] = {"files": files, "listed_in": listed, "tensors": list(fault.tensors)}
    return Finding("MZ006", {**facts, **_opened_anyway(subject, files)}, subject.mend)


def _unlisted(subject: Subject, fault: Fault) -> Finding:
    facts: dict[str, Any] = {"file": fault.file, "tensors": list(fault.tensors)}
    if fault.file in subject.index.weight_map.values():
        return Finding("MZ007", facts, subject.mend)
    site = subject.site
    if site is not None and site.inside(fault.tensors):
        return Finding("MZ008", {**facts, **_opened_anyway(subject, [fault.file])}, subject.mend)
    return Finding("MZ009", facts, "List the file in the index if it belongs to the model; else remove it.")


def _opened_anyway(subject: Subject, files: Sequence[str]) -> Mapping[str, list[str]]:
    """Who opens one of these files although the index does not list it."""
    named = subject.index.config.raw.get("architectures")
    unlisted = OPENED_UNLISTED in files and OPENED_UNLISTED not in subject.index.weight_map.values()
    sglang = unlisted and isinstance(named, list) and not set(OPENED_FOR).isdisjoint(map(str, named[:1]))
    return {"opened_unlisted_by": ["sglang"]} if sglang else {}


_FOUND: Mapping[FaultKind, Callable[[Subject, Fault], Finding]] = {
    "missing_file": _missing,
    "corrupt_file": _corrupt,
    "misplaced": _misplaced,
    "absent": _absent,
    "duplicate": _duplicate,
    "unlisted": _unlisted,
}


def _single_file(subject: Subject) -> Iterator[Finding]:
    others = sorted({entry.file for entry in subject.head if entry.file != SINGLE_FILE})
    if SINGLE_FILE in subject.index.files and others:
        fix = f"mtp-zoo export {subject.place} OUT (it gives the file a shard's name)"
        yield Finding("MZ010", {"file": SINGLE_FILE, "head_in": others}, fix)


def _total_size(subject: Subject) -> Iterator[Finding]:
    index = subject.index
    if not index.listed or any(fault.fatal for fault in index.faults):
        return
    declared = index.metadata.get("total_size")
    read = (index.headers[file] for file in set(index.weight_map.values()))
    held = sum(header.entries[-1].end - header.nbytes for header in read if header.entries)
    if declared is not None and declared != held:
        yield Finding("MZ011", {"file": INDEX_NAME, "declared": declared, "found": held}, subject.mend)
