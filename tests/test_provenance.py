"""`mtp_zoo.json` and the model card, as an export writes them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mtp_zoo.exporter import export
from mtp_zoo.loader import load_head
from mtp_zoo.provenance import FORMAT, RECORD_LIMIT, encode_record, read_record
from mtp_zoo.version import __version__
from tests.exporting import HEAD, ONE, TWO, make_base, train
from tests.tiny import tiny_config, tiny_tensors, write_checkpoint

COMMIT = "c" * 40


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_base(tmp_path / "base")


def record_of(root: Path) -> dict[str, Any]:
    return json.loads((root / "mtp_zoo.json").read_text())


def header_digest(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.sha256(content[: 8 + int.from_bytes(content[:8], "little")]).hexdigest()


def test_record_says_what_every_part_is(base: Path, tmp_path: Path) -> None:
    export(train(load_head(base)), base, tmp_path / "out", training={"steps": 3})
    record = record_of(tmp_path / "out")
    assert list(record) == [
        "format",
        "mtp_zoo",
        "family",
        "depths",
        "conventions",
        "engine",
        "head_bytes",
        "base",
        "head",
        "training",
        "tensors",
        "trunk",
    ]
    assert (record["format"], record["mtp_zoo"], record["head"]) == (1, __version__, None)
    assert sorted(record["tensors"]) == HEAD
    assert record["trunk"] == {
        ONE: {"header_sha256": header_digest(base / ONE)},
        TWO: {"header_sha256": header_digest(tmp_path / "out" / TWO)},
    }
    assert header_digest(tmp_path / "out" / TWO) != header_digest(base / TWO), "it lost its part of the head"
    assert read_record(tmp_path / "out" / "mtp_zoo.json") == record


def test_record_says_where_a_head_came_from_that_is_not_the_bases(base: Path, tmp_path: Path) -> None:
    other = tmp_path / "models--acme--tiny" / "snapshots" / COMMIT
    config = tiny_config()
    write_checkpoint(other, config, tiny_tensors(config, seed=7))
    export(load_head(other.parent.parent), base, tmp_path / "out")
    told = {"source": str(other.parent.parent), "path": str(other), "revision": COMMIT}
    assert record_of(tmp_path / "out")["head"] == told
    assert f"| head taken from | acme/tiny at {COMMIT} |" in (tmp_path / "out" / "README.md").read_text()


def test_card_of_the_base_comes_along_with_a_section_that_the_next_export_replaces(base: Path, tmp_path: Path) -> None:
    (base / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    export(load_head(base), base, tmp_path / "one", training={"steps": 3})
    export(load_head(tmp_path / "one"), tmp_path / "one", tmp_path / "two", training={"steps": 4})
    one, two = ((tmp_path / out / "README.md").read_text() for out in ("one", "two"))
    assert (base / "README.md").read_text() == "---\nlicense: mit\n---\n# Mine\n"
    assert one.startswith("---\nlicense: mit\n---\n# Mine\n\n<!-- mtp_zoo: begin -->\n")
    assert "| training: steps | 3 |" in one
    assert two.replace("steps | 4", "steps | 3").replace("trunk | one", "trunk | base") == one


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "can't be read"),
        (b"[]", "expected an object"),
        (b'{"format":1,"format":1}', "occurs twice"),
        (b"[" * 100_000, "recursion"),
        (b"{}", "has format None"),
        (b'{"format": 2}', f"has format 2, this version of mtp_zoo reads {FORMAT}"),
        (b'{"format": 1, "trunk": {}}', "holds no table of tensors"),
        (b'{"format": 1, "tensors": {"a": 1}, "trunk": {}}', "holds no table of tensors"),
        (b'{"format": 1, "tensors": {}, "trunk": []}', "holds no table of trunk"),
    ],
)
def test_record_that_can_not_be_held_against_anything_says_why(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "mtp_zoo.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"^mtp_zoo.json .*{says}"):
        read_record(tmp_path / "mtp_zoo.json")


def test_record_over_the_limit_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "mtp_zoo.json").open("wb") as stream:
        stream.truncate(RECORD_LIMIT + 1)
    with pytest.raises(ValueError, match="the limit"):
        read_record(tmp_path / "mtp_zoo.json")


def test_record_is_for_people_too() -> None:
    record: Mapping[str, Any] = {"format": 1, "tensors": {}, "trunk": {}, "training": {"data": "Übung"}}
    assert '\n  "training": {\n    "data": "Übung"' in encode_record(record)
