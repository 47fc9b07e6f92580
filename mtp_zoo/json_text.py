"""JSON that came with a checkpoint, read without trusting it: its kind of file, its length, its shape, its names."""

from __future__ import annotations

import json
import re
import stat
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

SMALL = 1 << 20
"""Bytes of JSON that can't fill the memory, whatever is in them."""

BYTES_A_CONTAINER = 8
"""Least length of text for each list or table in a longer one. An empty list takes 3 bytes of text and 64 of memory; a row of
a header, the densest text that is meant to be read, has 3 containers in 50 bytes or more."""

CONTROLS = re.compile("[\0-\x1f\x7f-\x9f]")
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_bounded(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Raises:
        OSError: it can't be read.
        ValueError: it is a device, a pipe or a folder (never opened: a pipe would block), or longer; in words.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    if status.st_size > limit:
        raise ValueError(f"it has {status.st_size} bytes, the limit is {limit}")
    with path.open("rb") as stream:
        return stream.read(status.st_size)


def parse_json(raw: bytes, *, unique: bool = False) -> Any:
    """The value of a JSON text in UTF-8.

    Args:
        raw: the text.
        unique: refuse a table that has a name twice; of such a table readers take the first, the last, or both.

    Raises:
        ValueError: no JSON, a name twice, a text that is no valid Unicode, or one made to fill the memory; in words.
        RecursionError: nested too deep.
    """
    containers = raw.count(b"[") + raw.count(b"{")
    if len(raw) > SMALL and containers * BYTES_A_CONTAINER > len(raw):
        raise ValueError(f"{containers} lists and tables in {len(raw)} bytes")
    text = raw.decode("utf-8")
    value = json.loads(text)
    if unique and _pairs(value) != text.count(":"):
        value = json.loads(text, object_pairs_hook=_unique)  # a name twice, or only a colon in some text
    if SURROGATE.search(text):
        _refuse_halves(value)
    return value


FLOATS = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}
"""Numbers that JSON has not, as transformers writes them into config.json: {"__float__": "Infinity"}."""


def decode_floats(value: Any) -> Any:
    """Return a JSON value with transformers' spelling of numbers that JSON has not as floats.

    Example: {"limit": {"__float__": "Infinity"}} is {"limit": inf}.
    """
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        if table.keys() == {"__float__"} and table["__float__"] in FLOATS:
            return FLOATS[table["__float__"]]
        return {name: decode_floats(inner) for name, inner in table.items()}
    return [decode_floats(inner) for inner in cast("list[Any]", value)] if isinstance(value, list) else value


def _refuse_halves(value: Any) -> None:
    """Half of a surrogate pair in a name would end every message that prints it."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("a text in it is not valid Unicode") from None


def _pairs(value: Any) -> int:
    """Names in a table and in the tables that it holds. Each took a colon: where the text has as many, none was dropped."""
    if type(value) is not dict:
        return 0
    table = cast("dict[str, Any]", value)
    return len(table) + sum(map(len, [inner for inner in table.values() if type(inner) is dict]))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"'{name}' occurs twice")
    return found


def parse_object(raw: bytes, *, unique: bool = False) -> dict[str, Any]:
    """`parse_json` of a text that must be a table.

    Raises:
        ValueError, RecursionError: see `parse_json`; also where it is another value.
    """
    value = parse_json(raw, unique=unique)
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {type(value).__name__}")
    return cast("dict[str, Any]", value)


def refuse_controls(names: Iterable[str]) -> None:
    """Refuse names that would steer the terminal on which a message prints them.

    Raises:
        ValueError: in words.
    """
    names = list(names)
    if "".join(names).isprintable():  # seldom false, and ten times as fast as the search
        return
    for name in names:
        if CONTROLS.search(name):
            raise ValueError(f"a control character in the name {name!r}")
