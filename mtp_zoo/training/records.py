"""Reading records: the text or the messages of every line of a jsonl file, or of every row of a datasets directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mtp_zoo.errors import DataError, EmptyDatasetError
from mtp_zoo.training.config import DataConfig

SHOWN_PROBLEMS = 20


class Record(NamedTuple):
    """One record's text or messages, and where it stands, such as "line 3"."""

    place: str
    value: Any


def read_records(path: Path, config: DataConfig) -> list[Record]:
    """The text or the messages of every record.

    Raises:
        DataError: the file can't be read, or records are malformed; all are listed by their place.
        EmptyDatasetError: there are no records.
    """
    field = config.text_field or config.messages_field or ""
    source = _read_jsonl(path) if config.kind == "jsonl" else _read_dataset(path, field)
    complaint = _text_complaint if config.messages_field is None else _messages_complaint
    records: list[Record] = []
    problems: list[str] = []
    for place, record, problem in source:
        problem = problem or _record_complaint(record, field) or complaint(record[field])
        if problem is None:
            records.append(Record(place, record[field]))
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
    for number, row in enumerate(dataset.select_columns(field)):
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
