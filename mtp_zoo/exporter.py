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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mtp_zoo.checkpoint import INDEX_NAME, CheckpointIndex, TensorReader, torch_dtype
from mtp_zoo.errors import ExportError
from mtp_zoo.export_check import check_output
from mtp_zoo.export_form import head_form, quantized_base
from mtp_zoo.export_plan import PROVENANCE_NAME, ExportPlan, ShardPlan, plan_export
from mtp_zoo.index_file import encode_index
from mtp_zoo.keymap import native_tensors
from mtp_zoo.loader import key_map
from mtp_zoo.modelconfig import ModelConfig
from mtp_zoo.overlay import Overlay, refuse_existing, staging
from mtp_zoo.parallel import is_sharded
from mtp_zoo.progress import progress
from mtp_zoo.provenance import provenance, refuse_unprintable
from mtp_zoo.quantized_tensors import encoded_like
from mtp_zoo.registry import Family
from mtp_zoo.site import HeadSite, find_site

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
        tensors_cast: head tensors that were stored as floats of another dtype than they have in memory.
        tensors_encoded: head tensors that were stored as FP8, encoded anew because they were changed.
        tensors_kept: head tensors that were stored as FP8 in the base's own bytes, because they were not.
        notices: what the reader has to know before the checkpoint is served, in words.
    """

    out: Path
    files_linked: int
    files_copied: int
    files_rewritten: int
    files_written: int
    bytes_written: int
    head_bytes: int
    tensors_cast: int
    tensors_encoded: int
    tensors_kept: int
    notices: tuple[str, ...]


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

    Where the base stores a tensor of its head as FP8, so does the export, in the base's scheme and with its scale's dtype; a
    tensor that was not changed since it was loaded gets the base's own bytes, weight and scale. What the family's spec calls
    `always_float` is never encoded. Where the base is quantised and the head, or a part of it, is stored as floats, the
    quantisation config and the side files that repeat it are completed, so that both engines leave those modules alone.

    The base is never touched. `.git`, `.cache` and pickled weights (`pytorch_model*.bin`) stay behind.

    Args:
        head: from `load_head`.
        base: checkpoint directory, hub-cache tree, or id of a cached repository; whole.
        out: directory to make; must not exist.
        copy: copy weight files instead of hard-linking them.
        dtype: store the head as floats like this, all but what must not be rounded (`DraftHead.rounds`); None keeps, tensor
            by tensor, what the base or, where the base lacks the tensor, the checkpoint of the head stores. A head that was
            loaded from FP8 counts as BF16 where the base lacks one.
        training: what `mtp_zoo.json` shall say of the training; must be JSON.

    Raises:
        CheckpointError: the base is not whole.
        UnsupportedQuantizationError: the base stores its head quantised, not as FP8, and no `dtype` is given.
        ScaleMismatchError: the base stores its head as FP8, and tensors and scales do not belong together.
        OutputExistsError: `out` exists.
        ExportError: the head is sharded (`gather_head`), does not fit the base, a number of it can't be encoded, `out` and
            the base overlap, or writing failed.
        VerificationError: what was written is not what was meant.
        In each case there is no `out` afterwards, and the base is as it was.
    """
    _refuse_sharded(head)
    return export_weights(head, head.state_dict(), base, out, copy=copy, dtype=dtype, training=training)


def export_weights(
    head: DraftHead,
    weights: Mapping[str, torch.Tensor],
    base: str | Path,
    out: str | Path,
    *,
    copy: bool = False,
    dtype: torch.dtype | None = None,
    training: Mapping[str, Any] | None = None,
) -> ExportReport:
    """`export` with the numbers taken from `weights`; of `head`, only shapes and dtypes are looked at.

    Args:
        head: says what is exported; its tensors may be sharded or on the meta device.
        weights: canonical name -> whole tensor, asked for while the head's shard is written: names come in the order of the
            plan, and each may be asked for more than once.
        base, out, copy, dtype, training: see `export`.

    Raises:
        see `export`.
    """
    out = _plain_path(out)
    index = CheckpointIndex.open(base)
    check_export(index, out, head.family, dtype=dtype)
    site = find_site(head.family, index.names, index.config)
    _refuse_misfit(head, site, index)
    bindings = key_map(head, site).layout(filter(site.in_scope, index.entries), like=head.origin.bindings)
    facts = {
        "base": {"source": index.source, "path": str(index.root.absolute()), "revision": index.revision},
        "training": training,
    }
    refuse_unprintable(facts)
    form = head_form(head, bindings, index, quantized_base(index, site, dtype), dtype)
    plan = plan_export(index, site, bindings, form)
    written = _Written()
    try:
        with staging(out) as partial:
            overlay = Overlay(partial, link=not copy)
            _fill(overlay, plan, weights, index, written)
            _write_texts(overlay, plan, head, index.config, provenance(plan, head, written.digests, facts))
            check_output(partial, plan, index, site, head.num_depths, written.digests)
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
        tensors_encoded=len(plan.form.quantized) - len(written.kept),
        tensors_kept=len(written.kept),
        notices=(*plan.patch.notices, *_grafted(head, index)),
    )


@dataclass
class _Written:
    """What was written of the head: the sha256 of each tensor, and the names of those that kept the base's FP8 bytes."""

    digests: dict[str, str] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)


