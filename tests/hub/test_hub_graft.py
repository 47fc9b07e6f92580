"""Grafts of a head that lies on the Hub: what is read for it, and that a mismatch costs no tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mtp_zoo as mz
from mtp_zoo.errors import GraftMismatchError
from mtp_zoo.inspection import inspect
from tests.exporting import CONFIG, HEAD, MIXED, TENSORS, TRUNK, same, stored
from tests.hub.loopback import LoopbackHub
from tests.tiny import tiny_config, tiny_tensors, write_checkpoint

REPO = "acme/tiny"
TOKENS = {"model": {"vocab": {"a": 0, "b": 1}}}


@pytest.fixture
def repo(hub: LoopbackHub, tmp_path: Path) -> str:
    root = write_checkpoint(tmp_path / "published", CONFIG, TENSORS, shards=MIXED)
    (root / "tokenizer.json").write_text(json.dumps(TOKENS))
    hub.publish(REPO, hub.files_of(root))
    return REPO


@pytest.fixture
def trunk(tmp_path: Path) -> Path:
    root = write_checkpoint(tmp_path / "trunk", CONFIG, {name: TENSORS[name] for name in TRUNK})
    (root / "tokenizer.json").write_text(json.dumps(TOKENS))
    return root


def test_headers_the_tokenizer_and_the_heads_bytes_are_read_and_no_more(
    hub: LoopbackHub, repo: str, trunk: Path, tmp_path: Path
) -> None:
    inspect(repo)
    headers = hub.sent("cdn")
    report = mz.graft(repo, trunk, tmp_path / "out")
    assert same(stored(tmp_path / "out"), TENSORS, [*TRUNK, *HEAD])
    assert len(report.notices) == 1, "the tokenizers were compared, and agree"
    assert 0 < hub.sent("cdn") - headers <= report.head_bytes
    assert [request.path for request in hub.requests if request.path.endswith("tokenizer.json")]


def test_two_models_are_told_apart_before_a_tensor_is_read(
    hub: LoopbackHub, repo: str, trunk: Path, tmp_path: Path
) -> None:
    inspect(repo)
    headers = hub.sent("cdn")
    (trunk / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"b": 0, "a": 1}}}))
    with pytest.raises(GraftMismatchError, match="tokens: 2 differ"):
        mz.graft(repo, trunk, tmp_path / "out")
    config = tiny_config(num_attention_heads=4)
    other = write_checkpoint(tmp_path / "other", config, tiny_tensors(config))
    with pytest.raises(GraftMismatchError, match="num_attention_heads"):
        mz.graft(repo, other, tmp_path / "out", revision="main")
    assert hub.sent("cdn") == headers
    assert not (tmp_path / "out").exists()
