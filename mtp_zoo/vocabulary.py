"""Whether two checkpoints mean the same tokens by the same ids, by their tokenizer files; no tokenizer is built.

tokenizer.json                  the model's vocabulary (a table, or a list whose places are the ids) and the added tokens
vocab.json, added_tokens.json   the older pair; read where there is no tokenizer.json
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from mtp_zoo.checkpoint import CheckpointIndex
from mtp_zoo.json_text import parse_object, read_bounded

READ_LIMIT = 1 << 28
"""Bytes of a tokenizer file up to which it is read; a vocabulary of 250,000 tokens with its merges takes about 2 ** 25."""

EXAMPLES = 3
"""How many of many tokens a sentence names."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of one checkpoint.

    Attributes:
        ids: text of a token -> its id, added tokens included.
        added: ids of the added tokens.
    """

    ids: Mapping[str, int]
    added: frozenset[int]

    @property
    def tokens(self) -> dict[int, str]:
        """id -> text."""
        return {number: token for token, number in self.ids.items()}


@dataclass(frozen=True)
class Comparison:
    """Two vocabularies, side by side.

    Attributes:
        conflicts: tokens with two ids, and ids with two tokens, in words.
        renamed: ids that both sides keep for added tokens, under texts that the other side lacks: reserved places, put to use.
        only_left, only_right: tokens that the other side lacks, sorted by id; renamed ones are not among them.
    """

    conflicts: tuple[str, ...]
    renamed: tuple[int, ...]
    only_left: tuple[str, ...]
    only_right: tuple[str, ...]


def read_vocabulary(index: CheckpointIndex) -> Vocabulary | None:
    """The vocabulary of a checkpoint; None where no file that can be read describes one."""
    whole = _read(index, "tokenizer.json")
    if whole is not None:
        model: Any = whole.get("model")
        found = _model_ids(model.get("vocab") if isinstance(model, dict) else None)
        added = [one for one in _list(whole.get("added_tokens")) if isinstance(one, dict)]
        return _checked(found, {one.get("content"): one.get("id") for one in added})
    plain = _read(index, "vocab.json")
    return None if plain is None else _checked(plain, _read(index, "added_tokens.json") or {})


def compare_vocabularies(left: Vocabulary, right: Vocabulary) -> Comparison:
    """What the two sides mean by tokens and ids.

    Worked example: left {"a": 0, "b": 1, "<x>": 2}, right {"a": 0, "c": 1, "<y>": 2, "<z>": 3}, with 2 and 3 added tokens where
    they are: id 1 is a conflict, 2 is renamed, "<z>" is only right.
    """
    ours, theirs = left.tokens, right.tokens
    moved = sorted(token for token in left.ids.keys() & right.ids.keys() if left.ids[token] != right.ids[token])
    clashing = [
        number
        for number in sorted(ours.keys() & theirs.keys())
        if ours[number] not in right.ids and theirs[number] not in left.ids
    ]
    renamed = tuple(number for number in clashing if number in left.added & right.added)
    taken = set(clashing)
    return Comparison(
        conflicts=(
            *(f"{token!r} is {left.ids[token]} and {right.ids[token]}" for token in moved),
            *(f"{n} is {ours[n]!r} and {theirs[n]!r}" for n in clashing if n not in renamed),
        ),
        renamed=renamed,
        only_left=_lacking(ours, right.ids, taken),
        only_right=_lacking(theirs, left.ids, taken),
    )


def some(items: Sequence[object]) -> str:
    """The first few of many, in words."""
    named = ", ".join(map(str, items[:EXAMPLES]))
    return f"{named}, .." if len(items) > EXAMPLES else named


def _lacking(tokens: Mapping[int, str], others: Mapping[str, int], taken: set[int]) -> tuple[str, ...]:
    return tuple(tokens[number] for number in sorted(tokens) if tokens[number] not in others and number not in taken)


def _model_ids(vocab: Any) -> dict[Any, Any]:
    """A table of ids as it is; of a list of [token, score], places as ids."""
    if isinstance(vocab, dict):
        return cast("dict[Any, Any]", vocab)
    pairs = [pair for pair in _list(vocab) if isinstance(pair, list) and pair]
    return {pair[0]: number for number, pair in enumerate(cast("list[list[Any]]", pairs))}


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _checked(ids: Mapping[Any, Any], added: Mapping[Any, Any]) -> Vocabulary | None:
    """None where there is no token, or something that is none."""
    whole = {**ids, **added}
    if not whole or any(not isinstance(token, str) or type(number) is not int for token, number in whole.items()):
        return None
    return Vocabulary(whole, frozenset(added.values()))


def _read(index: CheckpointIndex, name: str) -> dict[str, Any] | None:
    path = index.storage.small_file(name)
    try:
        return None if path is None else parse_object(read_bounded(path, READ_LIMIT))
    except (OSError, ValueError, RecursionError):
        return None
