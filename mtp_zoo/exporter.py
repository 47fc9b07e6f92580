"""export: a complete, servable checkpoint out of a base and a head, for the price of the head's bytes.

    base (headers) -> plan -> staging directory: links, shorter shards, the head's shard, index, config, provenance
      -> opened again and compared with the base and with what was meant -> renamed into place

Both vLLM and SGLang use the index to choose files and then take every tensor in each of them, so a second copy of a
head tensor could be the one that is served: the base's own head is left out of every file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mtp_zoo.checkpoint import INDEX_NAME, CheckpointIndex, TensorReader, stored_dtype, torch_dtype
from mtp_zoo.errors import ExportError, UnsupportedQuantizationError
from mtp_zoo.export_check import check_output
from mtp_zoo.export_plan import PROVENANCE_NAME, ExportPlan, HeadTensor, ShardPlan, plan_export
from mtp_zoo.index_file import encode_index
from mtp_zoo.keymap import FLOAT_DTYPES, Binding, to_native
from mtp_zoo.loader import key_map
from mtp_zoo.modelconfig import ModelConfig
from mtp_zoo.overlay import Overlay, refuse_existing, staging
from mtp_zoo.progress import progress
from mtp_zoo.quantization import scheme_name
from mtp_zoo.registry import Family
from mtp_zoo.site import HeadSite, find_site
from mtp_zoo.version import __version__

if TYPE_CHECKING:
    from mtp_zoo.head import DraftHead


@dataclass(frozen=True)
class ExportReport:
    """What an export did.

    Attributes:
        out: the new checkpoint.
        files_linked: weight files that are hard links to the base's.
        files_copied: files copied whole: everything that is no weight, and weights where links are not possible.
        files_rewritten: weight files copied without the base's head.
        files_written: new files: the head's shard, the index, the provenance, and config.json where it changed.
        bytes_written: bytes put on the disk by all of these.
        head_bytes: stored size of the head.
        tensors_cast: head tensors that were stored in another dtype than they have in memory.
    """

    out: Path
    files_linked: int
    files_copied: int
    files_rewritten: int
    files_written: int
    bytes_written: int
    head_bytes: int
    tensors_cast: int


def export(
    head: DraftHead,
    base: str | Path,
    out: str | Path,
    *,
    copy: bool = False,
    dtype: torch.dtype | None = None,
    training: Mapping[str, Any] | None = None,
) -> ExportReport:
    """Write `base` with `head` in place of its own head, if it has one, as a new checkpoint.

    The head takes the base's stored form: its layer numbers, and experts one by one or packed. Copies of the target's
    embedding and lm_head inside the base's head stay as they are; where there are none, none are made.
    The base is never touched. `.git`, `.cache` and pickled weights (`pytorch_model*.bin`) stay behind.

    Args:
        head: from `load_head`.
        base: checkpoint directory, hub-cache tree, or id of a cached repository; whole.
        out: directory to make; must not exist.
        copy: copy weight files instead of hard-linking them.
        dtype: store the head's float tensors like this, all but those that must not be rounded (`DraftHead.rounds`); None
            keeps, tensor by tensor, what the base or, where the base lacks the tensor, the checkpoint of the head stores.
        training: what `mtp_zoo.json` shall say of the training; must be JSON.

    Raises:
        CheckpointError: the base is not whole.
        UnsupportedQuantizationError: the base stores its head quantised.
        OutputExistsError: `out` exists.
        ExportError: the head does not fit the base, `out` and the base overlap, or writing failed.
        VerificationError: what was written is not what was meant.
        In each case there is no `out` afterwards, and the base is as it was.
    """
    out = _plain_path(out)
    index = CheckpointIndex.open(base)
    check_export(index, out, head.family)
    site = find_site(head.family, index.names, index.config)
    _refuse_misfit(head, site, index)
    bindings = key_map(head, site).layout(filter(site.in_scope, index.entries), like=head.origin.bindings)
    facts = {
        "base": {"source": index.source, "path": str(index.root.absolute()), "revision": index.revision},
        "training": training,
    }
    _refuse_unprintable(facts)
    plan = plan_export(index, site, bindings, _stored_form(head, bindings, index, dtype))
    try:
        with staging(out) as partial:
            overlay = Overlay(partial, link=not copy)
            digests = _fill(overlay, plan, head, index)
            _write_texts(overlay, plan, head, index.config, _provenance(plan, head, digests, facts))
            check_output(partial, plan, index, site, head.num_depths, digests)
    except OSError as error:
        raise _failed(out, error) from error
    return ExportReport(
        out=out,
        files_linked=overlay.linked,
        files_copied=overlay.copied,
        files_rewritten=overlay.rewritten,
        files_written=overlay.written,
        bytes_written=overlay.bytes_written,
        head_bytes=sum(tensor.nbytes for tensor in plan.head),
        tensors_cast=_casts(plan, head),
    )


def check_export(index: CheckpointIndex, out: str | Path, family: Family) -> None:
    """Refuse what `export` would refuse whatever the head; for those who want to know before they train.

    Raises:
        CheckpointError, UnsupportedQuantizationError, OutputExistsError, ExportError: see `export`.
    """
    out = _plain_path(out)
    index.verify()
    _refuse_overlap(out, index.root)
    refuse_existing(out)
    _refuse_quantized(index, find_site(family, index.names, index.config))


def _plain_path(out: str | Path) -> Path:
    """Absolute and without `..`, so that no folder is made on the way."""
    return Path(os.path.abspath(Path(out).expanduser()))


def _refuse_overlap(out: Path, root: Path) -> None:
    base, goal = root.resolve(), out.resolve()
    if goal == base or goal.is_relative_to(base) or base.is_relative_to(goal):
        raise ExportError(
            f"Writing {out}: it and the base {root} are the same place, or one lies inside the other.",
            remedy="Choose a path beside the base.",
        )


def _refuse_quantized(index: CheckpointIndex, site: HeadSite) -> None:
    old = [entry for name, entry in index.entries.items() if site.in_scope(name)]
    quantized = [entry for entry in old if entry.dtype not in FLOAT_DTYPES]
    declared = index.config.raw.get("quantization_config") or index.config.text.get("quantization_config")
    if quantized or (declared and not old):
        state = "its own head is quantised" if quantized else "it has no head of its own that shows how to store one"
        raise UnsupportedQuantizationError(
            f"Exporting into {index.root}: the base is stored as {scheme_name(index.config)}, and {state}.",
            remedy="Export into the BF16 release of the same model.",
            problems=[f"{entry.name}: {entry.dtype} {list(entry.shape)}" for entry in quantized],
        )


def _refuse_misfit(head: DraftHead, site: HeadSite, index: CheckpointIndex) -> None:
    """Every head tensor must have the shape that the base's config asks for."""
    fitting = type(head)(head.family, index.config, depths=head.num_depths, first_layer=site.first_layer, device="meta")
    expected = fitting.state_dict()
    found = head.state_dict()
    problems = [
        f"{name}: the base needs {list(expected[name].shape)}, the head has {list(found[name].shape)}"
        for name in sorted(expected.keys() & found.keys())
        if expected[name].shape != found[name].shape
    ]
    problems += [f"{name}: only in the head" for name in sorted(found.keys() - expected.keys())]
    problems += [f"{name}: only in a head for the base" for name in sorted(expected.keys() - found.keys())]
    if problems:
        raise ExportError(
            f"Exporting a {head.family.name} head into {index.root}: it was made for another model.",
            remedy="Export into the model that the head was trained with.",
            problems=problems,
        )