def check_export(index: CheckpointIndex, out: str | Path, family: Family, *, dtype: torch.dtype | None = None) -> None:
    """Refuse what `export` would refuse whatever the head; for those who want to know before they train.

    Raises:
        CheckpointError, UnsupportedQuantizationError, ScaleMismatchError, OutputExistsError, ExportError: see `export`.
    """
    out = _plain_path(out)
    index.require_local("Exporting into")
    index.verify()
    _refuse_overlap(out, index.root)
    refuse_existing(out)
    quantized_base(index, find_site(family, index.names, index.config), dtype)


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


def _refuse_sharded(head: DraftHead) -> None:
    sharded = [name for name, value in head.weights().items() if is_sharded(value)]
    if sharded:
        raise ExportError(
            f"Exporting the {head.family.name} head: {len(sharded)} tensors are sharded over ranks, '{sharded[0]}' first.",
            remedy="Call mtp_zoo.gather_head(head) on all ranks, and export what rank 0 gets.",
        )


def _refuse_misfit(head: DraftHead, site: HeadSite, index: CheckpointIndex) -> None:
    problems = misfits(head, site, index)
    if problems:
        raise ExportError(
            f"Exporting a {head.family.name} head into {index.root}: it was made for another model.",
            remedy="Export into the model that the head was trained with.",
            problems=problems,
        )


def misfits(head: DraftHead, site: HeadSite, index: CheckpointIndex) -> list[str]:
    """What of a head, by name and shape, is not what the config of `index` asks for; the head may be on the meta device."""
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
    return problems


def _grafted(head: DraftHead, index: CheckpointIndex) -> list[str]:
    """What to know where a head was put on a trunk that it was not loaded with."""
    if head.origin.root.resolve() == index.root.resolve():
        return []
    return [
        f"the head was loaded from {head.origin.root}, the trunk from {index.root}: where they were not trained together, "
        "measure acceptance (mtp-zoo eval) before serving, and train the head on where it fell"
    ]


def _stored_tensors(
    plan: ExportPlan, weights: Mapping[str, torch.Tensor], index: CheckpointIndex, kept: set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors as they are stored, in the order of the plan; `kept` gets the names of those in the base's own bytes."""
    reader = TensorReader(index)
    dtypes = {tensor.name: torch_dtype(tensor.dtype) for tensor in plan.head}
    for name, native in native_tensors(plan.bindings, weights):
        value = native.cpu()
        base = plan.form.quantized.get(name)
        if base is None:
            yield name, value.to(dtypes[name])
            continue
        encoded = encoded_like(value, base, reader)
        kept |= {name} if encoded.kept else set()
        yield name, encoded.weight
        yield base.scale.name, encoded.scale


def _casts(plan: ExportPlan, head: DraftHead) -> int:
    weights = head.state_dict()
    stored = {tensor.name: torch_dtype(tensor.dtype) for tensor in plan.head}
    moves = [move for binding in plan.bindings for move in binding.moves if move.native not in plan.form.quantized]
    return len({move.native for move in moves if weights[move.head].dtype != stored[move.native]})


def _fill(
    overlay: Overlay,
    plan: ExportPlan,
    weights: Mapping[str, torch.Tensor],
    index: CheckpointIndex,
    written: _Written,
) -> None:
    """Everything but the small texts."""
    reader = TensorReader(index)
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
        stored = _stored_tensors(plan, weights, index, written.kept)
        overlay.write(plan.head_file, _head_bytes(plan, stored, written.digests, advance))


def _shorter(shard: ShardPlan, reader: TensorReader) -> Iterator[bytes]:
    yield shard.header
    for entry in shard.entries:
        yield from reader.raw(entry)


def _head_bytes(
    plan: ExportPlan,
    stored: Iterator[tuple[str, torch.Tensor]],
    digests: dict[str, str],
    advance: Callable[[], None],
) -> Iterator[bytes | memoryview]:
    yield plan.head_header
    for name, value in stored:
        raw = value.reshape(-1).view(torch.uint8).numpy().data
        digests[name] = hashlib.sha256(raw).hexdigest()
        yield raw
        advance()


def _write_texts(overlay: Overlay, plan: ExportPlan, head: DraftHead, config: ModelConfig, history: str) -> None:
    declared, patch = head.family.count_field, plan.patch
    counted = declared is None or config.count(declared) == head.num_depths
    if counted and patch.config is None:
        overlay.copy(config.path, "config.json")
    else:
        patched = config if patch.config is None else ModelConfig(patch.config, config.path)
        whole = patched.raw if counted or declared is None else patched.with_value(declared, head.num_depths)
        overlay.write("config.json", [_json(whole)])
    for name, content in patch.files.items():
        overlay.write(name, [_json(content)])
    overlay.write(INDEX_NAME, [encode_index(plan.weight_map, {"total_size": plan.total_size}).encode()])
    overlay.write(PROVENANCE_NAME, [history.encode()])


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _failed(out: Path, error: OSError) -> ExportError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    where = f" ({error.filename})" if error.filename else ""
    return ExportError(
        f"Writing {out}: {error.strerror or error}{where}. What was written so far is removed.",
        remedy="Free disk space, or choose another disk."
        if full
        else "Mend the named file or path, then export again.",
    )
