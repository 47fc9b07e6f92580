"""Whether an exported checkpoint is what was meant: opened anew and compared byte for byte, before it is published."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from mtp_zoo.checkpoint import CheckpointIndex, TensorEntry, TensorReader
from mtp_zoo.errors import CheckpointError, VerificationError
from mtp_zoo.export_plan import ExportPlan
from mtp_zoo.progress import progress_bytes
from mtp_zoo.quant_ignore import HeadModules, quantized_by
from mtp_zoo.quantization import quantization_settings
from mtp_zoo.site import HeadSite


def check_output(
    root: Path,
    plan: ExportPlan,
    base: CheckpointIndex,
    site: HeadSite,
    depths: int,
    digests: Mapping[str, str],
    shared: Collection[str] = (),
) -> None:
    """Compare the checkpoint in `root` with its plan.

    Args:
        root: the directory that was written.
        plan: what was meant.
        base: what it was made from.
        site: where the base's head lies.
        depths: of the head.
        digests: sha256 of each stored tensor of the head.
        shared: files that have their bytes in common with the base's, which need not be read.

    Raises:
        VerificationError: with every difference: names, bytes of the head, bytes of the rest, declared depths, and what
            the config and its side files say of quantisation.
    """
    try:
        written = CheckpointIndex.open(root)
        written.verify()
    except CheckpointError as error:
        raise _failed([error.message, *error.problems]) from error
    problems = [
        *_names(written, plan),
        *_head(written, plan, digests),
        *_trunk(written, plan, base, shared),
        *_depths(written, site, depths),
        *_described(written, plan, site),
    ]
    if problems:
        raise _failed(problems)


def _failed(problems: Sequence[object]) -> VerificationError:
    return VerificationError(
        f"Checking the written checkpoint: {len(problems)} differences from what was meant; it is removed.",
        remedy="Check the disk, and that nothing else writes to the base; then export again.",
        problems=problems,
    )


def _names(written: CheckpointIndex, plan: ExportPlan) -> Iterator[str]:
    meant = {entry.name for shard in plan.shards for entry in shard.entries} | {tensor.name for tensor in plan.head}
    yield from (f"'{name}' is missing" for name in sorted(meant - written.entries.keys()))
    yield from (f"'{name}' should not be there" for name in sorted(written.entries.keys() - meant))
    if written.weight_map != plan.weight_map:
        yield "the index differs from the plan"


def _head(written: CheckpointIndex, plan: ExportPlan, digests: Mapping[str, str]) -> Iterator[str]:
    reader = TensorReader(written)
    for tensor in plan.head:
        entry = written.entries.get(tensor.name)
        if entry is None:
            continue
        digest = hashlib.sha256()
        for piece in reader.raw(entry):
            digest.update(piece)
        if (entry.dtype, entry.shape, digest.hexdigest()) != (tensor.dtype, tensor.shape, digests[tensor.name]):
            yield f"'{tensor.name}' differs from the head's"


def _trunk(written: CheckpointIndex, plan: ExportPlan, base: CheckpointIndex, shared: Collection[str]) -> Iterator[str]:
    """Tensors of the base must be the base's."""
    ours, theirs = TensorReader(written), TensorReader(base)
    copied = [shard for shard in plan.shards if shard.name not in shared]
    total = sum(entry.nbytes for shard in copied for entry in shard.entries)
    with progress_bytes("Comparing with the base", total=total) as advance:
        for entry in (entry for shard in copied for entry in shard.entries):
            found = written.entries.get(entry.name)
            if found is not None and not _same(ours, found, theirs, entry):
                yield f"'{entry.name}' differs from the base's"
            advance(entry.nbytes)


def _same(ours: TensorReader, copied: TensorEntry, theirs: TensorReader, entry: TensorEntry) -> bool:
    if (copied.dtype, copied.shape) != (entry.dtype, entry.shape):
        return False
    return all(left == right for left, right in zip(ours.raw(copied), theirs.raw(entry), strict=True))


def _depths(written: CheckpointIndex, site: HeadSite, depths: int) -> Iterator[str]:
    field = site.family.count_field
    found = site.depths_on_disk(site.inside(written.entries))
    declared = written.config.count(field) if field else found
    if not declared == found == depths:
        yield f"config.json declares {declared} depths, the files hold {found}, the head has {depths}"


def _described(written: CheckpointIndex, plan: ExportPlan, site: HeadSite) -> Iterator[str]:
    """Float modules of the head must be left alone by every engine that can be told so, and side files be as meant."""
    modules = HeadModules.of(site, plan.form.floats.items(), whole=not plan.form.quantized)
    for engine, names in quantized_by(quantization_settings(written.config), modules, strict=True).items():
        lost = sorted(set(names) - set(plan.patch.unheard.get(engine, ())))
        yield from (f"config.json has {engine} build '{name}' quantised" for name in lost)
    for name, content in plan.patch.files.items():
        try:
            same = json.loads((written.root / name).read_text(encoding="utf-8")) == content
        except (OSError, ValueError):
            same = False
        if not same:
            yield f"{name} differs from what was meant"
