"""Loading and inspecting heads of repositories on the Hub: what is read, what is not, and what a second run needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

import mtp_zoo as mz
from mtp_zoo.checkpoint import CheckpointIndex
from mtp_zoo.errors import (
    BrokenCheckpointError,
    HubReadError,
    ModelConfigError,
    SourceNotFoundError,
    UnsafeCheckpointError,
)
from mtp_zoo.hub_storage import HubStorage
from mtp_zoo.index_file import INDEX_NAME
from mtp_zoo.inspection import inspect
from mtp_zoo.registry import needed_by_head
from mtp_zoo.storage import ByteRange, LocalStorage
from tests.exporting import CONFIG, FC, HEAD, TENSORS, THREE, TRUNK, TWO, make_base
from tests.hub.loopback import LoopbackHub
from tests.tiny import write_checkpoint

REPO = "acme/tiny"
ONE_OF_FOUR, HEAD_OF_FOUR = "model-00001-of-00004.safetensors", "model-00004-of-00004.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards: one clean, one with some of the head, one with nothing else."""
    return make_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture
def repo(hub: LoopbackHub, base: Path) -> str:
    hub.publish(REPO, hub.files_of(base))
    return REPO


def asked_for(hub: LoopbackHub, name: str) -> bool:
    return any(request.path.endswith(f"/{name}") for request in hub.requests)


def lose_connection(hub: LoopbackHub) -> None:
    hub.fail(".", "reset", times=10**6)


