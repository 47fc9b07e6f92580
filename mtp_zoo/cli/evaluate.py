"""`mtp-zoo eval`: how many drafted tokens the target accepts."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from mtp_zoo.cli.output import JsonOption, quiet_transformers, show
from mtp_zoo.errors import DataError, EmptyDatasetError


class Dtype(str, Enum):
    """Precision of target and head."""

    fp32 = "fp32"
    bf16 = "bf16"


def command(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint with target and head.")],
    prompts: Annotated[
        Path | None,
        typer.Option(help='JSON lines, one prompt each: {"text": ...}, {"messages": [...]} or {"input_ids": [...]}.'),
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be repeated.")] = None,
    head: Annotated[str | None, typer.Option(help="Take the head from this checkpoint instead.")] = None,
    k: Annotated[int, typer.Option("-k", "--draft-tokens", min=1, help="Drafted tokens a verify step.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate a prompt.")] = 64,
    dtype: Annotated[Dtype, typer.Option(help="Precision; fp32 has the fewest numeric ties.")] = Dtype.fp32,
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
    replay: Annotated[
        bool, typer.Option("--replay", help="Count by one pass over greedy outputs: same counts, no loop, no check.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Draft and verify greedily with real KV caches; report accept rate and length, and whether output is lossless.

    Exit code 1 where some output differs from plain greedy decoding.
    """
    import torch

    from mtp_zoo import acceptance
    from mtp_zoo.checkpoint import CheckpointIndex
    from mtp_zoo.loader import load_head
    from mtp_zoo.training.target import load_target

    quiet_transformers()
    precision = {Dtype.fp32: torch.float32, Dtype.bf16: torch.bfloat16}[dtype]
    loaded = load_head(head or checkpoint, dtype=precision, device=device)
    root = CheckpointIndex.open(checkpoint).require_local("Evaluating")
    ids = _prompt_ids(root, prompts, prompt or [])
    target = load_target(root, dtype=precision, device=device)
    measure = acceptance.replay if replay else acceptance.speculate
    report = measure(target, loaded, ids, k=k, max_new_tokens=max_new_tokens, eos=_eos(target))
    show(report.as_dict(), _text(report), as_json=as_json)
    raise typer.Exit(1 if report.lossless is False else 0)


def _prompt_ids(root: Path, path: Path | None, texts: list[str]) -> list[list[int]]:
    rows: list[dict[str, Any]] = [{"text": text} for text in texts]
    if path is not None:
        rows += _read_rows(path)
    if not rows:
        raise EmptyDatasetError("Reading prompts: there are none.", remedy="Pass --prompts FILE or --prompt TEXT.")
    if all("input_ids" in row for row in rows):
        return [list(row["input_ids"]) for row in rows]
    from mtp_zoo.training.target import load_tokenizer

    tokenizer = load_tokenizer(root)
    return [_encode(tokenizer, row) for row in rows]


def _read_rows(path: Path) -> list[dict[str, Any]]:
    remedy = 'Write one JSON object a line with "text", "messages" or "input_ids".'
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"Reading prompts from {path}: {error}.", remedy="Point at a UTF-8 file of JSON lines."
        ) from error
    from mtp_zoo.training.records import options_complaint

    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            wrong.append(f"line {number}: not JSON ({error.msg})")
            continue
        if isinstance(row, dict) and row.keys() & {"text", "messages", "input_ids"}:
            rows.append(row)
            complaint = options_complaint(row) if "messages" in row else None
            wrong += [f"line {number}: {complaint}"] if complaint else []
        else:
            wrong.append(f"line {number}: expected an object with text, messages or input_ids")
    if wrong:
        raise DataError(f"Reading prompts from {path}: {len(wrong)} bad lines.", remedy=remedy, problems=wrong[:20])
    return rows


def _encode(tokenizer: Any, row: dict[str, Any]) -> list[int]:
    if "input_ids" in row:
        return list(row["input_ids"])
    if "messages" in row:
        from mtp_zoo.training.data import render_prompt
        from mtp_zoo.training.records import template_options

        return render_prompt(tokenizer, row["messages"], template_options(row))
    return tokenizer(row["text"])["input_ids"]


def _eos(target: Any) -> list[int]:
    eos = target.generation_config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def _text(report: Any) -> str:
    from mtp_zoo.tables import render_table

    rows = [("all", report.drafted, report.accepted, f"{report.accept_rate:.3f}")]
    rows += [(d["depth"], d["drafted"], d["accepted"], f"{d['accept_rate']:.3f}") for d in report.per_depth]
    lossless = {True: "yes", False: "NO", None: "not checked"}[report.lossless]
    return "\n".join(
        [
            render_table("Acceptance", ("depth", "drafted", "accepted", "rate"), rows, right=(1, 2, 3)),
            f"accept length {report.accept_length:.3f}{_plus_minus(report.standard_error)} "
            f"({report.tokens} tokens / {report.verify_steps} verify steps)",
            f"output equals plain greedy decoding: {lossless}",
        ]
    )


def _plus_minus(error: float | None) -> str:
    return "" if error is None else f" +- {error:.3f}"
