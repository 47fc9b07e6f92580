"""`stitch` of speculators, for `export.py`; run in the environment made for it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from speculators.convert.mtp import MTP_EXACT_REMAP, MTP_PREFIX_REMAP


def load_stitch() -> Callable[..., Any]:
    """`stitch` out of its file: the package around it imports what only data generation needs."""
    package = importlib.util.find_spec("speculators")
    assert package is not None
    assert package.origin is not None
    file = Path(package.origin).parent / "cli" / "stitch.py"
    description = importlib.util.spec_from_file_location("stitch", file)
    assert description is not None
    assert description.loader is not None
    module = importlib.util.module_from_spec(description)
    description.loader.exec_module(module)
    return module.stitch


def their_name(native: str) -> str:
    """What speculators calls a tensor of the checkpoint's head."""
    if native in MTP_EXACT_REMAP:
        return MTP_EXACT_REMAP[native]
    return next(new + native.removeprefix(old) for old, new in MTP_PREFIX_REMAP if native.startswith(old))


def prepare(base: Path, out: Path) -> Callable[[], Any]:
    """The head of `base` as a checkpoint of speculators; returns the call that puts it back."""
    folder = out.with_name("finetuned")
    folder.mkdir()
    with safe_open(str(max(base.glob("*.safetensors"))), "pt") as shard:
        names = [name for name in shard.keys() if name.startswith("mtp.")]  # noqa: SIM118 - not a dict
        save_file({their_name(name): shard.get_tensor(name) for name in names}, str(folder / "model.safetensors"))
    stitch = load_stitch()
    return lambda: stitch(folder, base, out)
