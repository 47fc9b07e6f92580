"""Which files a directory really holds: a link must not lead out of it.

A checkpoint that somebody made could link to a file of its reader. An export would copy that file, and a push publish it. The
one place where links lead out by design is the Hugging Face cache: files of a snapshot are links into `blobs/` of the same
repository.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from mtp_zoo.errors import UnsafeCheckpointError


def refuse_escapes(root: Path, files: Iterable[str]) -> None:
    """Refuse links that lead out of `root`; those that lead nowhere are left to who opens them.

    Args:
        root: directory of a checkpoint.
        files: paths inside of it, relative to it.

    Raises:
        UnsafeCheckpointError: with every such file, and what it links to.
    """
    homes = _homes(root)
    problems: list[str] = []
    for file in files:
        real = os.path.realpath(root / file)
        if not real.startswith(homes) and os.path.lexists(real):
            problems.append(f"{file!r} is really {real!r}")
    if problems:
        raise UnsafeCheckpointError(
            f"Opening {root}: {len(problems)} of its files are links that lead out of it.",
            remedy="Put the files themselves there, if you made the links; do not use the checkpoint otherwise.",
            problems=problems,
        )


def _homes(root: Path) -> tuple[str, ...]:
    """Where files of `root` may lie, as beginnings of real paths."""
    real = root.resolve()
    tree = real.parent.parent
    homes = [real]
    if real.parent.name == "snapshots" and tree.name.startswith("models--"):
        homes.append((tree / "blobs").resolve())
    return tuple(os.path.join(home, "") for home in homes)
