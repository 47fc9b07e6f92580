"""The section of a model card (README.md) that says what head a checkpoint holds, between two markers.

What stands outside the markers is the user's, front matter included, and stays as it is, byte for byte; what stands between
them is written anew by each export.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from mtp_zoo.cache_tree import commit_of
from mtp_zoo.checkpoint_source import REPO_ID
from mtp_zoo.errors import ExportError
from mtp_zoo.json_text import read_bounded

BEGIN, END = "<!-- mtp_zoo: begin -->", "<!-- mtp_zoo: end -->"
CARD_LIMIT = 1 << 24
"""Longest card in bytes that is read."""

SERVE = """Serve it with vLLM:

    vllm serve . --speculative-config '{{"method": "mtp", "num_speculative_tokens": {depths}}}'

or with SGLang:

    python -m sglang.launch_server --model-path . --speculative-algorithm NEXTN \\
        --speculative-num-steps {depths} --speculative-eagle-topk 1 --speculative-num-draft-tokens {drafted}
"""


def write_card(place: Path, record: Mapping[str, Any]) -> bytes:
    """The card at `place`, where there is one, with the section that tells of `record`; nothing is written.

    Raises:
        ExportError: what is there can't be read.
    """
    try:
        old = read_bounded(place, CARD_LIMIT).decode("utf-8", "surrogateescape") if place.exists() else None
    except (OSError, ValueError) as error:
        raise ExportError(
            f"Reading the model card {place}: {error}.", remedy="Move it away, or put a text file there."
        ) from error
    return model_card(old, record).encode("utf-8", "surrogateescape")


def model_card(old: str | None, record: Mapping[str, Any]) -> str:
    """A model card with the section that tells of `record`.

    Args:
        old: the card so far; None where there is none.
        record: the content of the checkpoint's `mtp_zoo.json`.

    Returns:
        The card: the section in the place of the old one, else behind everything. A new card has front matter for the Hub.
    """
    section = f"{BEGIN}\n{_section(record)}{END}\n"
    if old is None:
        return f"{_front_matter(record)}{section}"
    newline = "\r\n" if "\r\n" in old else "\n"
    section = section.replace("\n", newline)
    found = re.search(f"{re.escape(BEGIN)}.*?{re.escape(END)}(\r?\n)?", old, re.DOTALL)
    if found:
        return old[: found.start()] + section + old[found.end() :]
    rest = old.replace(BEGIN, "").replace(END, "")  # a marker without its partner would swallow text at the next export
    gap = "" if not rest or rest.endswith(newline * 2) else newline if rest.endswith(newline) else newline * 2
    return rest + gap + section


def _section(record: Mapping[str, Any]) -> str:
    depths = cast("int", record["depths"])
    lines = ["## Draft head (multi-token prediction)", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in _facts(record)]
    serve = SERVE.format(depths=depths, drafted=depths + 1)
    checks = "`mtp-zoo verify .` holds the files against the hashes in `mtp_zoo.json`."
    return "\n".join(lines) + f"\n\n{serve}\n{checks}\n"


def _facts(record: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    yield "family", record["family"]
    yield "depths", record["depths"]
    yield "size", f"{record['head_bytes']:,} bytes in {len(record['tensors'])} tensors"
    yield "trunk", _place(record["base"])
    if record["head"]:
        yield "head taken from", _place(record["head"])
    if isinstance(record["training"], dict):
        for name, value in cast("dict[str, Any]", record["training"]).items():
            if isinstance(value, (str, int, float)):
                yield f"training: {_cell(name)}", f"{value:.6g}" if isinstance(value, float) else value
    yield "written by", f"mtp_zoo {record['mtp_zoo']}"


def _place(origin: Mapping[str, Any]) -> str:
    """A repository and its commit, or the last part of a path: the rest of it is the author's own."""
    repository, source, revision = _repository(origin), origin["source"], origin["revision"]
    name = repository or (Path(source).name if source else "not recorded")
    return f"{name} at {revision}" if revision else name


def _repository(origin: Mapping[str, Any]) -> str | None:
    """The id of a repository on the Hub; None where the origin is a directory."""
    source, path = origin["source"], origin["path"]
    if path is None:  # what a model was loaded from, as transformers tells it
        return source if source and REPO_ID.fullmatch(source) else None
    tree = Path(path).parent.parent.name
    return tree.removeprefix("models--").replace("--", "/") if commit_of(Path(path)) else None


def _front_matter(record: Mapping[str, Any]) -> str:
    repository = _repository(record["base"])
    lines = [f"base_model: {repository}"] if repository else []
    return "\n".join(["---", *lines, "tags:", "- mtp_zoo", "- speculative-decoding", "---", "", ""])


def _cell(value: object) -> str:
    """Text that neither ends its cell, nor its row, nor the section."""
    text = re.sub(r"\s+", " ", str(value)).replace("|", "\\|").replace("<!--", "&lt;!--").replace("-->", "--&gt;")
    return text if len(text) <= 200 else f"{text[:199]}…"
