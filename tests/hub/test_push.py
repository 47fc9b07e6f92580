"""push: only what differs travels, in one commit on top of the state that was compared; nothing else leaves the machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import mtp_zoo as mz
from mtp_zoo.cli import app
from mtp_zoo.errors import BrokenCheckpointError, ChangedOnHubError, PushError, SourceNotFoundError, VerificationError
from mtp_zoo.inspection import inspect
from tests.exporting import ONE, THREE, make_base
from tests.hub.loopback import LoopbackHub

REPO = "acme/tiny"
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's way of uploading


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_base(tmp_path / "base")


@pytest.fixture(autouse=True)
def token(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_writer")


def content(hub: LoopbackHub, branch: str = "main") -> dict[str, bytes]:
    repo = hub.repos[REPO]
    return {path: blob.data for path, blob in repo.commits[repo.branches[branch]].items()}


def received(hub: LoopbackHub) -> int:
    """Bytes of files that came in; what is said about them is a few hundred bytes a file."""
    return sum(request.received for request in hub.requests if request.method == "PUT")


def test_first_push_makes_the_repository_and_the_second_sends_nothing(hub: LoopbackHub, base: Path) -> None:
    (base / ".secret").write_text("stays")
    (base / ".mtp-zoo-undo").mkdir()
    (base / ".mtp-zoo-undo" / "old.safetensors").write_bytes(b"stays")
    first = mz.push(base, REPO)
    files = {file: data for file, data in hub.files_of(base).items() if not file.startswith(".")}
    assert content(hub) == files
    assert (set(first.uploaded), first.unchanged, first.commit) == (set(files), 0, hub.repos[REPO].branches["main"])
    assert first.bytes_uploaded == sum(map(len, files.values()))
    hub.forget()
    second = mz.push(base, REPO)
    assert (second.uploaded, second.deleted, second.unchanged) == ((), (), len(files))
    assert (second.commit, second.url) == (first.commit, None)
    assert {request.method for request in hub.requests} == {"GET"}
    assert inspect(REPO).loads


def test_one_changed_shard_is_all_that_travels(hub: LoopbackHub, base: Path, tmp_path: Path) -> None:
    mz.push(base, REPO)
    before = hub.repos[REPO].branches["main"]
    head = mz.load_head(base)
    for parameter in head.parameters():
        parameter.data.add_(1)
    mz.export(head, base, tmp_path / "out")
    hub.forget()
    report = mz.push(tmp_path / "out", REPO)
    assert ONE not in report.uploaded
    assert THREE in report.deleted, "engines read every weight file, so a stale one must go"
    assert received(hub) == sum(
        (tmp_path / "out" / file).stat().st_size
        for file in report.uploaded
        if "safetensors" in file and "index" not in file
    )
    assert content(hub) == hub.files_of(tmp_path / "out")
    assert len(hub.repos[REPO].commits) == 3, "an empty one, the first push, and this one"
    assert before in hub.repos[REPO].commits


def test_file_that_only_the_repository_has_stays(hub: LoopbackHub, base: Path) -> None:
    hub.publish(
        REPO, {**hub.files_of(base), "LICENSE": b"mine", "extra/old.safetensors": b"mine", "stale.safetensors": b"x"}
    )
    report = mz.push(base, REPO)
    assert report.deleted == ("stale.safetensors",)
    assert {"LICENSE", "extra/old.safetensors"} <= content(hub).keys()


def test_dry_run_sends_nothing(hub: LoopbackHub, base: Path) -> None:
    fresh = mz.push(base, REPO, dry_run=True)
    assert (fresh.commit, fresh.unchanged, REPO in hub.repos) == (None, 0, False)
    hub.publish(REPO, {**hub.files_of(base), "config.json": b"{}", "stale.safetensors": b"x"})
    hub.forget()
    report = mz.push(base, REPO, dry_run=True)
    assert (report.uploaded, report.deleted) == (("config.json",), ("stale.safetensors",))
    assert {request.method for request in hub.requests} == {"GET"}
    shown = CliRunner().invoke(app, ["push", str(base), REPO, "--dry-run"])
    assert "would be uploaded: config.json" in shown.stdout
    data = json.loads(CliRunner().invoke(app, ["push", str(base), REPO, "--dry-run", "--json"]).stdout)
    assert (data["uploaded"], data["dry_run"]) == (["config.json"], True)


def test_pull_request_leaves_the_branch_as_it_is(hub: LoopbackHub, base: Path) -> None:
    commit = hub.publish(REPO, {"config.json": b"{}"})
    report = mz.push(base, REPO, create_pr=True)
    assert hub.repos[REPO].branches["main"] == commit
    assert content(hub, "refs/pr/1") == hub.files_of(base)
    assert report.url is not None
    assert report.url.endswith("/discussions/1")


def test_private_repository(hub: LoopbackHub, base: Path) -> None:
    mz.push(base, REPO, private=True)
    assert hub.repos[REPO].readers == {"hf_writer"}


def test_commit_of_somebody_else_meanwhile_is_not_overwritten(hub: LoopbackHub, base: Path) -> None:
    hub.publish(REPO, {"config.json": b"{}"})
    hub.before_commit = lambda: hub.publish(REPO, {"config.json": b"[]"})
    with pytest.raises(ChangedOnHubError, match="another commit was made there meanwhile"):
        mz.push(base, REPO)
    assert content(hub) == {"config.json": b"[]"}


@pytest.mark.parametrize(("status", "message"), [(403, "Pushing .* to 'acme/tiny'"), (413, "acme/tiny")])
def test_refusal_is_told_and_changes_nothing(hub: LoopbackHub, base: Path, status: int, message: str) -> None:
    hub.publish(REPO, {"config.json": b"{}"})
    hub.fail("POST hub .*/commit/", "status", status=status)
    with pytest.raises(PushError, match=f"{message}(.|\n)*as it was"):
        mz.push(base, REPO)
    assert content(hub) == {"config.json": b"{}"}


def test_upload_that_fails_is_told_and_changes_nothing(hub: LoopbackHub, base: Path) -> None:
    hub.publish(REPO, {"config.json": b"{}"})
    hub.fail("PUT cdn", "status", times=100, status=403)
    with pytest.raises(PushError, match=r"Error while uploading 'model-.*403(.|\n)*as it was"):
        mz.push(base, REPO)
    assert content(hub) == {"config.json": b"{}"}


def test_branch_that_is_not_there_is_told(hub: LoopbackHub, base: Path) -> None:
    hub.publish(REPO, {"config.json": b"{}"})
    with pytest.raises(SourceNotFoundError, match="has no such revision"):
        mz.push(base, REPO, revision="v2")


def test_checkpoint_that_is_not_whole_is_not_published(hub: LoopbackHub, base: Path) -> None:
    (base / THREE).unlink()
    with pytest.raises(BrokenCheckpointError):
        mz.push(base, REPO)
    assert hub.requests == []


def test_checkpoint_that_is_not_what_its_record_says_is_not_published(
    hub: LoopbackHub, base: Path, tmp_path: Path
) -> None:
    mz.export(mz.load_head(base), base, tmp_path / "out")
    record = tmp_path / "out" / "mtp_zoo.json"
    text = record.read_text()
    digest = next(iter(json.loads(text)["tensors"].values()))["sha256"]
    record.unlink()
    record.write_text(text.replace(digest, "0" * 64))
    with pytest.raises(VerificationError, match=r"not what its mtp_zoo.json says"):
        mz.push(tmp_path / "out", REPO)
    assert hub.requests == []


def test_link_to_a_file_of_the_machine_is_not_published(hub: LoopbackHub, base: Path, tmp_path: Path) -> None:
    (tmp_path / "id_rsa").write_text("private")
    (base / "notes.txt").symlink_to(tmp_path / "id_rsa")
    with pytest.raises(mz.MTPZooError, match="lead out of it"):
        mz.push(base, REPO)
    assert hub.requests == []


def test_checkpoint_on_the_hub_must_be_here_first(hub: LoopbackHub, base: Path) -> None:
    hub.publish(REPO, hub.files_of(base))
    with pytest.raises(SourceNotFoundError, match="hf download acme/tiny"):
        mz.push(REPO, "acme/copy")