def test_head_equals_the_one_of_a_directory_and_the_second_run_reads_nothing(
    hub: LoopbackHub, repo: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, local = mz.load_head(repo), mz.load_head(base)
    assert first.report
    assert local.report
    assert first.report.tensors == local.report.tensors
    assert first.report.bytes_read == local.report.bytes_read
    small = sum((base / name).stat().st_size for name in ("config.json", INDEX_NAME))
    assert first.report.bytes_moved == hub.sent("cdn") + small
    hub.forget()
    second = mz.load_head(repo)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    offline = mz.load_head(repo)
    assert [request.path for request in hub.requests if request.origin == "cdn" or "resolve" in request.path] == []
    for head in (first, second, offline):
        assert head.state_dict().keys() == local.state_dict().keys()
        assert all(torch.equal(value, local.state_dict()[name]) for name, value in head.state_dict().items())
    assert offline.report
    assert (offline.report.bytes_moved, offline.report.notices) == (0, ())
    assert inspect(repo).as_dict() == inspect(base).as_dict()


def test_only_files_that_hold_something_needed_are_opened(hub: LoopbackHub, tmp_path: Path) -> None:
    others = [name for name in TRUNK if "layers.1" in name]
    shards = {
        ONE_OF_FOUR: others,
        "model-00002-of-00004.safetensors": [name for name in TRUNK if name not in others],
        HEAD_OF_FOUR: HEAD[:-1],
        "model_extra.safetensors": HEAD[-1:],
    }
    listed = {name: file for file, names in shards.items() for name in names if file != "model_extra.safetensors"}
    hub.publish(REPO, hub.files_of(write_checkpoint(tmp_path / "base", CONFIG, TENSORS, shards=shards, index=listed)))
    index = CheckpointIndex.open(REPO, need=needed_by_head)
    assert index.unread == {ONE_OF_FOUR}
    assert not asked_for(hub, ONE_OF_FOUR)
    assert set(HEAD) <= index.entries.keys(), "a file that the index leaves out is opened as well"
    assert set(CheckpointIndex.open(REPO).entries) == set(TENSORS)


def test_index_that_names_files_the_commit_lacks_is_told_and_no_such_file_is_asked_for(
    hub: LoopbackHub, base: Path
) -> None:
    files = hub.files_of(base)
    del files[THREE]
    hub.publish(REPO, files)
    with pytest.raises(BrokenCheckpointError, match=THREE):
        mz.load_head(REPO)
    assert not asked_for(hub, THREE)


def test_index_that_leaves_the_repository_is_refused_before_anything_else_is_asked_for(
    hub: LoopbackHub, base: Path
) -> None:
    files = hub.files_of(base)
    files[INDEX_NAME] = json.dumps({"weight_map": {FC: "../../other/private/model.safetensors"}}).encode()
    hub.publish(REPO, files)
    with pytest.raises(UnsafeCheckpointError, match="outside the checkpoint's directory"):
        mz.load_head(REPO)
    assert not any("private" in request.path for request in hub.requests)


def test_head_of_one_file_without_index(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.publish(REPO, hub.files_of(write_checkpoint(tmp_path / "base", CONFIG, TENSORS)))
    assert CheckpointIndex.open(REPO, need=needed_by_head).names == set(TENSORS)
    assert inspect(REPO).loads


def test_pickles_and_nothing_are_refused_as_in_a_directory(hub: LoopbackHub, base: Path) -> None:
    config = {"config.json": (base / "config.json").read_bytes()}
    hub.publish("acme/pickled", {**config, "pytorch_model.bin": b"pickle"})
    hub.publish("acme/empty", config)
    hub.publish("acme/nameless", {"model.safetensors": b"x"})
    with pytest.raises(UnsafeCheckpointError, match=r"pickled \(pytorch_model.bin\)"):
        CheckpointIndex.open("acme/pickled")
    with pytest.raises(SourceNotFoundError, match=r"no \*.safetensors file"):
        CheckpointIndex.open("acme/empty")
    with pytest.raises(ModelConfigError):
        CheckpointIndex.open("acme/nameless")


def test_committed_lfs_pointer_and_truncated_file_are_corrupt_files(hub: LoopbackHub, base: Path) -> None:
    files = hub.files_of(base)
    hub.publish(REPO, {**files, TWO: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"})
    with pytest.raises(BrokenCheckpointError, match=f"{TWO}: it is a git-lfs pointer"):
        mz.load_head(REPO)
    hub.publish(REPO, {**files, TWO: files[TWO][:-1]})
    with pytest.raises(BrokenCheckpointError, match=f"{TWO}: .*truncated"):
        mz.load_head(REPO)


def test_header_longer_than_the_first_request_takes_a_second(
    hub: LoopbackHub, repo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtp_zoo.hub_storage.FIRST_BYTES", 100)
    assert set(CheckpointIndex.open(repo).entries) == set(TENSORS)


def test_revisions_and_what_the_cache_remembers_of_them(
    hub: LoopbackHub, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = hub.files_of(base)
    old = hub.publish(REPO, files, "v1")
    new = hub.publish(REPO, {**files, "tokenizer.json": b"[]"})
    assert [CheckpointIndex.open(REPO, revision=name).revision for name in ("v1", old, None, new)] == [
        old,
        old,
        new,
        new,
    ]
    hub.forget()
    CheckpointIndex.open(REPO, revision=old)
    assert hub.requests == [], "a commit never changes"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert [CheckpointIndex.open(REPO, revision=name).revision for name in ("v1", old, None)] == [old, old, new]
    with pytest.raises(SourceNotFoundError, match="'v2'"):
        CheckpointIndex.open(REPO, revision="v2")


def test_small_file_of_a_revision_is_the_revisions_own(hub: LoopbackHub, base: Path) -> None:
    files = hub.files_of(base)
    old = hub.publish(REPO, {**files, "tokenizer.json": b"[1]"}, "v1")
    hub.publish(REPO, {**files, "tokenizer.json": b"[2]"})
    path = CheckpointIndex.open(REPO, revision="v1").storage.small_file("tokenizer.json")
    assert path is not None
    assert path.read_bytes() == b"[1]"
    fetched = [request.path for request in hub.requests if request.path.endswith("tokenizer.json")]
    assert {path.split("/")[-2] for path in fetched} == {old}


def test_branch_that_moved_is_read_anew(hub: LoopbackHub, repo: str, base: Path) -> None:
    CheckpointIndex.open(repo)
    commit = hub.publish(REPO, {**hub.files_of(base), "tokenizer.json": b"[]"})
    index = CheckpointIndex.open(repo)
    assert index.revision == commit
    assert isinstance(index.storage, HubStorage)
    tokenizer = index.storage.small_file("tokenizer.json")
    assert tokenizer is not None
    assert tokenizer.read_bytes() == b"[]"
    assert index.storage.small_file("vocab.json") is None


def test_repository_revision_or_permission_that_is_not_there(
    hub: LoopbackHub, repo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SourceNotFoundError, match="no such directory, and no repository 'acme/none' on the Hub"):
        CheckpointIndex.open("acme/none")
    with pytest.raises(SourceNotFoundError, match="'acme/tiny' has no such revision"):
        CheckpointIndex.open(repo, revision="v9")
    hub.repos[REPO].readers, hub.repos[REPO].gated = {"hf_reader"}, True
    with pytest.raises(SourceNotFoundError, match=r"gated(.|\n)*hf auth login"):
        CheckpointIndex.open(repo)
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    CheckpointIndex.open(repo)


def test_token_goes_to_the_hub_and_never_to_its_storage(
    hub: LoopbackHub, repo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    hub.repos[REPO].readers = {"hf_reader"}
    mz.load_head(repo)
    assert {request.token for request in hub.requests if request.origin == "hub" and REPO in request.path} == {
        "hf_reader"
    }
    assert {request.token for request in hub.requests if request.origin == "cdn"} == {None}


def test_lost_connection_takes_the_cached_snapshot_and_says_so(
    hub: LoopbackHub, repo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtp_zoo.hub_http.FIRST_WAIT", 0.0)
    mz.load_head(repo)
    lose_connection(hub)
    head = mz.load_head(repo)
    assert head.report
    assert "may not be the newest" in head.report.notices[0]
    index = CheckpointIndex.open(repo)
    with pytest.raises(HubReadError, match=r"tokenizer.json(.|\n)*not on this machine"):
        index.storage.small_file("tokenizer.json")
    with pytest.raises(HubReadError, match="Opening 'acme/other': no such directory, and the Hub can't be asked"):
        CheckpointIndex.open("acme/other")


def test_offline_says_what_is_not_on_this_machine(hub: LoopbackHub, repo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    CheckpointIndex.open(repo, need=needed_by_head)
    monkeypatch.setattr("mtp_zoo.hub_storage.is_offline_mode", lambda: True)
    hub.forget()
    head_file = CheckpointIndex.open(repo, need=needed_by_head)
    size = head_file.storage._listing.files[TWO].size  # type: ignore[attr-defined]
    with pytest.raises(HubReadError, match=rf"bytes of {TWO}(.|\n)*HF_HUB_OFFLINE"):
        head_file.storage.fill(TWO, 0, memoryview(bytearray(size)))
    assert hub.requests == []


def test_snapshot_with_all_weights_is_a_directory(hub: LoopbackHub, repo: str) -> None:
    from huggingface_hub import snapshot_download

    root = Path(snapshot_download(repo))
    hub.forget()
    storage = CheckpointIndex.open(repo).storage
    assert isinstance(storage, LocalStorage)
    assert storage.root == root
    assert hub.sent("cdn") == 0
    (root / THREE).unlink()
    partly = CheckpointIndex.open(repo)
    assert isinstance(partly.storage, HubStorage)
    assert set(partly.entries) == set(TENSORS)
    partly.storage.fetch([ByteRange(TWO, 0, 10)])
    assert not asked_for(hub, TWO), "a file that is here is read here"


def test_export_onto_a_base_that_is_not_here_says_how_to_get_it(hub: LoopbackHub, repo: str, tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError, match=r"weights are on the Hub(.|\n)*hf download acme/tiny --revision"):
        mz.export(mz.load_head(repo), repo, tmp_path / "out")


def test_environment_of_another_process_is_enough(hub: LoopbackHub, repo: str, tmp_path: Path) -> None:
    code = (
        "from mtp_zoo.checkpoint import CheckpointIndex; "
        f"index = CheckpointIndex.open('{repo}'); print(len(index.entries), index.storage.bytes_moved > 0)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **hub.environment(tmp_path / "fresh")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout.split(), done.stderr) == ([str(len(TENSORS)), "True"], "")
