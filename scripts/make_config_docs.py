"""Write the tables of configuration fields into docs/quickstart.md, from `TrainConfig.model_json_schema()`.

python scripts/make_config_docs.py            # rewrite the part between the two markers
python scripts/make_config_docs.py --check    # change nothing; exit with 1 where that part is stale
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from mtp_zoo.training.config import TrainConfig

PAGE = Path(__file__).parents[1] / "docs" / "quickstart.md"
START = "<!-- fields: written by scripts/make_config_docs.py -->"
END = "<!-- end of fields -->"
HEADER = ("| field | value | default | on resume | what it does |", "|--|--|--|--|--|")
LOWER = {"gt": ">", "ge": ">=", "exclusiveMinimum": ">", "minimum": ">="}
UPPER = {"lt": "<", "le": "<=", "exclusiveMaximum": "<", "maximum": "<="}
LIMITS = {**LOWER, **UPPER}
Schema: TypeAlias = Mapping[str, Any]


def main() -> int:
    """Rewrite the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page that holds the markers")
    arguments = parser.parse_args()
    old = arguments.page.read_text(encoding="utf-8")
    new = with_fields(old, TrainConfig.model_json_schema())
    if arguments.check and old != new:
        print(f"{arguments.page} is stale: run `python scripts/make_config_docs.py`.", file=sys.stderr)
        return 1
    if old != new:
        arguments.page.write_text(new, encoding="utf-8")
    return 0


def with_fields(page: str, schema: Schema) -> str:
    """`page` with the tables of `schema` between the markers.

    Raises:
        ValueError: the page lacks a marker, or holds one twice.
    """
    if page.count(START) != 1 or page.count(END) != 1 or page.index(END) < page.index(START):
        raise ValueError(f"expected one {START!r} with one {END!r} behind it")
    before, _, rest = page.partition(START)
    return before + START + "\n\n" + "\n".join(tables(schema)) + "\n" + END + rest.partition(END)[2]


def tables(schema: Schema) -> Iterator[str]:
    """One table for the top level, then one a section, in the order of the configuration."""
    sections = {name: part for name, part in schema["properties"].items() if "$ref" in part}
    yield from table("Top level", "", schema, leave_out=sections)
    for name, part in sections.items():
        section = schema["$defs"][part["$ref"].rpartition("/")[2]]
        yield from table(f"Section `{name}`", f"{name}.", section)


def table(title: str, prefix: str, section: Schema, *, leave_out: Mapping[str, object] | None = None) -> Iterator[str]:
    """Heading, description and rows of one section."""
    yield from (f"### {title}", "", section["description"], "", *HEADER)
    for name, field in section["properties"].items():
        if name not in (leave_out or {}):
            default = "required" if name in section.get("required", ()) else f"`{default_of(field)}`"
            resume = "may change" if field.get("resume") == "free" else "must agree"
            yield f"| `{prefix}{name}` | {kind(field)} | {default} | {resume} | {field['description']} |"
    yield ""


def default_of(field: Schema) -> str:
    """The default as YAML writes it."""
    # The schema leaves out a default that is made by a factory; here, that is the empty list.
    value = field.get("default", [])
    return value if isinstance(value, str) else json.dumps(value)


def kind(field: Schema) -> str:
    """The values that a field takes, in words.

    Examples: "integer >= 1", "`kl` or `ce`", "list of number >= 0", "list of 2: number > 0, number > 0".
    """
    if "anyOf" in field:
        return " or ".join(kind(part) for part in field["anyOf"])
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if "prefixItems" in field:
        return f"list of {len(field['prefixItems'])}: " + ", ".join(kind(item) for item in field["prefixItems"])
    if field["type"] == "array":
        return f"list of {kind(field['items'])}"
    if field["type"] == "object":
        return f"mapping from {kind(field['propertyNames'])} to {kind(field['additionalProperties'])}"
    if field["type"] == "boolean":
        return "`true` or `false`"
    name = field.get("format", field["type"])
    limits = " and ".join(f"{sign} {field[key]}" for key, sign in LIMITS.items() if key in field)
    return f"{name} {limits}".strip()


if __name__ == "__main__":
    sys.exit(main())
