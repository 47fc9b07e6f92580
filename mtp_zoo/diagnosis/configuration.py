"""Checks of what config.json declares: a head, its depths, its place, and what it borrows from the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mtp_zoo.diagnosis.finding import Finding
from mtp_zoo.diagnosis.subject import Subject
from mtp_zoo.errors import HeadLayerError, ModelConfigError, MTPZooError, SharedTensorError
from mtp_zoo.shared import shared_names
from mtp_zoo.site import TRUNK_LAYERS, HeadSite, behind_prefix, find_site


def check_configuration(subject: Subject) -> Iterator[Finding]:
    """MZ101 to MZ109, and MZ206."""
    if isinstance(subject.family, MTPZooError):
        yield Finding(
            "MZ106",
            {"reason": subject.family.message, "model_types": list(subject.index.config.model_types)},
            "Name the family where you load (load_head(..., family=...)), or register one for this model_type.",
        )
        return
    assert subject.site is not None
    for check in (_declared, _layer, _borrowed):
        try:
            yield from check(subject, subject.site)
        except ModelConfigError as error:
            yield Finding("MZ101", {"reason": error.message}, error.remedy)


def _declared(subject: Subject, site: HeadSite) -> Iterator[Finding]:
    field = site.family.count_field
    if field is None:
        return
    declared = subject.index.config.count(field)
    if not subject.has_head:
        yield from _nothing(subject, site, field, declared)
        return
    numbers = subject.depths or (0,)
    facts: dict[str, Any] = {"field": field, "declared": declared, "found": len(numbers)}
    if numbers[-1] != len(numbers) - 1:
        yield Finding("MZ104", {**facts, "numbers": [site.first_layer + one for one in numbers]}, subject.graft)
    elif not declared:
        yield Finding("MZ103", facts, subject.mend)
    elif declared != len(numbers):
        yield Finding("MZ104", facts, subject.mend if subject.undeclared else subject.graft)


def _nothing(subject: Subject, site: HeadSite, field: str, declared: int | None) -> Iterator[Finding]:
    facts: dict[str, Any] = {"family": site.family.name, "field": field, "declared": declared}
    foreign = sorted(name for name in subject.index.entries if behind_prefix(site.family, name))
    if foreign:
        names = ", ".join(site.family.scope)
        yield Finding(
            "MZ206", {"expected": site.family.layer, "tensors": foreign}, f"Rename them to begin with {names}"
        )
    if declared:
        yield Finding("MZ102", facts, subject.graft)
    elif not foreign:
        yield Finding("MZ109", facts)


def _layer(subject: Subject, site: HeadSite) -> Iterator[Finding]:
    if not subject.has_head:
        return
    try:
        find_site(site.family, subject.meant, subject.index.config)
    except HeadLayerError as error:
        declared = subject.index.config.count(TRUNK_LAYERS)
        yield Finding("MZ105", {"field": TRUNK_LAYERS, "declared": declared, "found": site.first_layer}, error.remedy)


def _borrowed(subject: Subject, site: HeadSite) -> Iterator[Finding]:
    index = subject.index
    try:
        names = shared_names(index, site.family)
    except SharedTensorError as error:
        yield Finding("MZ107", {"reason": error.message}, error.remedy)
        return
    held = {role: index.entries[names[role]] for role in ("embedding", "lm_head") if names[role] in index.entries}
    rows = {entry.name: entry.shape[0] for entry in held.values() if len(entry.shape) == 2}
    rows |= {e.name: e.shape[0] for e in subject.copies if len(e.shape) == 2}
    declared = index.config.count("vocab_size")
    rows |= {} if declared is None else {"config.json vocab_size": declared}
    if len(set(rows.values())) > 1:
        yield Finding(
            "MZ108",
            {"rows": rows},
            "Resize the others as the one was resized, with the tool that did it; or restore them from the original.",
        )
