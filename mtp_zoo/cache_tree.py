"""Snapshots in the Hugging Face cache, as huggingface_hub lays them out: `models--org--name/{refs,snapshots,blobs}`."""

from __future__ import annotations

import re
from pathlib import Path

from mtp_zoo.errors import SourceNotFoundError
from mtp_zoo.storage import LocalStorage

COMMIT = re.compile(r"[\w-]+")


def tree_of(repo_id: str) -> Path:
    """Where the cache keeps a repository, whether it does or not."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    return Path(HF_HUB_CACHE) / repo_folder_name(repo_id=repo_id, repo_type="model")


def cached_snapshot(repo_id: str, revision: str | None) -> LocalStorage:
    """The snapshot of a repository that the cache holds, whole or not.

    Raises:
        SourceNotFoundError: it holds none, or not of this revision.
    """
    # `snapshot_download(local_files_only=True)` refuses a partial snapshot, which may well hold all of the head.
    tree = tree_of(repo_id)
    if not (tree / "snapshots").is_dir():
        raise SourceNotFoundError(
            f"Opening '{repo_id}': no such directory, and no such repository in the cache {tree.parent}.",
            remedy=f"Correct the path, or run `hf download {repo_id}` first.",
        )
    return snapshot_in(tree, repo_id, revision)


def snapshot_in(tree: Path, source: str, revision: str | None) -> LocalStorage:
    """The snapshot of a revision (`main` where not given) in one repository's tree.

    Raises:
        SourceNotFoundError: the tree holds no such snapshot.
    """
    snapshots = sorted(path.name for path in (tree / "snapshots").iterdir() if path.is_dir())
    if revision in snapshots:
        return LocalStorage(tree / "snapshots" / revision, revision)
    wanted = revision or "main"
    commit = referenced(tree, wanted)
    if not commit and revision is None and len(snapshots) == 1:
        commit = snapshots[0]
    if COMMIT.fullmatch(commit) and commit in snapshots:
        return LocalStorage(tree / "snapshots" / commit, commit)
    name = tree.name.removeprefix("models--").replace("--", "/")
    raise SourceNotFoundError(
        f"Opening '{source}' at revision '{wanted}': the cache holds {snapshots or 'no snapshot'}.",
        remedy=f"Name one of these, or run `hf download {name} --revision {wanted}` first.",
    )


def referenced(tree: Path, revision: str) -> str:
    """The commit that a branch or tag was at when the cache last heard of it; empty where it never did."""
    ref = tree / "refs" / revision
    return ref.read_text(encoding="utf-8", errors="replace").strip() if ref.is_file() else ""


def commit_of(path: Path) -> str | None:
    """The commit of a snapshot directory; None for other directories."""
    path = path.absolute()
    in_tree = path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--")
    return path.name if in_tree else None
