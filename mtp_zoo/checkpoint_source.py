"""Where a checkpoint lies: a directory, a Hugging Face cache tree, or a repository on the Hub."""

from __future__ import annotations

import re
from pathlib import Path

from mtp_zoo.cache_tree import commit_of, snapshot_in
from mtp_zoo.errors import SourceNotFoundError
from mtp_zoo.storage import LocalStorage, Storage

REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def locate(source: str | Path, revision: str | None = None) -> Storage:
    """Find the files of `source`.

    Args:
        source: a directory; a cache tree (`models--org--name`) or a snapshot inside one; or a repository id.
        revision: branch, tag or commit, for cache trees and repository ids; `main` where not given.

    Raises:
        SourceNotFoundError: there is no such place, or no access to it.
        HubReadError: the Hub can't be reached, and the cache doesn't hold the repository.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if (path / "snapshots").is_dir() and path.name.startswith("models--"):
            return snapshot_in(path, str(source), revision)
        if revision is not None and revision != commit_of(path):
            raise SourceNotFoundError(
                f"Opening {path}: revision '{revision}' was asked for, and a plain directory has no revisions.",
                remedy="Leave the revision out, or give the repository id.",
            )
        return LocalStorage(path, commit_of(path))
    if path.exists():
        raise SourceNotFoundError(f"Opening {path}: expected a directory, got a file.", remedy="Give its directory.")
    if isinstance(source, str) and REPO_ID.fullmatch(source):
        from mtp_zoo.hub_storage import open_repository

        return open_repository(source, revision)
    raise SourceNotFoundError(
        f"Opening {path}: no such directory.",
        remedy="Give the directory that holds config.json and the safetensors files, or a repository id (org/name).",
    )
