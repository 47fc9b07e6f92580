"""What the draft chain saves for its backward pass and how long its attention takes, alone or against another checkout.

    python benchmarks/hot_path.py
    python benchmarks/hot_path.py --against /path/to/another/checkout      # both in turns, with ratios; also --json, --turns

Saved: bytes of the distinct storages that one layer's attention saves over K depths (16 query heads, 2 key heads, width 64,
1,024 tokens, FP32), and the least possible: query and output of each depth, each key and value once. Time: forward and
backward of the attention alone, processor seconds of one thread, the best of five; latent attention has 8 heads, keys of 192
and values of 128; "documents" is one row of 59 documents of 40 to 69 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SAVED = (1, 3, 8)
REPEATS = 5


class Layer:
    """What the attention needs to know of a layer."""

    layer_idx = 0


def measure() -> dict[str, float]:
    """Every figure of the checkout that is imported."""
    import torch

    from mtp_zoo.batch import TokenBatch

    torch.set_num_threads(1)

    def row(*lengths: int) -> TokenBatch:
        return TokenBatch.from_rows([[([1] * length, [True] * length) for length in lengths]])

    one, many = row(1024), row(*([69] * 30 + list(range(40, 69))))
    found = {f"saved, K={depths} [MiB]": saved(one, depths) for depths in SAVED}
    found |= {f"time, K={depths} [ms]": timed(one, depths, 16, 2, 64, 64) for depths in SAVED}
    found["time, latent, K=1 [ms]"] = timed(one, 1, 8, 8, 192, 128)
    found["time, latent, BF16, K=1 [ms]"] = timed(one, 1, 8, 8, 192, 128, torch.bfloat16)
    found["time, documents, K=3 [ms]"] = timed(many, 3, 16, 2, 64, 64)
    return found


def states(tokens: Any, depths: int, heads: int, key_heads: int, width: int, value_width: int, dtype: Any) -> list[Any]:
    import torch

    def random(seed: int, count: int, size: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        shape = (tokens.shape[0], count, tokens.shape[1], size)
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    return [
        (random(d, heads, width), random(d + 20, key_heads, width), random(d + 40, key_heads, value_width))
        for d in range(depths)
    ]


def chain(tokens: Any, inputs: list[Any]) -> list[Any]:
    from mtp_zoo.chain_attention import ChainState, chain_attention

    state = ChainState(tokens.segments)
    return [chain_attention(Layer(), *each, None, mtp_chain=state.at(d))[0] for d, each in enumerate(inputs, start=1)]


def saved(tokens: Any, depths: int) -> float:
    import torch

    sizes: dict[int, int] = {}
    alive: list[Any] = []

    def keep(tensor: Any) -> Any:
        alive.append(tensor)
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    inputs = states(tokens, depths, 16, 2, 64, 64, torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        alive += chain(tokens, inputs)
    return sum(sizes.values()) / 2**20


def timed(
    tokens: Any, depths: int, heads: int, key_heads: int, width: int, value_width: int, dtype: Any = None
) -> float:
    import torch

    inputs = states(tokens, depths, heads, key_heads, width, value_width, dtype or torch.float32)

    def step() -> None:
        sum(out.sum() for out in chain(tokens, inputs)).backward()  # type: ignore[union-attr]

    return 1e3 * min(seconds(step) for _ in range(REPEATS))


def seconds(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def least(depths: int) -> float:
    """MiB of query and output of every depth, and of each key and value once."""
    return 4 * depths * 1024 * 64 * (2 * 16 + 2 * 2) / 2**20


def child(checkout: Path) -> dict[str, float]:
    paths = os.pathsep.join(map(str, (checkout, checkout / "conformance")))
    done = subprocess.run(
        [sys.executable, __file__, "--child"],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout of this repository")
    parser.add_argument("--turns", type=int, default=3, help="runs of each checkout; medians are shown")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure()))
        return
    sides = {"here": Path(__file__).parents[1], **({"against": options.against} if options.against else {})}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(options.turns):
        for name, checkout in sides.items():
            runs[name].append(child(checkout))
    found = {
        figure: {name: statistics.median(run[figure] for run in each) for name, each in runs.items()}
        for figure in runs["here"][0]
    }
    found |= {f"least, K={depths} [MiB]": {"here": least(depths)} for depths in SAVED}
    print(json.dumps(found) if options.json else table(found))


def table(found: dict[str, dict[str, float]]) -> str:
    from mtp_zoo.tables import render_table

    rows = [
        (figure, f"{each['here']:.1f}", f"{each['against']:.1f}", f"{each['here'] / each['against']:.2f}")
        if "against" in each
        else (figure, f"{each['here']:.1f}", "", "")
        for figure, each in found.items()
    ]
    return render_table("the draft chain", ("figure", "here", "against", "ratio"), rows, right=(1, 2, 3))


if __name__ == "__main__":
    main()
