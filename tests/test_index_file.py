"""The index file: hostile paths, and content that is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mtp_zoo.errors import BrokenCheckpointError, UnsafeCheckpointError
from mtp_zoo.index_file import INDEX_NAME, encode_index, read_index


def write(root: Path, text: str | bytes) -> None:
    (root / INDEX_NAME).write_bytes(text.encode() if isinstance(text, str) else text)


def test_written_index_is_read_back(tmp_path: Path) -> None:
    text = encode_index({"b": "two.safetensors", "a": "sub/one.safetensors"}, {"total_size": 7})
    write(tmp_path, text)
    assert read_index(tmp_path) == (
        len(text),
        {"a": "sub/one.safetensors", "b": "two.safetensors"},
        {"total_size": 7},
    )


def test_no_index_is_none(tmp_path: Path) -> None:
    assert read_index(tmp_path) == (0, None, {})


def test_paths_are_normalised(tmp_path: Path) -> None:
    write(tmp_path, encode_index({"a": "./one.safetensors", "b": "sub//two.safetensors"}, {}))
    assert read_index(tmp_path).weight_map == {"a": "one.safetensors", "b": "sub/two.safetensors"}


@pytest.mark.parametrize(
    "path",
    [
        "../other/model.safetensors",
        "sub/../../model.safetensors",
        "/etc/passwd",
        "..\\model.safetensors",
        "C:model.safetensors",
        "model.safetensors\0.txt",
    ],
)
def test_path_that_leaves_the_directory_is_unsafe(tmp_path: Path, path: str) -> None:
    write(tmp_path, encode_index({"mtp.fc.weight": path}, {}))
    with pytest.raises(UnsafeCheckpointError, match=r"'mtp\.fc\.weight'.*outside"):
        read_index(tmp_path)


def test_folder_that_links_out_of_the_directory_is_unsafe(tmp_path: Path) -> None:
    root = tmp_path / "model"
    root.mkdir()
    os.symlink(tmp_path, root / "sub")
    write(root, encode_index({"a": "sub/model.safetensors"}, {}))
    with pytest.raises(UnsafeCheckpointError, match="outside"):
        read_index(root)


def test_listed_pickle_is_unsafe(tmp_path: Path) -> None:
    write(tmp_path, encode_index({"a": "pytorch_model.bin"}, {}))
    with pytest.raises(UnsafeCheckpointError, match="run code"):
        read_index(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("{", "Expecting"),
        (b"\xff", "decode"),
        ("[" * 100_000, "recursion"),
        ("[]", "expected an object, got list"),
        ("{}", "holds no 'weight_map'"),
        ('{"weight_map": {}}', "holds no 'weight_map'"),
        ('{"weight_map": ["a"]}', "holds no 'weight_map'"),
        ('{"weight_map": {"a": null}}', "the file of 'a' is None"),
        ('{"weight_map": {"a": ""}}', "the file of 'a' is ''"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' occurs twice"),
        ("version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
    ],
)
def test_index_that_is_none_is_refused_with_its_reason(tmp_path: Path, text: str | bytes, reason: str) -> None:
    write(tmp_path, text)
    with pytest.raises(BrokenCheckpointError, match=f"{INDEX_NAME}: .*{reason}"):
        read_index(tmp_path)


def test_index_that_links_to_nothing_is_not_taken_for_no_index(tmp_path: Path) -> None:
    os.symlink("../blobs/gone", tmp_path / INDEX_NAME)
    with pytest.raises(BrokenCheckpointError, match="No such file"):
        read_index(tmp_path)
