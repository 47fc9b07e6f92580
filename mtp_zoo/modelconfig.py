"""The model configuration (config.json) as a checkpoint stores it: flat, or nested under `text_config`.

Fields are read and written in the place where they are found, so a patched config keeps its shape.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mtp_zoo.errors import ModelConfigError
from mtp_zoo.json_text import decode_floats, parse_object, read_bounded

NESTED_KEY = "text_config"
CONFIG_LIMIT = 1 << 24
"""Longest config.json in bytes; the longest published ones list a million bytes of modules that are not quantised."""

SIZES = re.compile(r"_(size|dim|rank|heads|groups?|layers|experts)$")
"""Fields of a language model that something is allocated by, or counted up to."""

LARGEST = {"experts": 1 << 14, "layers": 1 << 14}
"""Largest of those that a head is built for, by the end of their names; the largest published ones are a tenth of it."""

LARGEST_SIZE = 1 << 24
NEVER_ZERO = ("hidden_size", "intermediate_size", "head_dim", "num_attention_heads", "num_key_value_heads")
"""Other sizes may be 0: configs say so of parts that a model does not have."""


@dataclass(frozen=True)
class ModelConfig:
    """A read-only view of one config.json.

    Attributes:
        raw: the whole file.
        path: where it was read, for messages.
    """

    raw: Mapping[str, Any]
    path: Path

    @classmethod
    def read(cls, directory: Path) -> ModelConfig:
        """Read `directory`/config.json.

        Raises:
            ModelConfigError: the file is missing, can't be read, is not JSON, or is no object.
        """
        path = directory / "config.json"
        remedy = "Point at the directory that holds the model's config.json, or restore that file."
        if not path.exists():
            raise ModelConfigError(f"Reading the model configuration: {path} does not exist.", remedy=remedy)
        try:
            raw = parse_object(read_bounded(path, CONFIG_LIMIT))
        except (OSError, ValueError, RecursionError) as error:
            raise ModelConfigError(f"Reading {path}: it can't be read as JSON ({error}).", remedy=remedy) from error
        nested = raw.get(NESTED_KEY, {})
        if not isinstance(nested, dict):
            raise ModelConfigError(
                f"Reading {path}: expected '{NESTED_KEY}' to be an object, got {type(nested).__name__}.", remedy=remedy
            )
        return cls(raw, path)

    @property
    def is_nested(self) -> bool:
        """Whether the language model's fields live under `text_config` (vision-language checkpoints)."""
        return NESTED_KEY in self.raw

    @property
    def text(self) -> Mapping[str, Any]:
        """The language model's own fields, numbers decoded; where nested, the outer dtype and tie flag fill gaps."""
        if not self.is_nested:
            return self._decoded
        outer = {key: self.raw[key] for key in ("dtype", "torch_dtype", "tie_word_embeddings") if key in self.raw}
        return {**outer, **self._decoded[NESTED_KEY]}

    @cached_property
    def _decoded(self) -> Mapping[str, Any]:
        return decode_floats(dict(self.raw))

    @property
    def model_types(self) -> tuple[str, ...]:
        """model_type of the language model, then of the whole, without repeats."""
        found = (self.text.get("model_type"), self.raw.get("model_type"))
        return tuple(dict.fromkeys(str(name) for name in found if name))

    @property
    def tied(self) -> bool:
        """Whether the config says that lm_head is the embedding; one that says nothing means that it is not.

        Raises:
            ModelConfigError: no boolean, or two places that disagree: transformers reads the outer, engines the inner.
        """
        return bool(self._agreed("tie_word_embeddings", "true, false", lambda value: isinstance(value, bool)))

    def count(self, field: str) -> int | None:
        """A non-negative count, or None where it is absent or null.

        Raises:
            ModelConfigError: a string, a float, a boolean, a negative number, or two places that disagree.
        """
        return self._agreed(field, "an integer >= 0", lambda value: type(value) is int and value >= 0)

    def refuse_impossible_sizes(self) -> None:
        """Refuse numbers by which nothing can be built, before somebody tries: a rotary table of 10^10 rows takes minutes.

        Raises:
            ModelConfigError: with every such field.
        """
        ends = ((field, SIZES.search(field)) for field in self.text)
        limits = {field: LARGEST.get(end[1], LARGEST_SIZE) for field, end in ends if end and "window" not in field}
        wrong = [
            f"'{field}': expected {int(field in NEVER_ZERO)} to {limit}, got {str(value)[:40]}"
            for field, limit in limits.items()
            if type(value := self.text[field]) is int and not int(field in NEVER_ZERO) <= value <= limit
        ]
        if wrong:
            raise ModelConfigError(
                f"Reading {self.path}: no model has such sizes.",
                remedy="Restore config.json from the original checkpoint.",
                problems=wrong,
            )

    def _agreed(self, field: str, expected: str, valid: Callable[[Any], bool]) -> Any | None:
        """The one value of `field` in the places that hold it, nulls left out."""
        given = {where: place[field] for where, place in self._places(self.raw) if place.get(field) is not None}
        for where, value in given.items():
            if not valid(value):
                raise ModelConfigError(
                    f"Reading {self.path}: expected '{where}{field}' to be {expected} or null, got {value!r}.",
                    remedy=f"Set '{where}{field}' to what the checkpoint holds.",
                )
        if len(set(given.values())) > 1:
            raise ModelConfigError(
                f"Reading {self.path}: '{field}' is {given[f'{NESTED_KEY}.']} in {NESTED_KEY} and {given['']} outside it.",
                remedy="Give both places the same value.",
            )
        return next(iter(given.values()), None)

    def _places(self, raw: Any) -> list[tuple[str, Any]]:
        """Where the language model's fields may stand in `raw`, by the prefix that messages give them; innermost last."""
        return [("", raw), (f"{NESTED_KEY}.", raw[NESTED_KEY])] if self.is_nested else [("", raw)]

    def with_value(self, field: str, value: object) -> dict[str, Any]:
        """A deep copy of the whole config in which `field` is `value`, in every place that held it.

        A field that stood nowhere goes under `text_config` where there is one, else to the top level.
        """
        patched = copy.deepcopy(dict(self.raw))
        places = [place for _, place in self._places(patched)]
        for place in [place for place in places if field in place] or places[-1:]:
            place[field] = value
        return patched
