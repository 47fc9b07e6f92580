"""What pydantic found wrong with a configuration, as one line a field: path, expected, got."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError


def describe_problems(error: ValidationError, model: type[BaseModel], data: object) -> list[str]:
    """One line for every field that is wrong.

    The members of a union each have their own complaint; they are joined under the field's path.

    Example:
        "optimizer.lr: expected greater than 0, got -1.0"
        "objective.depht: no such field; did you mean 'objective.depths'?"
    """
    expected: dict[str, list[str]] = {}
    got: dict[str, str] = {}
    for item in error.errors(include_url=False):
        path = ".".join(map(str, _real_path(item["loc"], data))) or "(top level)"
        kind, message = item["type"], item["msg"].removeprefix("Input should be ")
        if kind == "extra_forbidden":
            wish, got[path] = _unknown(path, model), ""
        elif kind == "missing":
            wish, got[path] = "expected a value, got none", ""
        elif kind == "value_error":
            wish, got[path] = message.removeprefix("Value error, "), ""
        else:
            wish = "a mapping" if kind in ("model_type", "dict_type") else message
            got[path] = f", got {_short(item['input'])}"
        expected.setdefault(path, []).append(wish)
    return [
        f"{path}: {'expected ' if got[path] else ''}{', or '.join(dict.fromkeys(wishes))}{got[path]}"
        for path, wishes in expected.items()
    ]


def _real_path(loc: Sequence[int | str], data: Any) -> list[int | str]:
    """The parts of `loc` that name fields and items; the others name members of a union.

    The last part may be a field or an item that `data` lacks.
    """
    path: list[int | str] = []
    for part in loc:
        item = isinstance(part, int)
        if (not item and isinstance(data, Mapping) and part in data) or (item and _has_item(data, part)):
            path.append(part)
            data = data[part]
        elif part == loc[-1] and (item or str(part).isidentifier()):
            path.append(part)
    return path


def _has_item(data: object, position: int) -> bool:
    return isinstance(data, list | tuple) and position < len(data)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _unknown(path: str, model: type[BaseModel]) -> str:
    """Close names in the same section first, then the same leaf name in another section."""
    known = list(_paths(model, ""))
    section, _, leaf = path.rpartition(".")
    here = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section}
    elsewhere = {name.rpartition(".")[2]: name for name in known}
    close = [here[name] for name in get_close_matches(leaf, here, n=1, cutoff=0.6)]
    close = close or [elsewhere[name] for name in get_close_matches(leaf, elsewhere, n=1, cutoff=0.8)]
    return (
        f"no such field; did you mean '{close[0]}'?" if close else f"no such field; expected one of {', '.join(here)}"
    )


def _paths(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _paths(field.annotation, f"{prefix}{name}.")
