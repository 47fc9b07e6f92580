"""Training checkpoints: written whole or not at all, read strictly.

    checkpoints/step-000100/head.safetensors        float32 weights, by canonical name
                            optimizer.safetensors   `<name>.exp_avg`, `<name>.exp_avg_sq`, `<name>.step`
                            rng.safetensors         `<rank>.cpu` and, on CUDA, `<rank>.cuda`
                            state.json              step, the digest of what the run was started with, and which
                                                    head it is: `mtp-zoo export --head` takes the folder as it is

No pickle: nothing in a checkpoint can run code.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtp_zoo.errors import ResumeError
from mtp_zoo.head import DraftHead
from mtp_zoo.overlay import staging, sync
from mtp_zoo.trained_head import describe_head
from mtp_zoo.training.files import read_object
from mtp_zoo.version import __version__

COMPLETE = re.compile(r"step-\d{6,}")
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
REMEDY = "Delete this checkpoint to continue from the one before it."


def save_checkpoint(
    folder: Path,
    step: int,
    head: DraftHead,
    optimizer: torch.optim.Optimizer,
    *,
    rng: Sequence[Mapping[str, Tensor]],
    run: str,
    keep: int,
    base: str,
) -> Path:
    """Write `folder`/step-<step> under a hidden name, flush it, rename it, then remove all but the `keep` newest.

    Args:
        rng: `rng_state()` of every rank.
        run: digest of what the run was started with.
        base: the checkpoint that the head was loaded from.
    """
    path = folder / f"step-{step:06d}"
    with staging(path) as partial:
        save_file({name: value.contiguous() for name, value in head.weights().items()}, partial / "head.safetensors")
        save_file(_optimizer_tensors(head, optimizer), partial / "optimizer.safetensors")
        states = {f"{rank}.{name}": value for rank, state in enumerate(rng) for name, value in state.items()}
        save_file(states, partial / "rng.safetensors")
        state = {"mtp_zoo": __version__, "step": step, "run": run, "head": describe_head(head, base)}
        (partial / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        for file in partial.iterdir():
            sync(file)
    for old in complete_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return path


def complete_checkpoints(folder: Path) -> list[Path]:
    """Every complete checkpoint, oldest first."""
    found = [path for path in folder.iterdir() if COMPLETE.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def clear_partial(folder: Path) -> None:
    """Remove what a killed process left half written."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path)


def restore_checkpoint(path: Path, head: DraftHead, optimizer: torch.optim.Optimizer, *, rank: int, run: str) -> int:
    """Fill head, optimiser and random state from a checkpoint; returns its step.

    Nothing is changed unless every tensor is there with its shape and dtype, and no other.

    Raises:
        ResumeError: files are missing or unreadable, tensors are missing, unexpected or misshapen (all are listed), or
            the checkpoint belongs to a run that was started differently.
    """
    state = _read_state(path)
    if state.get("run") != run:
        raise ResumeError(f"Resuming from {path}: it belongs to another run.", remedy="Restore run.json of its run.")
    weights, moments, rng = (_read(path / f"{name}.safetensors") for name in ("head", "optimizer", "rng"))
    problems = [
        *_compare("head", weights, head.weights()),
        *_compare("optimizer", moments, _empty_moments(head)),
        *_compare("rng", {n: v for n, v in rng.items() if n.startswith(f"{rank}.")}, _named(rng_state(), rank)),
    ]
    if problems:
        raise ResumeError(
            f"Resuming from {path}: its tensors are not those of this run.", remedy=REMEDY, problems=problems
        )
    with torch.no_grad():
        for name, value in head.weights().items():
            value.copy_(weights[name])
    for name, parameter in _trained(head).items():
        optimizer.state[parameter] = {
            key: moments[f"{name}.{key}"].to("cpu" if key == "step" else parameter.device) for key in MOMENTS
        }
    _set_rng_state({name.partition(".")[2]: value for name, value in rng.items() if name.startswith(f"{rank}.")})
    return state["step"]


def rng_state() -> dict[str, Tensor]:
    """torch's random state on the CPU and, where there is one, on the current CUDA device; uint8."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _named(state: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    return {f"{rank}.{name}": value for name, value in state.items()}


def _trained(head: DraftHead) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in head.named_parameters() if parameter.requires_grad}


def _optimizer_tensors(head: DraftHead, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": optimizer.state[parameter][key].contiguous()
        for name, parameter in _trained(head).items()
        for key in MOMENTS
    }


def _empty_moments(head: DraftHead) -> dict[str, Tensor]:
    """Shapes and dtypes of what `_optimizer_tensors` gives."""
    shapes = {name: torch.empty_like(parameter, device="meta") for name, parameter in _trained(head).items()}
    step = torch.empty((), dtype=torch.float32, device="meta")
    return {f"{name}.{key}": step if key == "step" else shapes[name] for name in shapes for key in MOMENTS}


def _read_state(path: Path) -> dict[str, Any]:
    try:
        return read_object(path / "state.json")
    except (OSError, ValueError) as error:
        raise ResumeError(f"Resuming from {path}: state.json can't be read ({error}).", remedy=REMEDY) from error


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise ResumeError(
            f"Resuming from {file.parent}: {file.name} can't be read ({error}).", remedy=REMEDY
        ) from error


def _compare(file: str, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    problems = [f"{file}: missing {name}" for name in wanted if name not in found]
    problems += [f"{file}: unexpected {name}" for name in found if name not in wanted]
    for name in wanted.keys() & found.keys():
        have, want = found[name], wanted[name]
        if have.shape != want.shape or have.dtype != want.dtype:
            problems.append(
                f"{file}: {name}: expected {want.dtype} {list(want.shape)}, got {have.dtype} {list(have.shape)}"
            )
    return problems
