"""The form in which vLLM opens a job's checkpoint: its own, or a twin that computes the same and that vLLM can run on a CPU.

What makes a twin is said by the job: fields of config.json to set and to leave out, tensors to leave out.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

FOLDER = "twin"
INDEX = "model.safetensors.index.json"


def opened(job: dict[str, Any]) -> Path:
    """The checkpoint to open; a twin is written to the job's folder."""
    checkpoint, twin = Path(job["checkpoint"]), job.get("twin")
    if not twin:
        return checkpoint
    folder = Path(job["folder"]) / FOLDER
    folder.mkdir(exist_ok=True)
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    kept = {name: value for name, value in config.items() if not named(name, twin["without_fields"])}
    (folder / "config.json").write_text(json.dumps({**kept, **twin["config"]}), encoding="utf-8")
    dropped = twin["without_tensors"]
    for file in checkpoint.glob("*.safetensors"):
        tensors = {name: tensor for name, tensor in load_file(file).items() if not named(name, dropped)}
        save_file(tensors, folder / file.name, metadata={"format": "pt"})
    if (checkpoint / INDEX).is_file():
        index = json.loads((checkpoint / INDEX).read_text(encoding="utf-8"))
        index["weight_map"] = {name: file for name, file in index["weight_map"].items() if not named(name, dropped)}
        (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return folder


def named(name: str, patterns: list[str]) -> bool:
    """Whether one of the patterns is the whole name."""
    return any(re.fullmatch(pattern, name) for pattern in patterns)
