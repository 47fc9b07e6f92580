"""A training step of a Qwen3.5-shaped head, three deep: this library against the MTP model of speculators 0.9.0.

    python benchmarks/step_vs_speculators.py --install   # once: an environment for speculators, below the user's cache
    python benchmarks/step_vs_speculators.py             # the comparison; also --repeats, --tokens, --vocab, --dtypes, --json

A step is forward, backward and AdamW on 1,024 tokens of which the first half is prompt; hidden size 1,024, FFN 3,072,
vocabulary 151,936, cross-entropy, torch.compile off. Both sides have equal weights, states and learn masks. Every
measurement runs in a process of its own, and the two sides take turns; seconds are medians over all turns. "Extra" is the
peak of the resident set above what weights and inputs take, gradients and optimiser state included.

What differs. speculators runs every depth as a causal pass (our `sequence` rollout), so there the losses of all depths must
agree; in FP32 the run stops where they don't. Our default for this head is `chain`, what servers draft with: its losses
agree at depth 1. speculators takes logits in every slot; ours in the slots that count. "metrics" adds what our default
reports in the same pass: agreement with the target, which takes the target's logits as well.

BF16 is measured at a small size: processors without instructions for it emulate it, here 30 to 100 times slower than FP32.
--bf16-size 1024 151936 is for those that have them. Ratios of memory at the small size say little.

"Of peak" is the share of the rate of a plain matrix product of the same shapes that a step reaches, counting the
floating-point operations that this side's step performs. It exits with 1 where losses that must agree don't.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from step_vs_speculators_shared import Job

from mtp_zoo.tables import render_table
from mtp_zoo_conformance.engines.environment import TORCH_INDEX, cache_root

HERE = Path(__file__).parent
TORCH = "torch==2.13.0+cpu"
REQUIREMENTS = HERE / "speculators-requirements.txt"
THEIRS = "speculators"
VARIANTS = {
    "float32": ("sequence", "sequence, metrics", "chain", "chain, metrics"),
    "bfloat16": ("sequence", "chain, metrics"),
}
GEMM = "gemm"

SAME_LOSS = 1e-5
"""Relative, FP32: both compute the same numbers in another order (2e-7 seen)."""

SAME_LOSS_BF16 = 1e-2
"""Relative: one side rounds logits to BF16, which keeps 8 bits."""


def environment() -> Path:
    return cache_root() / "speculators-0.9.0"


def install() -> None:
    """Make the environment, or bring it to the pinned list: nothing is installed but what the list names."""
    folder = environment()
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--no-deps"]
    if subprocess.run([*pip, TORCH]).returncode:
        subprocess.run([*pip, TORCH, "--index-url", TORCH_INDEX], check=True)
    subprocess.run([*pip, "-r", str(REQUIREMENTS)], check=True)


def call(job: Job) -> dict[str, Any]:
    """One measurement in a process of its own."""
    theirs = job.variant == THEIRS
    python = environment() / "bin" / "python" if theirs else sys.executable
    code = f"import step_vs_speculators_{'theirs' if theirs else 'ours'} as side; side.main()"
    quiet = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [python, "-c", code, json.dumps(asdict(job))], cwd=HERE, env=quiet, stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout.decode().splitlines()[-1])


def turns(job: Job, count: int) -> dict[str, dict[str, Any]]:
    """Every variant `count` times, in turn: medians of all seconds and of the peaks."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in (THEIRS, *VARIANTS[job.dtype])}
    for turn in range(count):
        for name in runs:
            print(f"{job.dtype}, turn {turn + 1} of {count}: {name}", file=sys.stderr, flush=True)
            runs[name].append(call(replace(job, variant=name)))
    return {name: merged(found) for name, found in runs.items()}


def merged(found: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [value for run in found for value in run["seconds"]]
    return {
        **found[0],
        "seconds": statistics.median(seconds),
        "spread": [min(seconds), max(seconds)],
        "peak_gib": statistics.median(run["peak_gib"] for run in found),
    }


def compare(job: Job, count: int) -> dict[str, Any]:
    """The sides of one dtype, with ratios to speculators and to the rate of plain products."""
    products = call(replace(job, variant=GEMM))
    sides = turns(job, count)
    theirs, peak = sides[THEIRS], max(products["rates"].values())
    for side in sides.values():
        side["tokens_per_second"] = job.tokens / side["seconds"]
        side["speedup"] = theirs["seconds"] / side["seconds"]
        side["memory_ratio"] = side["peak_gib"] / theirs["peak_gib"]
        side["share_of_peak"] = side["flops"] / side["seconds"] / peak
    size = {"dtype": job.dtype, "tokens": job.tokens, "vocab": job.vocab, "threads": products["threads"]}
    return {**size, "products": products["rates"], "sides": sides}


def disagreements(result: dict[str, Any]) -> Iterator[str]:
    """Losses that must agree and don't: depth 1 of every side, all depths of the same rollout."""
    limit = SAME_LOSS if result["dtype"] == "float32" else SAME_LOSS_BF16
    theirs = result["sides"][THEIRS]["losses"]
    for name, side in result["sides"].items():
        for depth, (ours, other) in enumerate(zip(side["losses"], theirs, strict=True), start=1):
            if (depth == 1 or not name.startswith("chain")) and abs(ours / other - 1) > limit:
                yield f"{result['dtype']}, {name}, depth {depth}: loss {ours:.7f}, speculators {other:.7f}"


def table(result: dict[str, Any]) -> str:
    rates = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in result["products"].items())
    rows = [
        (
            name,
            f"{side['seconds']:.2f}",
            f"{side['spread'][0]:.2f} - {side['spread'][1]:.2f}",
            f"{side['tokens_per_second']:.1f}",
            f"{side['speedup']:.2f}",
            f"{side['peak_gib']:.2f}",
            f"{side['memory_ratio']:.2f}",
            f"{side['flops'] / 1e12:.2f}",
            f"{side['share_of_peak']:.0%}",
            " ".join(f"{loss:.5f}" for loss in side["losses"]),
        )
        for name, side in result["sides"].items()
    ]
    columns = ("side", "s", "spread", "tokens/s", "x theirs", "extra GiB", "of theirs", "TFLOP", "of peak", "losses")
    title = (
        f"{result['dtype']}, {result['tokens']:,} tokens, vocabulary {result['vocab']:,}, {result['threads']} threads; "
        f"plain products in GFLOP/s: {rates}"
    )
    return render_table(title, columns, rows, right=tuple(range(1, 9)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="make the environment of speculators, and stop")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--bf16-size", type=int, nargs=2, metavar=("TOKENS", "VOCAB"), default=(64, 8192))
    parser.add_argument("--dtypes", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--turns", type=int, default=2, help="processes a side and dtype")
    parser.add_argument("--repeats", type=int, default=2, help="timed steps a process")
    parser.add_argument("--threads", type=int, default=0, help="0 leaves torch its own number")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if arguments.install:
        install()
        return
    if not environment().is_dir():
        parser.error(f"{environment()} is not there: run with --install first")
    sizes = {"float32": (arguments.tokens, arguments.vocab), "bfloat16": arguments.bf16_size}
    jobs = [Job(dtype, *sizes[dtype], arguments.repeats, arguments.threads) for dtype in arguments.dtypes]
    results = [compare(job, arguments.turns) for job in jobs]
    wrong = [line for result in results for line in disagreements(result)]
    if arguments.json:
        print(json.dumps({"results": results, "disagreements": wrong}))
    else:
        print("\n\n".join(table(result) for result in results))
        print("\n".join(wrong) or "Losses agree where both sides compute the same.")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
