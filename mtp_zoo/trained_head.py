"""The head in a training checkpoint, as `mtp-zoo train` writes them: which model it belongs to, and its weights.

checkpoints/step-000004/state.json           step, and under `head`: base, family, depths, engine, conventions
                        head.safetensors     the weights, by canonical name
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from mtp_zoo.errors import HeadMismatchError, SourceNotFoundError

if TYPE_CHECKING:
    from mtp_zoo.head import DraftHead

STATE, WEIGHTS, RUN, CHECKPOINTS = "state.json", "head.safetensors", "run.json", "checkpoints"
"""Files and folders of a run."""


def describe_head(head: DraftHead, base: str) -> dict[str, Any]:
    """Return what a training checkpoint says of its head.

    Args:
        head: from `load_head`.
        base: the checkpoint that it was loaded from, and that its target is of.
    """
    return {
        "base": base,
        "family": head.family.name,
        "depths": head.num_depths,
        "engine": head.engine,
        "conventions": head.spec.describe(),
    }


def training_checkpoint(source: str | Path) -> Mapping[str, Any] | None:
    """Return what a training checkpoint says of its head; None where `source` is no training checkpoint.

    Raises:
        SourceNotFoundError: it is a run's directory, or a training checkpoint that does not say which head it holds.
    """
    folder = Path(source).expanduser()
    if (folder / "config.json").exists() or not folder.is_dir():
        return None
    if (folder / RUN).is_file() and (folder / CHECKPOINTS).is_dir():
        newest = max((path.name for path in (folder / CHECKPOINTS).glob("step-*")), default=None)
        advice = f"Name one of its checkpoints: {folder / CHECKPOINTS / newest}" if newest else "Train some steps first"
        raise SourceNotFoundError(
            f"Opening {folder}: it is the directory of a training run, not a checkpoint.", remedy=f"{advice}."
        )
    if not ((folder / STATE).is_file() and (folder / WEIGHTS).is_file()):
        return None
    try:
        told = json.loads((folder / STATE).read_text(encoding="utf-8")).get("head")
    except (OSError, ValueError, AttributeError) as error:
        told, reason = None, f": {error}"
    else:
        reason = ""
    if not isinstance(told, dict) or not {"base", "family", "depths", "engine"} <= told.keys():
        raise SourceNotFoundError(
            f"Opening {folder}: it is a training checkpoint, and its {STATE} does not say which head it holds{reason}.",
            remedy="Load the head from its base, and fill it from head.safetensors with load_state_dict.",
        )
    return told


def fill_trained(head: DraftHead, source: str | Path) -> DraftHead:
    """Copy the weights of a training checkpoint into a head of its base; return the head.

    Raises:
        HeadMismatchError: the file can't be read, or its tensors are not those of the head; all are listed.
    """
    path, weights = Path(source).expanduser() / WEIGHTS, head.weights()
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise HeadMismatchError(f"Reading {path}: {error}.", remedy="Take an earlier checkpoint of the run.") from error
    problems = [f"missing {name}" for name in weights.keys() - found.keys()]
    problems += [f"unexpected {name}" for name in found.keys() - weights.keys()]
    problems += [
        f"{name}: expected {list(weights[name].shape)}, got {list(found[name].shape)}"
        for name in weights.keys() & found.keys()
        if weights[name].shape != found[name].shape
    ]
    if problems:
        raise HeadMismatchError(
            f"Reading {path}: its tensors are not those of the {head.family.name} head.",
            remedy="Take a checkpoint of a run on this base.",
            problems=sorted(problems),
        )
    with torch.no_grad():
        for name, value in weights.items():
            value.copy_(found[name])
    return head
