"""Serve a checkpoint with an engine in its own environment, and compare what it accepts with what the library counts.

python scripts/serve_saved.py DIR                               # vLLM, one and three drafts a step, random prompts
python scripts/serve_saved.py DIR --prompt "count up from six :" --drafts 2
python scripts/serve_saved.py DIR --engine sglang --json

The environment is the one that `mtp-zoo conform --install vllm` makes. Engine and library decode greedily in the dtype that
config.json states; in FP32 their counts must be equal, in BF16 near ties may part them. Ends with 1 where the engine did not
serve the checkpoint, or where counts in FP32 differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

import mtp_zoo as mz
from mtp_zoo.checkpoint import CheckpointIndex
from mtp_zoo.tables import render_table
from mtp_zoo.training.target import load_target, load_tokenizer
from mtp_zoo_conformance.cases import get_case
from mtp_zoo_conformance.engines.client import run_jobs
from mtp_zoo_conformance.engines.environment import find
from mtp_zoo_conformance.tiers.module import twin

HEADERS = ("drafts", "depth", "engine accepted", "library accepted", "engine steps", "library steps")
LENGTHS = (5, 9, 17, 30)
LIMIT = 600.0
"""Seconds for one run of the engine."""


def main() -> int:
    """Run the engine once for each number of drafts, and print the counts."""
    arguments = parse()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    engine = find(arguments.engine)
    if engine is None:
        print(
            f"{arguments.engine} has no environment; run: mtp-zoo conform --install {arguments.engine}", file=sys.stderr
        )
        return 2
    index = CheckpointIndex.open(arguments.checkpoint)
    dtype = str(index.config.text.get("dtype", "bfloat16"))
    head = mz.load_head(index.root, dtype=getattr(torch, dtype), engine=arguments.engine)
    target = load_target(index.root, dtype=getattr(torch, dtype))
    head.attach(target)
    prompts = read_prompts(arguments.prompt, index.root, target)
    case = get_case(head.family.name)
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            {
                "id": str(drafts),
                "kind": "generate",
                "folder": str(Path(folder) / str(drafts)),
                "limit": LIMIT,
                "checkpoint": str(index.root.resolve()),
                "dtype": dtype,
                "device": None,
                "drop": list(case.variants[0].drop.get(arguments.engine, ())),
                "twin": twin(case.engines[arguments.engine]),
                "prompts": prompts,
                "k": drafts,
                "max_new_tokens": arguments.new_tokens,
            }
            for drafts in arguments.drafts
        ]
        records = run_jobs(engine, jobs, Path(folder) / "work")
    failed = {name: record["error"] for name, record in records.items() if record["status"] != "ok"}
    results = [
        compare(drafts, records[str(drafts)], target, head, prompts, arguments.new_tokens)
        for drafts in arguments.drafts
        if str(drafts) not in failed
    ]
    report(results, failed, dtype, as_json=arguments.json)
    return int(bool(failed) or (dtype == "float32" and not all(result["equal"] for result in results)))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 3], help="drafted tokens a step, one run each")
    parser.add_argument("--prompt", action="append", help="text to go on from; random tokens where none is given")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def read_prompts(texts: list[str] | None, root: Path, target: Any) -> list[list[int]]:
    """Token ids of the prompts."""
    if texts:
        tokenizer: Any = load_tokenizer(root)
        return [list(tokenizer(text)["input_ids"]) for text in texts]
    vocab, generator = target.get_input_embeddings().weight.shape[0], torch.Generator().manual_seed(0)
    return [torch.randint(2, vocab, (length,), generator=generator).tolist() for length in LENGTHS]


def compare(
    drafts: int, record: dict[str, Any], target: Any, head: Any, prompts: list[list[int]], new_tokens: int
) -> dict[str, Any]:
    """Counts of the engine and of the library's own draft/verify loop."""
    counted = mz.speculate(target, head, prompts, k=drafts, max_new_tokens=new_tokens, check=False)
    counters = record["counters"]
    ours = [int(depth["accepted"]) for depth in counted.per_depth]
    theirs = [int(count) for count in counters["accepted_per_depth"]]
    return {
        "drafts": drafts,
        "version": record["version"],
        "draft_class": record["draft_class"],
        "engine": theirs,
        "library": ours,
        "engine_steps": counters["verify_steps"],
        "library_steps": counted.verify_steps,
        "equal": theirs == ours and record["accepted"] == [list(prompt.accepted) for prompt in counted.prompts],
        "same_tokens": record["outputs"] == [list(prompt.output) for prompt in counted.prompts],
    }


def report(results: list[dict[str, Any]], failed: dict[str, str], dtype: str, *, as_json: bool) -> None:
    """Print the counts."""
    if as_json:
        print(json.dumps({"dtype": dtype, "runs": results, "failed": failed}, indent=2))
        return
    rows = [
        (str(r["drafts"]), str(depth), str(a), str(b), str(r["engine_steps"]), str(r["library_steps"]))
        for r in results
        for depth, (a, b) in enumerate(zip(r["engine"], r["library"], strict=True), start=1)
    ]
    title = ", ".join({f"{r['draft_class']} of version {r['version']}" for r in results}) or "nothing was served"
    print(render_table(f"{title}, {dtype}", HEADERS, rows, right=(0, 1, 2, 3, 4, 5)))
    for r in results:
        same = "the same" if r["same_tokens"] else "OTHER"
        print(f"{r['drafts']} draft(s): counts of every step {'equal' if r['equal'] else 'DIFFER'}, {same} tokens")
    for name, error in failed.items():
        print(f"{name} draft(s): {error}")


if __name__ == "__main__":
    sys.exit(main())