def _refuse_unprintable(facts: Mapping[str, Any]) -> None:
    try:
        json.dumps(facts, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ExportError(
            f"Writing {PROVENANCE_NAME}: the training summary is not JSON ({error}).",
            remedy="Pass numbers, strings, lists and tables only.",
        ) from error


def _stored_form(
    head: DraftHead, bindings: Sequence[Binding], index: CheckpointIndex, dtype: torch.dtype | None
) -> Iterator[HeadTensor]:
    """The head's native tensors in the order in which they will be stored."""
    if dtype is not None and stored_dtype(dtype) not in FLOAT_DTYPES:
        raise ExportError(
            f"Exporting as {dtype}: expected one of {FLOAT_DTYPES}.", remedy="Name a float dtype, or none."
        )
    for binding in bindings:
        part = next(iter(binding.heads))
        for name, shape in binding.natives.items():
            own = index.entries.get(name)
            found = own.dtype if own else head.origin.dtypes[part]
            stored = stored_dtype(dtype) if dtype and head.rounds(part) else found
            yield HeadTensor(name, stored, shape, torch_dtype(stored).itemsize * torch.Size(shape).numel())


def _native_tensors(plan: ExportPlan, head: DraftHead) -> Iterator[tuple[HeadTensor, torch.Tensor]]:
    """The native tensors one rule at a time, on the CPU, in the head's own dtypes."""
    weights = head.state_dict()
    planned = {tensor.name: tensor for tensor in plan.head}
    for binding in plan.bindings:
        natives = to_native([binding], weights)
        for name in binding.natives:
            yield planned[name], natives.pop(name).cpu()


def _casts(plan: ExportPlan, head: DraftHead) -> int:
    weights = head.state_dict()
    stored = {tensor.name: torch_dtype(tensor.dtype) for tensor in plan.head}
    moves = [move for binding in plan.bindings for move in binding.moves]
    return len({move.native for move in moves if weights[move.head].dtype != stored[move.native]})


def _fill(overlay: Overlay, plan: ExportPlan, head: DraftHead, index: CheckpointIndex) -> dict[str, str]:
    """Everything but the small texts; returns the sha256 of each head tensor."""
    reader = TensorReader(index)
    digests: dict[str, str] = {}
    with progress("Writing the checkpoint", total=len(plan.shards) + len(plan.others) + len(plan.head)) as advance:
        for shard in plan.shards:
            if shard.action == "link":
                overlay.link(index.root / shard.source, shard.name)
            else:
                overlay.rewrite(shard.name, _shorter(shard, reader))
            advance()
        for path in plan.others:
            overlay.copy(index.root / path, path)
            advance()
        overlay.write(plan.head_file, _head_bytes(plan, head, digests, advance))
    return digests


def _shorter(shard: ShardPlan, reader: TensorReader) -> Iterator[bytes]:
    yield shard.header
    for entry in shard.entries:
        yield from reader.raw(entry)


def _head_bytes(
    plan: ExportPlan, head: DraftHead, digests: dict[str, str], advance: Callable[[], None]
) -> Iterator[bytes | memoryview]:
    yield plan.head_header
    for tensor, value in _native_tensors(plan, head):
        raw = value.to(torch_dtype(tensor.dtype)).reshape(-1).view(torch.uint8).numpy().data
        digests[tensor.name] = hashlib.sha256(raw).hexdigest()
        yield raw
        advance()


def _write_texts(overlay: Overlay, plan: ExportPlan, head: DraftHead, config: ModelConfig, provenance: str) -> None:
    field = head.family.count_field
    if field is None or config.count(field) == head.num_depths:
        overlay.copy(config.path, "config.json")
    else:
        patched = config.with_value(field, head.num_depths)
        overlay.write("config.json", [(json.dumps(patched, indent=2, ensure_ascii=False) + "\n").encode()])
    overlay.write(INDEX_NAME, [encode_index(plan.weight_map, {"total_size": plan.total_size}).encode()])
    overlay.write(PROVENANCE_NAME, [provenance.encode()])


def _provenance(plan: ExportPlan, head: DraftHead, digests: Mapping[str, str], facts: Mapping[str, Any]) -> str:
    content = {
        "mtp_zoo": __version__,
        "family": head.family.name,
        "depths": head.num_depths,
        "head_bytes": sum(tensor.nbytes for tensor in plan.head),
        **facts,
        "tensors": {
            tensor.name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "sha256": digests[tensor.name]}
            for tensor in plan.head
        },
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _failed(out: Path, error: OSError) -> ExportError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    where = f" ({error.filename})" if error.filename else ""
    return ExportError(
        f"Writing {out}: {error.strerror or error}{where}. What was written so far is removed.",
        remedy="Free disk space, or choose another disk."
        if full
        else "Mend the named file or path, then export again.",
    )
