"""push: a checkpoint to the Hub, as one commit of the files that differ.

headers (and mtp_zoo.json) -> the checkpoint is whole, and still what an export wrote
one listing of the repository -> files that are equal by hash stay; weight files that it has and the checkpoint lacks go
one commit on top of the listed one -> all of it or nothing, and nothing if somebody else was faster
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_zoo.arguments import FLAG, PATH, TEXT, checked, optional
from mtp_zoo.checkpoint import CheckpointIndex
from mtp_zoo.containment import refuse_escapes
from mtp_zoo.errors import ChangedOnHubError, MTPZooError, PushError, SourceNotFoundError, VerificationError
from mtp_zoo.export_plan import PROVENANCE_NAME
from mtp_zoo.index_file import INDEX_NAME
from mtp_zoo.overlay import files_below
from mtp_zoo.progress import progress_bytes

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo

    from mtp_zoo.hub_listing import Listing

CHANGED_SINCE = 412
"""The Hub's status for a commit on top of one that is not the newest any more."""


@dataclass(frozen=True)
class PushReport:
    """What a push did, or would do.

    Attributes:
        repo_id: the repository.
        commit: the new commit; the present one where nothing differs; None where a dry run would make the repository.
        url: of the commit or of the pull request; None where none was made.
        uploaded: files that differ or are new.
        deleted: weight files that the checkpoint doesn't have.
        unchanged: how many files are equal.
        bytes_uploaded: size of `uploaded`; the Hub may hold some of these bytes already.
        dry_run: nothing was sent.
    """

    repo_id: str
    commit: str | None
    url: str | None
    uploaded: tuple[str, ...]
    deleted: tuple[str, ...]
    unchanged: int
    bytes_uploaded: int
    dry_run: bool


@checked(
    "Pushing a checkpoint",
    error=PushError,
    checkpoint=PATH,
    repo_id=TEXT,
    revision=optional(TEXT),
    private=optional(FLAG),
    create_pr=FLAG,
    dry_run=FLAG,
)
def push(
    checkpoint: str | Path,
    repo_id: str,
    *,
    revision: str | None = None,
    private: bool | None = None,
    create_pr: bool = False,
    dry_run: bool = False,
) -> PushReport:
    """Bring a repository on the Hub to the state of a checkpoint; only files that differ travel.

    Hidden files stay here. Files that only the repository has stay there, but for weights: engines read every one of these.

    Args:
        checkpoint: a directory, or what else `load_head` takes, if all of it is on this machine.
        repo_id: `org/name`; made where there is none.
        revision: branch; the main one where not given.
        private: visibility of a repository that is made now.
        create_pr: make a pull request, and leave the branch as it is.
        dry_run: compare, and send nothing.

    Raises:
        CheckpointError: the checkpoint can't be read or is not whole, the repository can't be read, or was changed meanwhile.
        VerificationError: the checkpoint is not what its mtp_zoo.json says.
        PushError: the Hub doesn't take it.
    """
    root = _whole(checkpoint)
    files = [
        file
        for file in files_below(root)
        if not any(part.startswith((".", "__pycache__")) for part in Path(file).parts)
    ]
    refuse_escapes(root, files)
    listing = _listing(repo_id, revision)
    changed = _changed(root, files, listing)
    stale = sorted(_weights(listing.files) - set(files)) if listing else []
    commit, url = (listing.commit if listing else None), None
    if not dry_run and (changed or stale or listing is None):
        made = _commit(root, repo_id, changed, stale, listing, revision, private, create_pr)
        commit, url = made.oid, made.pr_url or made.commit_url
    return PushReport(
        repo_id=repo_id,
        commit=commit,
        url=url,
        uploaded=tuple(changed),
        deleted=tuple(stale),
        unchanged=len(files) - len(changed),
        bytes_uploaded=sum((root / file).stat().st_size for file in changed),
        dry_run=dry_run,
    )


def _whole(checkpoint: str | Path) -> Path:
    """The directory of a checkpoint that may be published."""
    index = CheckpointIndex.open(checkpoint)
    root = index.require_local("Pushing")
    index.verify()
    from mtp_zoo.verification import verify

    if (root / PROVENANCE_NAME).exists():
        found = verify(root)
        if not found.ok:
            raise VerificationError(
                f"Pushing {root}: it is not what its {PROVENANCE_NAME} says.",
                remedy="Export it again, or remove that file if the change was meant.",
                problems=found.problems,
            )
    return root


def _listing(repo_id: str, revision: str | None) -> Listing | None:
    """What the repository holds; None where there is none."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    from mtp_zoo.hub_listing import ask_listing

    try:
        return ask_listing(repo_id, revision)
    except SourceNotFoundError as error:
        if isinstance(error.__cause__, RepositoryNotFoundError) and not isinstance(error.__cause__, GatedRepoError):
            return None
        raise


def _weights(files: Iterable[str]) -> set[str]:
    return {file for file in files if "/" not in file and (file.endswith(".safetensors") or file == INDEX_NAME)}


def _changed(root: Path, files: Sequence[str], listing: Listing | None) -> list[str]:
    """Files that the repository lacks, or has with other bytes."""
    from mtp_zoo.hub_listing import content_hash

    listed = listing.files if listing else {}
    same_size = [file for file in files if file in listed and listed[file].size == (root / file).stat().st_size]
    equal: set[str] = set()
    with progress_bytes("Comparing with the Hub", total=sum(listed[file].size for file in same_size)) as advance:
        for file in same_size:
            if content_hash(root / file, len(listed[file].etag), advance) == listed[file].etag:
                equal.add(file)
    return [file for file in files if file not in equal]


def _commit(
    root: Path,
    repo_id: str,
    changed: Sequence[str],
    stale: Sequence[str],
    listing: Listing | None,
    revision: str | None,
    private: bool | None,
    create_pr: bool,
) -> CommitInfo:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import httpx

    api = HfApi()
    operations = [
        *(CommitOperationAdd(file, root / file) for file in changed),
        *(CommitOperationDelete(file) for file in stale),
    ]
    try:
        if listing is None:
            api.create_repo(repo_id, private=private)
        return api.create_commit(
            repo_id,
            operations,
            commit_message="Upload a checkpoint with its draft head",
            revision=revision,
            create_pr=create_pr,
            parent_commit=listing.commit if listing else None,
        )
    except HfHubHTTPError as error:
        if error.response.status_code == CHANGED_SINCE:
            raise ChangedOnHubError(
                f"Pushing {root} to '{repo_id}': another commit was made there meanwhile, and nothing was sent on top of it.",
                remedy="Look at that commit, and push again.",
            ) from error
        raise _refused(root, repo_id, error.server_message or f"status {error.response.status_code}") from error
    except (OSError, ValueError, RuntimeError, httpx.HTTPError) as error:  # of uploads as well, from their threads
        said = [str(found).strip().split("\n")[0] for found in (error, error.__cause__) if found]
        raise _refused(root, repo_id, " ".join(filter(None, said)) or type(error).__name__) from error


def _refused(root: Path, repo_id: str, reason: str) -> MTPZooError:
    return PushError(
        f"Pushing {root} to '{repo_id}': {reason}. The repository is as it was.",
        remedy="Log in with a token that may write there (`hf auth login`), and see what the Hub says of the repository.",
    )
