"""Where a checkpoint lies on this machine: a directory, a Hugging Face cache tree, or a cached repository id."""

from __future__ import annotations

import re
from pathlib import Path

from mtp_zoo.errors import SourceNotFoundError
from mtp_zoo.storage import LocalStorage, Storage

REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
COMMIT = re.compile(r"[\w-]+")


def locate(source: str | Path, revision: str | None = None) -> Storage:
    """Find the files of `source`.

    Args:
        source: a directory; a cache tree (`models--org--name`) or a snapshot inside one; or a repository id that is in
            the local cache. Nothing is downloaded.
        revision: branch, tag or commit, for cache trees and repository ids; `main` where not given.

    Raises:
        SourceNotFoundError: there is no such place, or the cache does not hold it.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if (path / "snapshots").is_dir() and path.name.startswith("models--"):
            return _in_tree(path, str(source), revision)
        if revision is not None and revision != _commit_of(path):
            raise SourceNotFoundError(
                f"Opening {path}: revision '{revision}' was asked for, and a plain directory has no revisions.",
                remedy="Leave the revision out, or give the repository id.",
            )
        return LocalStorage(path, _commit_of(path))
    if path.exists():
        raise SourceNotFoundError(f"Opening {path}: expected a directory, got a file.", remedy="Give its directory.")
    if isinstance(source, str) and REPO_ID.fullmatch(source):
        return _in_cache(source, revision)
    raise SourceNotFoundError(
        f"Opening {path}: no such directory.",
        remedy="Give the directory that holds config.json and the safetensors files, or a repository id (org/name).",
    )


def _in_cache(repo_id: str, revision: str | None) -> LocalStorage:
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    # `snapshot_download(local_files_only=True)` refuses a partial snapshot, which may well hold all of the head.
    tree = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=repo_id, repo_type="model")
    if not (tree / "snapshots").is_dir():
        raise SourceNotFoundError(
            f"Opening '{repo_id}': no such directory, and no such repository in the cache {HF_HUB_CACHE}.",
            remedy=f"Correct the path, or run `hf download {repo_id}` first.",
        )
    return _in_tree(tree, repo_id, revision)


def _in_tree(tree: Path, source: str, revision: str | None) -> LocalStorage:
    snapshots = sorted(path.name for path in (tree / "snapshots").iterdir() if path.is_dir())
    if revision in snapshots:
        return LocalStorage(tree / "snapshots" / revision, revision)
    wanted = revision or "main"
    ref = tree / "refs" / wanted
    commit = ref.read_text(encoding="utf-8", errors="replace").strip() if ref.is_file() else ""
    if not commit and revision is None and len(snapshots) == 1:
        commit = snapshots[0]
    if COMMIT.fullmatch(commit) and commit in snapshots:
        return LocalStorage(tree / "snapshots" / commit, commit)
    name = tree.name.removeprefix("models--").replace("--", "/")
    raise SourceNotFoundError(
        f"Opening '{source}' at revision '{wanted}': the cache holds {snapshots or 'no snapshot'}.",
        remedy=f"Name one of these, or run `hf download {name} --revision {wanted}` first.",
    )


def _commit_of(path: Path) -> str | None:
    path = path.absolute()
    in_tree = path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--")
    return path.name if in_tree else None
