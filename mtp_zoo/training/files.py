"""Files that are either there and whole, or not there."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomic(path: Path, content: str) -> None:
    """Write text beside `path` and rename it into place, so that a reader sees the old file or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
