"""A checkpoint without some fields of its config, for faults of SGLang that a case documents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def without_fields(job: dict[str, Any]) -> Path:
    """The job's checkpoint, or, where it drops config fields, a folder of links to it beside a shorter config.json.

    Args:
        job: `checkpoint`, `drop` (dotted fields of the config or its `text_config`), `folder`.
    """
    checkpoint = Path(job["checkpoint"])
    if not job.get("drop"):
        return checkpoint
    folder = Path(job["folder"]) / "checkpoint"
    folder.mkdir(exist_ok=True)
    for file in checkpoint.iterdir():
        link = folder / file.name
        link.unlink(missing_ok=True)
        link.symlink_to(file.resolve())
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    for part in (config, config.get("text_config", {})):
        drop(part, job["drop"])
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def drop(part: dict[str, Any], fields: Sequence[str]) -> None:
    """Remove dotted fields where they are."""
    for field in fields:
        *path, name = field.split(".")
        inner: Any = part
        for step in path:
            inner = inner.get(step) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            inner.pop(name, None)
