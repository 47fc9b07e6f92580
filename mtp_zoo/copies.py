"""Copies of the target's embedding and lm_head inside a head: left alone by a load, and compared with what they repeat."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mtp_zoo.checkpoint import CheckpointIndex, TensorEntry, TensorReader
from mtp_zoo.errors import SharedTensorError
from mtp_zoo.rules import Skip, any_pattern
from mtp_zoo.shared import shared_names
from mtp_zoo.site import HeadSite
from mtp_zoo.storage import ByteRange

SAMPLE = 1 << 20
"""Bytes of a copy that are compared where not all of it is: a load must not read gigabytes for what it leaves alone."""

PIECES = 16
"""Parts of a sample, spread evenly over the tensor, the last at its end."""


@dataclass(frozen=True)
class Comparison:
    """A copy beside the tensor that it repeats.

    Attributes:
        of: name of the target's tensor, or None where it is not in this checkpoint.
        equal: whether all bytes that were compared are the same.
        compared, total: bytes compared, and bytes of the copy.
    """

    of: str | None
    equal: bool
    compared: int
    total: int

    def __str__(self) -> str:
        if self.of is None:
            return "there is nothing here to compare it with"
        if not self.equal:
            return f"DIFFERS from '{self.of}'"
        share = "" if self.compared == self.total else f" in the {self.compared:,} of {self.total:,} bytes compared"
        return f"equals '{self.of}'{share}"


def compare_copies(
    index: CheckpointIndex, site: HeadSite, skipped: Iterable[str], reader: TensorReader, *, whole: bool = False
) -> dict[str, Comparison]:
    """Compare every skipped copy with the target's own tensor.

    Args:
        index: the checkpoint.
        site: where its head lies.
        skipped: native names that the load left alone.
        reader: what reads, and counts the bytes.
        whole: compare all bytes, and not a sample of large tensors.
    """
    rules = [rule for rule in site.family.rules if isinstance(rule, Skip) and rule.copy_of]
    try:
        names = shared_names(index, site.family)
    except SharedTensorError:
        names = {}
    found: dict[str, Comparison] = {}
    for name in skipped:
        roles = [rule.copy_of for rule in rules if any_pattern(rule.native).fullmatch(name)]
        if roles and roles[0]:
            original = index.entries.get(names.get(roles[0], ""))
            found[name] = _compare(index, index.entries[name], original, reader, whole)
    return found


def _compare(
    index: CheckpointIndex, copy: TensorEntry, original: TensorEntry | None, reader: TensorReader, whole: bool
) -> Comparison:
    if original is None:
        return Comparison(None, False, 0, copy.nbytes)
    if (copy.dtype, copy.shape) != (original.dtype, original.shape):
        return Comparison(original.name, False, 0, copy.nbytes)
    parts = list(_parts(copy.nbytes, whole))
    index.storage.fetch(
        ByteRange(entry.file, entry.start + s, entry.start + e) for entry in (copy, original) for s, e in parts
    )
    equal = all(
        all(
            a == b
            for a, b in zip(reader.raw(copy, start=s, stop=e), reader.raw(original, start=s, stop=e), strict=True)
        )
        for s, e in parts
    )
    return Comparison(original.name, equal, sum(stop - start for start, stop in parts), copy.nbytes)


def _parts(nbytes: int, whole: bool) -> Iterator[tuple[int, int]]:
    """Byte ranges to compare."""
    if whole or nbytes <= SAMPLE:
        yield 0, nbytes
        return
    size = SAMPLE // PIECES
    for piece in range(PIECES):
        start = (nbytes - size) * piece // (PIECES - 1)
        yield start, start + size
