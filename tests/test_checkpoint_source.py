"""Finding a checkpoint: directories, Hugging Face cache trees, cached repository ids. No network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mtp_zoo.checkpoint import CheckpointIndex, TensorReader
from mtp_zoo.checkpoint_source import locate
from mtp_zoo.errors import SourceNotFoundError
from tests.tiny import tiny_config, tiny_tensors, write_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A cache tree as huggingface_hub writes it: files are links into blobs/."""
    tree = tmp_path / "hub" / "models--acme--tiny"
    config = tiny_config()
    plain = write_checkpoint(tmp_path / "plain", config, tiny_tensors(config), shards=2)
    for commit in (COMMIT, OTHER):
        (tree / "snapshots" / commit).mkdir(parents=True)
    (tree / "blobs").mkdir()
    for number, file in enumerate(sorted(plain.iterdir())):
        file.rename(tree / "blobs" / f"b{number}")
        os.symlink(f"../../blobs/b{number}", tree / "snapshots" / COMMIT / file.name)
    (tree / "refs" / "pr").mkdir(parents=True)
    (tree / "refs" / "main").write_text(COMMIT)
    (tree / "refs" / "pr" / "1").write_text(OTHER)
    return tree


@pytest.fixture
def cache(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tree.parent))
    return tree


def test_tree_snapshot_and_repository_id_are_the_same_checkpoint(cache: Path) -> None:
    snapshot = cache / "snapshots" / COMMIT
    for source in (cache, snapshot, str(snapshot), "acme/tiny"):
        index = CheckpointIndex.open(source)
        assert (index.root, index.revision, index.faults) == (snapshot, COMMIT, ())
        reader = TensorReader(index)
        assert [reader.read(entry).shape for entry in index.require(["mtp.fc.weight"])] == [(64, 128)]


@pytest.mark.parametrize(("revision", "commit"), [(None, COMMIT), ("main", COMMIT), ("pr/1", OTHER), (OTHER, OTHER)])
def test_branch_pull_request_and_commit_are_revisions(cache: Path, revision: str | None, commit: str) -> None:
    assert locate("acme/tiny", revision).revision == commit
    assert locate(cache, revision).root == cache / "snapshots" / commit


def test_only_snapshot_is_taken_where_the_tree_has_no_main(tree: Path) -> None:
    (tree / "refs" / "main").unlink()
    with pytest.raises(SourceNotFoundError, match=f"'main'.*{COMMIT}.*{OTHER}"):
        locate(tree)
    (tree / "snapshots" / OTHER).rmdir()
    assert locate(tree).revision == COMMIT


def test_unknown_revision_says_what_the_cache_holds_and_how_to_download(cache: Path) -> None:
    with pytest.raises(SourceNotFoundError, match=rf"'v9'.*{COMMIT}(.|\n)*hf download acme/tiny --revision v9"):
        locate("acme/tiny", "v9")


def test_repository_that_is_not_cached_says_how_to_download(cache: Path) -> None:
    with pytest.raises(SourceNotFoundError, match="hf download acme/other"):
        locate("acme/other")


def test_reference_that_leaves_the_tree_is_not_followed(tree: Path) -> None:
    (tree / "refs" / "main").write_text("../../../plain")
    with pytest.raises(SourceNotFoundError):
        locate(tree)


def test_partly_downloaded_snapshot_is_opened(cache: Path) -> None:
    snapshot = cache / "snapshots" / COMMIT
    first = snapshot / "model-00001-of-00002.safetensors"
    first.resolve().unlink()
    index = CheckpointIndex.open("acme/tiny")
    assert [(fault.kind, fault.file) for fault in index.faults] == [("missing_file", first.name)]
    index.require(["mtp.fc.weight"])


def test_revision_of_a_plain_directory_is_refused(tree: Path, tmp_path: Path) -> None:
    assert locate(tree / "snapshots" / COMMIT, COMMIT).revision == COMMIT
    assert locate(tmp_path).revision is None
    with pytest.raises(SourceNotFoundError, match="a plain directory has no revisions"):
        locate(tmp_path, "main")


@pytest.mark.parametrize("source", ["./nope", "/nope/nope", "no such thing", "a/b/c", "~/nope/nope"])
def test_place_that_does_not_exist_is_not_found(cache: Path, source: str) -> None:
    with pytest.raises(SourceNotFoundError, match="no such directory"):
        locate(source)


def test_file_is_not_a_directory(cache: Path) -> None:
    with pytest.raises(SourceNotFoundError, match="expected a directory, got a file"):
        locate(cache / "refs" / "main")
