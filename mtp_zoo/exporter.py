"""export: a complete, servable checkpoint out of a base and a head, for the price of the head's bytes.

    base (headers) -> plan (`Job`) -> staging directory: links, shorter shards, the head's shard, index, config, provenance
      -> opened again and compared with the base and with what was meant -> renamed into place, or moved in file by file

Both vLLM and SGLang use the index to choose files and then take every tensor in each of them, so a second copy of a
head tensor could be the one that is served: the base's own head is left out of every file.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mtp_zoo.arguments import FLAG, FLOAT_DTYPE, MAPPING, PATH, checked, having, optional
from mtp_zoo.checkpoint import CheckpointIndex, torch_dtype
from mtp_zoo.errors import ExportError
from mtp_zoo.export_changes import kept_wider
from mtp_zoo.export_check import check_output
from mtp_zoo.export_form import head_form, quantized_base
from mtp_zoo.export_plan import ExportPlan, plan_export
from mtp_zoo.export_write import texts, write_files, write_texts
from mtp_zoo.journal import owned, updating
from mtp_zoo.loader import key_map
from mtp_zoo.overlay import Overlay, refuse_existing, staging
from mtp_zoo.progress import progress_bytes
from mtp_zoo.provenance import refuse_unprintable
from mtp_zoo.registry import Family
from mtp_zoo.sharded_export import on_first_rank
from mtp_zoo.site import HeadSite, find_site, likely_site

if TYPE_CHECKING:
    from mtp_zoo.head import DraftHead


REMEDIES = {
    errno.ENOSPC: "Free disk space, or choose another disk.",
    errno.EDQUOT: "Free disk space of yours, or choose a disk without a quota.",
    errno.EFBIG: "Raise the limit on the size of files (`ulimit -f`), or choose another file system.",
    errno.EROFS: "Choose a path on a disk that can be written.",
    errno.EACCES: "Choose a path where you may write.",
}


@dataclass(frozen=True)
class ExportReport:
    """What an export did.

    Attributes:
        out: the new checkpoint.
        files_linked: weight files that are hard links to the base's; in place, those that stay as they are.
        files_cloned: weight files that share the base's blocks until one of the two is written to (reflinks).
        files_copied: files copied whole: everything that is no weight, and weights where links are not possible.
        files_rewritten: weight files copied without the base's head.
        files_written: new files: the head's shard, the index, the provenance, and config.json where it changed.
        bytes_written: bytes put on the disk by all of these.
        head_bytes: stored size of the head.
        tensors_cast: head tensors that were stored as floats of another dtype than they have in memory.
        tensors_encoded: head tensors that were stored as FP8, encoded anew because they were changed.
        tensors_kept: head tensors that were stored as FP8 in the base's own bytes, because they were not.
        tensors_unchanged: stored tensors of the head, scales included, that the base has with the same bytes.
        tensors_changed: those that it has with others, or in another form.
        notices: what the reader has to know before the checkpoint is served, in words.
    """

    out: Path
    files_linked: int
    files_cloned: int
    files_copied: int
    files_rewritten: int
    files_written: int
    bytes_written: int
    head_bytes: int
    tensors_cast: int
    tensors_encoded: int
    tensors_kept: int
    tensors_unchanged: int
    tensors_changed: int
    notices: tuple[str, ...]

    def __str__(self) -> str:
        counts = {name: value for name, value in asdict(self).items() if name != "notices"}
        lines = [
            f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}" for name, value in counts.items()
        ]
        if self.tensors_unchanged and not self.tensors_changed:
            lines.append("the head is the base's own, bit for bit: nothing was trained, or rounding took it back")
        return "\n".join([*lines, *(f"notice: {notice}" for notice in self.notices)])


@checked(
    "Exporting a head",
    error=ExportError,
    head=having("a DraftHead", "family", "weights", "rounds"),
    base=PATH,
    out=optional(PATH),
    in_place=FLAG,
    copy=FLAG,
    dtype=optional(FLOAT_DTYPE),
    training=optional(MAPPING),
    force=FLAG,
)
def export(
    head: DraftHead,
    base: str | Path,
    out: str | Path | None = None,
    *,
    in_place: bool = False,
    copy: bool = False,
    dtype: torch.dtype | None = None,
    training: Mapping[str, Any] | None = None,
    force: bool = False,
) -> ExportReport:
    """Write `base` with `head` in place of its own head, if it has one, as a new checkpoint.

    The head takes the base's stored form: its layer numbers, and experts one by one or packed. Copies of the target's
    embedding and lm_head inside the base's head stay as they are; where there are none, none are made.

    Where the base stores a tensor of its head as FP8, so does the export, in the base's scheme and with its scale's dtype; a
    tensor that was not changed since it was loaded gets the base's own bytes, weight and scale. What the family's spec calls
    `always_float` is never encoded. Where the base is quantised and the head, or a part of it, is stored as floats, the
    quantisation config and the side files that repeat it are completed, so that both engines leave those modules alone.

    The base is never touched, unless `in_place` is asked for. `.git`, `.cache` and pickled weights (`pytorch_model*.bin`) stay
    behind.

    Args:
        head: from `load_head`. One that is sharded over ranks is exported by all of them together; the first one writes, and
            holds one whole tensor at a time.
        base: checkpoint directory, hub-cache tree, or id of a cached repository; whole.
        out: directory to make; must not exist.
        in_place: write into the base's own directory instead. The new files are built and checked there before the first old
            one moves; the old ones are kept until `rollback` brings them back or the next update in place succeeds.
        copy: copy weight files instead of hard-linking them.
        dtype: store the head as floats like this, all but what must not be rounded (`DraftHead.rounds`); None keeps, tensor
            by tensor, what the base or, where the base lacks the tensor, the checkpoint of the head stores. A head that was
            loaded from FP8 counts as BF16 where the base lacks one.
        training: what `mtp_zoo.json` shall say of the training; must be JSON.
        force: export a head that holds a NaN or an infinity, too; the report's notices name its tensors.

    Raises:
        CheckpointError: the base is not whole.
        UnsupportedQuantizationError: the base stores its head quantised, not as FP8, and no `dtype` is given.
        ScaleMismatchError: the base stores its head as FP8, and tensors and scales do not belong together.
        OutputExistsError: `out` exists.
        ExportError: the head does not fit the base, a number of it can't be encoded, `out` and the base overlap, the base
            lies in a hub cache and can't be updated in place, or writing failed.
        ParallelError: the head is sharded in other ways than `shard_head` does, or a rank ended.
        VerificationError: what was written is not what was meant.
        In each case there is no `out` afterwards, and the base is as it was.
    """

    def write(weights: Mapping[str, torch.Tensor]) -> ExportReport:
        return export_weights(
            head, weights, base, out, in_place=in_place, copy=copy, dtype=dtype, training=training, force=force
        )

    return on_first_rank(head, f"Exporting the {head.family.name} head", write)


def export_weights(
    head: DraftHead,
    weights: Mapping[str, torch.Tensor],
    base: str | Path,
    out: str | Path | None = None,
    *,
    in_place: bool = False,
    copy: bool = False,
    dtype: torch.dtype | None = None,
    training: Mapping[str, Any] | None = None,
    force: bool = False,
) -> ExportReport:
    """`export` with the numbers taken from `weights`; of `head`, only shapes and dtypes are looked at.

    Args:
        head: says what is exported; its tensors may be sharded or on the meta device.
        weights: canonical name -> whole tensor, asked for while the head's shard is written: names come in the order of the
            plan, and each may be asked for more than once.
        base, out, in_place, copy, dtype, training, force: see `export`.

    Raises:
        see `export`.
    """
    if in_place:
        with owned(own_directory(base)):
            job = prepare(head, base, out, in_place=True, copy=copy, dtype=dtype, training=training)
            return _write(job, head, weights, force=force)
    job = prepare(head, base, out, copy=copy, dtype=dtype, training=training)
    return _write(job, head, weights, force=force)


@dataclass(frozen=True)
class Job:
    """An export that nothing stands against; all is decided and nothing written.

    Attributes:
        index, site: the base, and where its head lies.
        plan: the files.
        out: the goal, which is the base's own root in place.
        in_place, copy: as asked for.
        facts: what the provenance says besides the head.
        wider: head tensors that must not be rounded, with the dtype in which they are stored instead of the one asked for.
    """

    index: CheckpointIndex
    site: HeadSite
    plan: ExportPlan
    out: Path
    in_place: bool
    copy: bool
    facts: Mapping[str, Any]
    wider: Mapping[str, str]

    @property
    def gone(self) -> set[str]:
        """Weight files of the base that have no successor of their name."""
        return set(self.index.files).difference((shard.name for shard in self.plan.shards), {self.plan.head_file})


def prepare(
    head: DraftHead,
    base: str | Path | CheckpointIndex,
    out: str | Path | None,
    *,
    in_place: bool = False,
    copy: bool = False,
    dtype: torch.dtype | None = None,
    training: Mapping[str, Any] | None = None,
) -> Job:
    """Decide an export from headers; of the head, only shapes and dtypes are looked at, and the base may be open already.

    Raises:
        see `export`.
    """
    refuse_unclear(out, in_place, copy)
    source = base.root if isinstance(base, CheckpointIndex) else base
    place = own_directory(source) if in_place else source
    index = base if isinstance(base, CheckpointIndex) else CheckpointIndex.open(place)
    check_export(index, out, head.family, dtype=dtype)
    site = find_site(head.family, index.names, index.config)
    _refuse_misfit(head, site, index)
    bindings = key_map(head, site).layout(site.inside(index.entries), like=head.origin.bindings)
    facts = {
        "base": {"source": index.source, "path": str(index.root.absolute()), "revision": index.revision},
        "training": training,
    }
    refuse_unprintable(facts)
    form = head_form(head, bindings, index, quantized_base(index, site, dtype), dtype)
    plan = plan_export(index, site, bindings, form)
    goal = index.root if out is None else _plain_path(out)
    return Job(index, site, plan, goal, in_place, copy, facts, kept_wider(head, plan, dtype))


def _write(job: Job, head: DraftHead, weights: Mapping[str, torch.Tensor], *, force: bool) -> ExportReport:
    plan, index = job.plan, job.index
    place = updating(job.out, job.gone) if job.in_place else staging(job.out)
    try:
        with (
            place as partial,
            progress_bytes("Writing the checkpoint", total=_bytes(plan)) as advance,
            Overlay(partial, link=not job.copy, advance=advance) as overlay,
        ):
            written = write_files(overlay, plan, weights, index, others=not job.in_place)
            if not force:
                written.changes.refuse_not_finite()
            write_texts(overlay, index.config, texts(plan, head, index.config, written.digests, job.facts))
            check_output(partial, plan, index, job.site, head.num_depths, written.digests, overlay.shared)
    except OSError as error:
        raise _failed(job, error) from error
    return ExportReport(
        out=job.out,
        files_linked=overlay.linked,
        files_cloned=overlay.cloned,
        files_copied=overlay.copied,
        files_rewritten=overlay.rewritten,
        files_written=overlay.written,
        bytes_written=overlay.bytes_written,
        head_bytes=sum(tensor.nbytes for tensor in plan.head),
        tensors_cast=_casts(plan, head),
        tensors_encoded=len(plan.form.quantized) - len(written.kept),
        tensors_kept=len(written.kept),
        tensors_unchanged=len(written.changes.unchanged),
        tensors_changed=len(written.changes.changed),
        notices=(*written.changes.notices(head, plan), *notices(job, head)),
    )


def notices(job: Job, head: DraftHead) -> tuple[str, ...]:
    """What the reader has to know before the checkpoint is served."""
    wider = (f"{name} is stored as {dtype}: it must not be rounded" for name, dtype in job.wider.items())
    return (*job.plan.patch.notices, *wider, *_grafted(head, job.index))


def _bytes(plan: ExportPlan) -> int:
    """About what will be put on the disk where links are possible: all but small files."""
    rewritten = sum(e.nbytes for shard in plan.shards if shard.action == "rewrite" for e in shard.entries)
    return rewritten + sum(tensor.nbytes for tensor in plan.head)


def refuse_unclear(out: str | Path | None, in_place: bool, copy: bool) -> None:
    """Raise ExportError where the arguments do not say one place."""
    if in_place != (out is None):
        raise ExportError(
            "Exporting: expected an output directory or in_place, got " + ("both." if in_place else "neither."),
            remedy="Name a directory to make, or ask for an update in place.",
        )
    if in_place and copy:
        raise ExportError(
            "Exporting in place: there is nothing to copy, weight files without head tensors stay where they are.",
            remedy="Leave copy out, or name an output directory.",
        )


def own_directory(base: str | Path) -> Path:
    """The directory of a base that may be updated in place.

    Raises:
        ExportError: it is none, or it is a snapshot of a hub cache, whose files others share.
    """
    root = _plain_path(base)
    if not root.is_dir() or (root / "snapshots").is_dir() or root.parent.name == "snapshots":
        raise ExportError(
            f"Exporting into {base} in place: expected a directory of your own, got "
            + ("a part of a hub cache." if root.is_dir() else "what is no directory."),
            remedy="Name an output directory; files without head tensors are linked, so it costs little.",
        )
    return root


def check_export(
    index: CheckpointIndex, out: str | Path | None, family: Family, *, dtype: torch.dtype | None = None
) -> None:
    """Refuse what `export` would refuse whatever the head; for those who want to know before they train.

    Args:
        index: of the base.
        out: the output; None for an update in place.
        family: of the head.
        dtype: see `export`.

    Raises:
        CheckpointError, UnsupportedQuantizationError, ScaleMismatchError, OutputExistsError, ExportError: see `export`.
    """
    index.require_local("Exporting into")
    site = likely_site(family, index.names, index.config)
    index.verify(besides=site.in_scope)
    if out is not None:
        _refuse_overlap(_plain_path(out), index.root)
        refuse_existing(_plain_path(out))
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


def _casts(plan: ExportPlan, head: DraftHead) -> int:
    weights = head.state_dict()
    stored = {tensor.name: torch_dtype(tensor.dtype) for tensor in plan.head}
    moves = [move for binding in plan.bindings for move in binding.moves if move.native not in plan.form.quantized]
    return len({move.native for move in moves if weights[move.head].dtype != stored[move.native]})


def _failed(job: Job, error: OSError) -> ExportError:
    where = f" ({error.filename})" if error.filename else ""
    left = "The checkpoint is as it was." if job.in_place else "What was written so far is removed."
    return ExportError(
        f"Writing {job.out}: {error.strerror or error}{where}. {left}",
        remedy=REMEDIES.get(error.errno or 0, "Mend the named file or path, then export again."),
    )
