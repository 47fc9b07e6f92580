"""save_pretrained of a joint model: one complete checkpoint, trunk and head.

    trunk    as transformers saves it       <place>/.mtp-zoo-saving/trunk
    whole    export(head, base=trunk)       <place>/.mtp-zoo-saving/whole
    publish  stale weights of an earlier save go, the new files move in, the index last

So a save that is cut short leaves a folder without an index, which no one takes for a checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtp_zoo.attach_state import HEAD, bindings_of, split_state
from mtp_zoo.card import write_card
from mtp_zoo.checkpoint import INDEX_NAME, stored_dtype
from mtp_zoo.errors import AttachError
from mtp_zoo.export_plan import CARD_NAME, HEAD_FILES, PROVENANCE_NAME
from mtp_zoo.exporter import export
from mtp_zoo.head import DraftHead
from mtp_zoo.load_report import Origin
from mtp_zoo.modelconfig import ModelConfig
from mtp_zoo.provenance import encode_record

STAGING = ".mtp-zoo-saving"
"""Folder, inside the one that is saved to, in which a checkpoint is built; a save that was killed may leave it behind."""

UNSUPPORTED = ("variant", "distributed_checkpoint")
"""Options of transformers' `save_pretrained` under which no complete checkpoint comes out of it."""


class JointSaving:
    """The method `save_pretrained` of a joint model's class."""

    def save_pretrained(
        self: Any,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        push_to_hub: bool = False,
        **options: Any,
    ) -> None:
        """Write trunk and head as one checkpoint, in the dtypes that they have in memory; FP32 master weights of a head that
        `attach` loaded are written in the trunk's dtype (`model.mtp.saved_like_trunk`).

        Args:
            save_directory: made where it does not exist; weights that an earlier save left in it are replaced.
            is_main_process: where False, nothing is written.
            state_dict: what to save instead of the model's own tensors; a head that it lacks is taken from the model.
            push_to_hub: not supported; `model.push_to_hub(...)` is.
            options: those of transformers' method, such as `max_shard_size`.

        Raises:
            AttachError: an option that is not supported.
            HeadMismatchError: `state_dict` holds a part of the head.
            ExportError, CheckpointError: see `mtp_zoo.export`.
        """
        plain = super().save_pretrained  # pyright: ignore[reportAttributeAccessIssue]
        head: DraftHead = getattr(self, HEAD)
        _refuse(options, push_to_hub)
        trunk, tensors = split_state(head, self.state_dict() if state_dict is None else state_dict)
        if not is_main_process:
            with tempfile.TemporaryDirectory() as nowhere:  # a gather of shards takes every rank
                plain(nowhere, is_main_process=False, state_dict=trunk, **options)
            return
        goal = Path(save_directory)
        stage = goal / STAGING
        shutil.rmtree(stage, ignore_errors=True)
        try:
            plain(stage / "trunk", state_dict=trunk, **options)
            whole = _with_head(stage, head, tensors, self)
            _name_the_base(whole, goal, self.config._name_or_path)
            _publish(whole, goal)
        finally:
            shutil.rmtree(stage, ignore_errors=True)


def _refuse(options: Mapping[str, Any], push_to_hub: bool) -> None:
    wrong = [f"{name}={options[name]!r}" for name in UNSUPPORTED if options.get(name)]
    wrong += ["push_to_hub=True"] if push_to_hub else []
    if wrong:
        raise AttachError(
            f"Saving a joint model: {', '.join(wrong)} is not supported.",
            remedy="Save without it; model.push_to_hub(...) uploads a whole checkpoint.",
        )


def _with_head(stage: Path, head: DraftHead, tensors: Mapping[str, Tensor], model: Any) -> Path:
    """The staged trunk and the head as one checkpoint."""
    base, out = stage / "trunk", stage / "whole"
    stored = head_of_tensors(head, tensors or head.state_dict(), ModelConfig.read(base))
    training = {"mode": model.mtp.mode, "mtp_lambda": model.mtp.mtp_lambda, "depths": model.mtp.objective.depths}
    dtype = model.get_output_embeddings().weight.dtype if model.mtp.saved_like_trunk else _float_dtype(stored)
    export(stored, base, out, dtype=dtype, training=training, force=True)  # a save never loses the trunk
    return out


def head_of_tensors(head: DraftHead, tensors: Mapping[str, Tensor], config: ModelConfig) -> DraftHead:
    """A head like `head` that holds `tensors` (by canonical name, not copied), for `export`."""
    like = type(head)(head.family, config, depths=head.num_depths, first_layer=head.site.first_layer, device="meta")
    like.load_state_dict(dict(tensors), assign=True)
    dtypes = {name: stored_dtype(value.dtype) for name, value in tensors.items()}
    like.origin = Origin(config.path.parent, bindings_of(head), dtypes)
    like.engine = head.engine
    return like


def _float_dtype(head: DraftHead) -> torch.dtype:
    return next(value.dtype for name, value in head.state_dict().items() if head.rounds(name))


def _name_the_base(whole: Path, goal: Path, source: str) -> None:
    """Let provenance and card name what the model was loaded from, in place of a folder that will be gone; a card that is
    at the goal already keeps the rest of its text."""
    record = json.loads((whole / PROVENANCE_NAME).read_text(encoding="utf-8"))
    record["base"] = {"source": source or None, "path": None, "revision": None}
    (whole / PROVENANCE_NAME).write_text(encode_record(record), encoding="utf-8")
    (whole / CARD_NAME).write_bytes(write_card(goal / CARD_NAME, record))


def _publish(whole: Path, goal: Path) -> None:
    """Move the new files in; a reader finds the old checkpoint, none, or the new one."""
    (goal / INDEX_NAME).unlink(missing_ok=True)
    new = sorted(path.name for path in whole.iterdir())
    for path in goal.iterdir():
        if _is_weights(path.name) and path.name not in new:
            path.unlink()
    for name in [name for name in new if name != INDEX_NAME] + [INDEX_NAME]:
        place = goal / name
        if place.is_dir():
            shutil.rmtree(place)
        os.replace(whole / name, place)


def _is_weights(name: str) -> bool:
    """Whether a save of transformers or of this library wrote the file, and readers would look at it."""
    return name in HEAD_FILES or name == "model.safetensors" or _is_shard(name)


def _is_shard(name: str) -> bool:
    return name.startswith("model-") and name.endswith(".safetensors") and "-of-" in name
