"""What one commit of a repository holds: every file's size and hash, asked once, so that nothing can change unnoticed.

A listing is kept, since a commit never changes: a later run needs no request for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import HfApi, cached_assets_path
from huggingface_hub.file_download import repo_folder_name

from mtp_zoo.errors import ChangedOnHubError, HubReadError
from mtp_zoo.hub_http import patiently

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

COMMIT = re.compile(r"[0-9a-f]{40}")
ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
PIECE = 1 << 20
TIMEOUT = 30.0
"""Seconds that the Hub has for an answer."""


@dataclass(frozen=True)
class ListedFile:
    """One file: its size in bytes, and the git blob id (40 digits) or sha256 (64, LFS) of its bytes, the ETag of a download."""

    size: int
    etag: str


@dataclass(frozen=True)
class Listing:
    """One commit of a repository on the Hub."""

    repo_id: str
    commit: str
    files: Mapping[str, ListedFile]

    def check(self, file: str, path: Path) -> None:
        """Compare a small file on this machine with the listing.

        Raises:
            ChangedOnHubError: its bytes are others.
        """
        listed = self.files[file]
        found = content_hash(path, len(listed.etag))
        if found != listed.etag:
            raise ChangedOnHubError(
                f"Reading {file} of {self.repo_id} at {self.commit[:12]}: expected {listed.etag}, got {found}.",
                remedy=f"Remove {path} if it was changed by hand, and read again.",
            )


def content_hash(path: Path, digits: int, advance: Callable[[int], None] | None = None) -> str:
    """The hash that a listing has of a file: sha256 for 64 digits, else git's blob id; `advance` is told of bytes read."""
    digest = hashlib.sha256() if digits == 64 else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as stream:
        while piece := stream.read(PIECE):
            digest.update(piece)
            if advance:
                advance(len(piece))
    return digest.hexdigest()


def ask_listing(repo_id: str, revision: str | None, *, tries: int | None = None) -> Listing:
    """Ask the Hub, in one request, and keep the answer.

    Args:
        repo_id: the repository.
        revision: branch, tag or commit; the main branch where not given.
        tries: failures in a row that are too many.

    Raises:
        SourceNotFoundError: there is no such repository or revision, or no access to it.
        HubReadError: the Hub can't be reached, or its answer lacks a size or a hash.
    """
    act = f"Opening '{repo_id}'" + (f" at revision '{revision}'" if revision else "")
    info = patiently(
        act,
        lambda: HfApi().model_info(repo_id, revision=revision, files_metadata=True, timeout=TIMEOUT),
        source=repo_id,
        tries=tries,
    )
    listing = _listing(repo_id, info, act)
    path = _place(repo_id, listing.commit)
    temporary = path.with_name(f".{uuid.uuid4().hex}")
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {file: [listed.size, listed.etag] for file, listed in listing.files.items()}
    temporary.write_text(json.dumps({"repository": repo_id, "files": table}), encoding="utf-8")
    os.replace(temporary, path)
    return listing


def kept_listing(repo_id: str, commit: str) -> Listing | None:
    """The listing of a commit, if it was asked for before."""
    try:
        table = json.loads(_place(repo_id, commit).read_text(encoding="utf-8"))["files"]
        files = {file: ListedFile(int(size), str(etag)) for file, (size, etag) in table.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Listing(repo_id, commit, files) if all(ETAG.fullmatch(listed.etag) for listed in files.values()) else None


def _listing(repo_id: str, info: ModelInfo, act: str) -> Listing:
    commit = info.sha or ""
    files: dict[str, ListedFile] = {}
    wrong = [] if COMMIT.fullmatch(commit) else [f"commit {commit!r}"]
    for sibling in info.siblings or ():
        etag = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
        if sibling.size is None or etag is None or not ETAG.fullmatch(etag):
            wrong.append(f"{sibling.rfilename}: size {sibling.size}, hash {etag!r}")
        else:
            files[sibling.rfilename] = ListedFile(sibling.size, etag)
    if wrong:
        raise HubReadError(
            f"{act}: the server's listing can't be used.",
            remedy="Check HF_ENDPOINT: the server must answer as the Hugging Face Hub does.",
            problems=wrong[:5],
        )
    return Listing(repo_id, commit, files)


def _place(repo_id: str, commit: str) -> Path:
    folder = cached_assets_path("mtp_zoo", namespace="listings", subfolder="v1")
    return folder / repo_folder_name(repo_id=repo_id, repo_type="model") / f"{commit}.json"
