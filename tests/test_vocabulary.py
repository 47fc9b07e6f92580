"""Tokens and ids of two checkpoints, read from their tokenizer files and compared."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mtp_zoo.checkpoint import CheckpointIndex
from mtp_zoo.vocabulary import Vocabulary, compare_vocabularies, read_vocabulary, some
from tests.exporting import CONFIG, TENSORS
from tests.tiny import write_checkpoint


def vocabulary(ids: dict[str, int], *added: str) -> Vocabulary:
    return Vocabulary(ids, frozenset(ids[token] for token in added))


LEFT = vocabulary({"a": 0, "b": 1, "<x>": 2}, "<x>")


@pytest.mark.parametrize(
    ("right", "conflicts", "renamed", "only_left", "only_right"),
    [
        (LEFT, (), (), (), ()),
        (vocabulary({"a": 0, "b": 1, "<x>": 2, "<z>": 3}, "<x>", "<z>"), (), (), (), ("<z>",)),
        (vocabulary({"a": 0, "b": 1}), (), (), ("<x>",), ()),
        (vocabulary({"a": 0, "b": 1, "<y>": 2}, "<y>"), (), (2,), (), ()),
        (vocabulary({"a": 0, "b": 1, "y": 2}), ("2 is '<x>' and 'y'",), (), (), ()),
        (vocabulary({"b": 0, "a": 1, "<x>": 2}, "<x>"), ("'a' is 0 and 1", "'b' is 1 and 0"), (), (), ()),
        (vocabulary({"a": 0, "<x>": 1, "b": 2}, "<x>"), ("'<x>' is 2 and 1", "'b' is 1 and 2"), (), (), ()),
        (vocabulary({"a": 0, "c": 1, "<y>": 2, "<z>": 3}, "<y>", "<z>"), ("1 is 'b' and 'c'",), (2,), (), ("<z>",)),
    ],
)
def test_what_two_sides_mean_by_a_token(
    right: Vocabulary, conflicts: Any, renamed: Any, only_left: Any, only_right: Any
) -> None:
    found = compare_vocabularies(LEFT, right)
    assert (found.conflicts, found.renamed, found.only_left, found.only_right) == (
        conflicts,
        renamed,
        only_left,
        only_right,
    )


ADDED = [{"id": 2, "content": "<x>", "special": True}]


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"tokenizer.json": {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": ADDED}}, {"a": 0, "b": 1, "<x>": 2}),
        ({"tokenizer.json": {"model": {"vocab": [["a", -1.5], ["b", -2.0]]}}}, {"a": 0, "b": 1}),
        ({"vocab.json": {"a": 0, "b": 1}, "added_tokens.json": {"<x>": 2}}, {"a": 0, "b": 1, "<x>": 2}),
        ({"vocab.json": {"a": 0}}, {"a": 0}),
        ({"vocab.json": {"z": 0}, "tokenizer.json": {"model": {"vocab": {"a": 0}}}}, {"a": 0}),
        ({}, None),
        ({"tokenizer.json": {}}, None),
        ({"tokenizer.json": {"model": {"vocab": {"a": "0"}}}}, None),
        ({"tokenizer.json": {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 2}]}}, None),
        ({"tokenizer.json": []}, None),
        ({"tokenizer.json": "broken"}, None),
        ({"tokenizer.json": "deep"}, None),
    ],
)
def test_every_published_form_is_read_and_what_is_none_is_not(
    files: dict[str, Any], ids: dict[str, int] | None, tmp_path: Path
) -> None:
    root = write_checkpoint(tmp_path, CONFIG, TENSORS)
    texts = {"broken": "{", "deep": "[" * 100_000}
    for name, content in files.items():
        (root / name).write_text(texts[content] if isinstance(content, str) else json.dumps(content))
    found = read_vocabulary(CheckpointIndex.open(root))
    assert (found.ids if found else None) == ids
    if ids and "<x>" in ids:
        assert found is not None
        assert found.added == {2}


def test_a_pipe_in_the_place_of_a_tokenizer_is_not_waited_for(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path, CONFIG, TENSORS)
    os.mkfifo(root / "tokenizer.json")
    assert read_vocabulary(CheckpointIndex.open(root)) is None


def test_a_sentence_names_a_few_of_many() -> None:
    assert some([1, 2, 3]) == "1, 2, 3"
    assert some([1, 2, 3, 4]) == "1, 2, 3, .."
