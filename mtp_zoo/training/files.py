"""Files that are either there and whole, or not there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mtp_zoo.overlay import sync


def write_atomic(path: Path, content: str) -> None:
    """Write text beside `path` and rename it into place, so that a reader sees the old file or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)
    sync(path.parent)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        OSError, ValueError: it can't be read, is not JSON, or is no object.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"expected an object, got {type(content).__name__}")
    return content
