"""Reading records: the text or the messages of every line of a jsonl file, or of every row of a datasets directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mtp_zoo.errors import DataError, EmptyDatasetError
from mtp_zoo.training.config import DataConfig

SHOWN_PROBLEMS = 20

RENDERED_WITH: dict[str, type] = {"tools": list, "documents": list, "chat_template_kwargs": dict}
"""Fields beside the messages that a chat template is rendered with, as OpenAI-compatible servers take them."""

REFUSED = ("functions", "chat_template")
"""Fields that would change the rendered text, and that nothing here honours."""

RESERVED = {"tools", "documents", "conversation", "chat_template", "tokenize", "add_generation_prompt", "return_dict"}
"""Arguments of `apply_chat_template` that `chat_template_kwargs` may not hold."""


class Record(NamedTuple):
    """One record.

    Attributes:
        place: where it stands, such as "line 3".
        value: its text or its messages.
        options: what the chat template is rendered with beside the messages; see `template_options`.
    """

    place: str
    value: Any
    options: Mapping[str, Any] = {}


def read_records(path: Path, config: DataConfig) -> list[Record]:
    """The text or the messages of every record.

    Raises:
        DataError: the file can't be read, or records are malformed; all are listed by their place.
        EmptyDatasetError: there are no records.
    """
    field = config.text_field or config.messages_field or ""
    source = _read_jsonl(path) if config.kind == "jsonl" else _read_dataset(path, field)
    judge = _text_complaint if config.messages_field is None else _messages_complaint

    def complaint(record: Mapping[str, Any]) -> str | None:
        return judge(record[field]) or (None if config.messages_field is None else options_complaint(record))

    records: list[Record] = []
    problems: list[str] = []
    for place, record, problem in source:
        problem = problem or _record_complaint(record, field) or complaint(record)
        if problem is None:
            chat = config.messages_field is not None
            records.append(Record(place, record[field], template_options(record) if chat else {}))
        else:
            problems.append(f"{place}: {problem}")
    if problems:
        raise DataError(
            f"Reading {path}: {len(problems)} malformed records among {len(records) + len(problems)}.",
            remedy="Mend or remove the listed records.",
            problems=capped(problems),
        )
    if not records:
        raise EmptyDatasetError(f"Reading {path}: no records.", remedy="Give a file with at least one record.")
    return records


def template_options(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a chat record asks its template to be rendered with: `tools`, `documents`, `chat_template_kwargs`.

    Example: {"messages": [..], "tools": [t], "chat_template_kwargs": {"enable_thinking": False}} gives
    {"tools": [t], "enable_thinking": False}.
    """
    given = {name: _decoded(record[name]) for name in RENDERED_WITH if record.get(name) is not None}
    return {**given.pop("chat_template_kwargs", {}), **given}


def options_complaint(record: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the fields that a chat record is rendered with, or None."""
    refused = [name for name in REFUSED if record.get(name) is not None]
    if refused:
        return f"fields {refused} would change the rendered text and are not supported; expected {list(RENDERED_WITH)}"
    for name, kind in RENDERED_WITH.items():
        value = _decoded(record.get(name))
        if value is not None and not isinstance(value, kind):
            return f"{name}: expected a {kind.__name__}, got {type(value).__name__}"
    own = sorted(RESERVED & {*(_decoded(record.get("chat_template_kwargs")) or {})})
    return f"chat_template_kwargs: {own} are set by the reader" if own else None


def _decoded(value: Any) -> Any:
    """Tables hold nested values of varying shape as JSON text."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            return value
    return value


def capped(problems: list[str]) -> list[str]:
    """The first problems, and how many more there are."""
    rest = len(problems) - SHOWN_PROBLEMS
    return problems if rest <= 0 else [*problems[:SHOWN_PROBLEMS], f"... and {rest} more"]


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any, str | None]]:
    """(place, record, what is wrong) of every line that is not blank.

    Read here and not through datasets, whose reader stops at the first bad line and gives messages keys that they lack.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    yield f"line {number}", json.loads(line), None
                except (UnicodeDecodeError, json.JSONDecodeError) as error:
                    yield f"line {number}", None, f"not JSON ({error})"
    except OSError as error:
        raise DataError(f"Reading {path}: {error.strerror}.", remedy="Give the path of a .jsonl file.") from error


def _read_dataset(path: Path, field: str) -> Iterator[tuple[str, Any, str | None]]:
    from datasets import Dataset, load_from_disk

    try:
        dataset = load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as error:
        raise DataError(
            f"Reading {path}: not a datasets directory ({error}).", remedy="Write it with Dataset.save_to_disk."
        ) from error
    if not isinstance(dataset, Dataset):
        raise DataError(
            f"Reading {path}: expected one dataset, got the splits {sorted(map(str, dataset))}.",
            remedy="Give the path of one split, a directory inside this one.",
        )
    if field not in dataset.column_names:
        raise DataError(
            f"Reading {path}: expected a column '{field}', got {dataset.column_names}.",
            remedy="Name a column that exists.",
        )
    beside = [name for name in (*RENDERED_WITH, *REFUSED) if name in dataset.column_names]
    for number, row in enumerate(dataset.select_columns([field, *beside])):
        yield f"row {number}", _without_none(row), None


def _without_none(value: Any) -> Any:
    """Arrow gives every message all keys that any message has; the ones that it lacked are None."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _record_complaint(record: object, field: str) -> str | None:
    if not isinstance(record, Mapping):
        return f"expected an object, got {type(record).__name__}"
    return None if field in record else f"expected a field '{field}', got {sorted(map(str, record))}"


def _text_complaint(value: object) -> str | None:
    return None if isinstance(value, str) else f"expected text, got {type(value).__name__}"


def _messages_complaint(value: object) -> str | None:
    if not isinstance(value, list) or not value:
        return f"expected a list of messages, got {'an empty list' if value == [] else type(value).__name__}"
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"message {number}: expected an object with a role, got {str(message)[:60]}"
        if message.get("content") is None and not message.get("tool_calls"):
            return f"message {number}: expected content or tool_calls, got {sorted(map(str, message))}"
    return None
