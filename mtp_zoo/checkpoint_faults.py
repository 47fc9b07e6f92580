"""What is wrong with a set of shards and their index, found from headers alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mtp_zoo.safetensors_header import Header

FaultKind = Literal["missing_file", "corrupt_file", "misplaced", "absent", "duplicate", "unlisted"]

REMEDIES: Mapping[FaultKind, str] = {
    "missing_file": "Complete the download or put the file back; if shards were renamed, write the index anew.",
    "corrupt_file": "Download the file again, or restore it from the original checkpoint.",
    "misplaced": "Correct the index, or take the checkpoint from its publisher again.",
    "absent": "Take the tensor from the original checkpoint, or correct the index.",
    "duplicate": "Remove one of the copies; which one an engine serves depends on the order in which it reads files.",
    "unlisted": "Add the tensors to the index.",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with a checkpoint's files.

    Attributes:
        kind: `missing_file` (listed, not there), `corrupt_file` (unreadable header), `misplaced` (the index names
            another file than the one that holds the tensor), `absent` (listed, in no file), `duplicate` (in two files),
            `unlisted` (on disk, not in the index).
        message: the whole of it in words.
        file: the file that it is about.
        tensors: names that it touches; empty where nobody can tell (an unreadable file that no index describes).
        fatal: whether the tensors it touches can't be trusted to be what an engine would read.
    """

    kind: FaultKind
    message: str
    file: str
    tensors: tuple[str, ...]
    fatal: bool

    def __str__(self) -> str:
        return self.message


def find_faults(
    weight_map: Mapping[str, str] | None,
    headers: Mapping[str, Header],
    missing: Iterable[str],
    corrupt: Mapping[str, str],
) -> tuple[Fault, ...]:
    """Compare the index with what the files hold.

    Args:
        weight_map: the index's, tensor name -> file; None where there is no index.
        headers: of every readable weight file.
        missing: weight files that are listed, or linked, and not there.
        corrupt: weight files that can't be read, and why.
    """
    held = {entry.name: file for file, header in headers.items() for entry in header.entries}
    if held == weight_map and len(held) == sum(len(header.entries) for header in headers.values()):
        return tuple(_unreadable({}, {}, missing, corrupt))  # what is listed is where the index says, once
    holders: dict[str, list[str]] = defaultdict(list)
    for file, header in headers.items():
        for entry in header.entries:
            holders[entry.name].append(file)
    claims: dict[str, list[str]] = defaultdict(list)
    for name, file in (weight_map or {}).items():
        claims[file].append(name)
    return (
        *_unreadable(claims, holders, missing, corrupt),
        *_misplaced(claims, holders, headers),
        *_duplicates(holders),
        *(_unlisted(weight_map, headers, claims) if weight_map is not None else ()),
    )


def _unreadable(
    claims: Mapping[str, Sequence[str]],
    holders: Mapping[str, Sequence[str]],
    missing: Iterable[str],
    corrupt: Mapping[str, str],
) -> Iterator[Fault]:
    missing = sorted(missing)
    for file in missing:
        names = claims.get(file, ())
        moved_to = {holder for name in names for holder in holders.get(name, ())} - claims.keys()
        if not names:
            message = f"{file}: it links to nothing; what it would hold is unknown."
        elif moved_to:
            message = (
                f"{file}: not on disk. The index is stale: it lists {missing}, which are not there, and does not list "
                f"{sorted(moved_to)}, which hold some of the {len(names)} tensors that it puts in {file}."
            )
        else:
            message = f"{file}: not on disk. The index puts {len(names)} tensors in it: {_some(names)}."
        yield Fault("missing_file", message, file, tuple(sorted(names)), fatal=True)
    for file, reason in sorted(corrupt.items()):
        names = claims.get(file, ())
        listed = f" The index puts {len(names)} tensors in it: {_some(names)}." if names else ""
        yield Fault("corrupt_file", reason + listed, file, tuple(sorted(names)), fatal=True)


def _misplaced(
    claims: Mapping[str, Sequence[str]], holders: Mapping[str, Sequence[str]], headers: Mapping[str, Header]
) -> Iterator[Fault]:
    """Names whose file is readable and does not hold them, grouped by where they really are."""
    groups: dict[tuple[str, str | None], list[str]] = defaultdict(list)
    for file in claims.keys() & headers.keys():
        for name in claims[file]:
            found = holders.get(name, ())
            if file not in found:
                groups[file, found[0] if found else None].append(name)
    for (file, actual), names in sorted(groups.items(), key=str):
        start = f"{file}: the index puts {_some(names)} in it, and it does not hold "
        pronoun = "it" if len(names) == 1 else "them"
        if actual is None:
            message = f"{start}{pronoun}; no readable file does."
            yield Fault("absent", message, file, tuple(sorted(names)), fatal=True)
        else:
            message = f"{start}{pronoun}; {actual} does."
            yield Fault("misplaced", message, file, tuple(sorted(names)), fatal=True)


def _duplicates(holders: Mapping[str, Sequence[str]]) -> Iterator[Fault]:
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, files in holders.items():
        if len(files) > 1:
            groups[tuple(files)].append(name)
    for files, names in sorted(groups.items()):
        message = f"{' and '.join(files)}: each of these files holds {_some(names)}."
        yield Fault("duplicate", message, files[-1], tuple(sorted(names)), fatal=True)


def _unlisted(
    weight_map: Mapping[str, str], headers: Mapping[str, Header], claims: Mapping[str, Sequence[str]]
) -> Iterator[Fault]:
    for file, header in sorted(headers.items()):
        names = [entry.name for entry in header.entries if entry.name not in weight_map]
        if not names:
            continue
        if file in claims:
            message = (
                f"{file}: the index leaves out {_some(names)}; readers that follow it by name will not find it all."
            )
        else:
            message = f"{file}: not listed in the index, so vLLM and SGLang will not open it; it holds {_some(names)}."
        yield Fault("unlisted", message, file, tuple(sorted(names)), fatal=False)


def _some(names: Sequence[str]) -> str:
    """The first name in order, and how many more there are."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"'{min(names)}'{more}"
