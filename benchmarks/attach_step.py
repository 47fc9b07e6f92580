"""Time of a joint step with the defaults of `attach`, of this checkout or against another one.

    python benchmarks/attach_step.py
    python benchmarks/attach_step.py --against /path/to/another/checkout      # both in turns, with the ratio

The model is the demo's with 60,000 words, in FP32; a step is forward and backward of one row of tokens. Seconds are processor
time of one thread, the best of the turns.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "mtp_zoo/demo/assets/tiny-qwen3_5"
WORDS = 60_000


def make(folder: Path) -> None:
    """The demo's model at `folder`, its vocabulary grown to `WORDS`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO)
    model.resize_token_embeddings(WORDS, mean_resizing=False)
    model.save_pretrained(folder)


def step(folder: Path, tokens: int) -> float:
    """Seconds of a joint step, the second one."""
    import torch
    from transformers import AutoModelForCausalLM

    import mtp_zoo as mz

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    mz.attach(model, mz.load_head(folder, init="random", dtype=torch.float32))
    ids = torch.randint(2, WORDS, (1, tokens), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        start = time.process_time()
        model(input_ids=ids, labels=ids).loss.backward()
        taken = time.process_time() - start
    return taken


def timed(checkout: Path, folder: Path, tokens: int) -> float:
    """`step` with the library of `checkout`, in a process of its own."""
    command = [sys.executable, __file__, "--child", str(folder), "--tokens", str(tokens)]
    run = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(checkout)}, check=True, stdout=subprocess.PIPE, text=True
    )
    return float(run.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--against", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(step(options.child, options.tokens))
        return
    checkouts = [ROOT, *([options.against] if options.against else [])]
    with tempfile.TemporaryDirectory() as place:
        make(Path(place))
        turns = [[timed(each, Path(place), options.tokens) for each in checkouts] for _ in range(options.turns)]
    best = [min(column) for column in zip(*turns, strict=True)]
    for checkout, seconds in zip(checkouts, best, strict=True):
        print(f"{checkout}: {seconds:.2f} s")
    if len(best) > 1:
        print(f"ratio: {best[0] / best[1]:.2f}")


if __name__ == "__main__":
    main()
