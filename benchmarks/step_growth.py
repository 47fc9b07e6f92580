"""How a training step grows with the number of depths and with the length: time and peak memory, as ratios to the first.

    python benchmarks/step_growth.py [--depths 1 2 3 4 5] [--lengths 1024 2048 4096 8192] [--plot FILE] [--json]

A step is the forward and backward pass of the objective (chain rollout, cross-entropy) on one row of which the second half
is learnt. Depths grow at the first length, lengths at --depth 3. The head is Qwen3.5-shaped: hidden size 256, FFN 768, 4
query and 2 key heads of 64, vocabulary 16,384, FP32 by default. Every step runs in a process of its own; "extra" is the peak
of the resident set above what weights and inputs take.

A step that is linear in both has ratios K and S / S0. Time has a part that is quadratic in S: causal attention. Memory must
not: the chain makes no mask and no score matrix.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import torch
from measure import measure
from torch import nn

from mtp_zoo import MTPObjective, SharedTensors, TokenBatch
from mtp_zoo.head import DraftHead
from mtp_zoo.modelconfig import ModelConfig
from mtp_zoo.registry import get_family
from mtp_zoo.tables import render_table


def prepare(vocab: int, hidden: int, depths: int, length: int) -> dict[str, Any]:
    torch.manual_seed(0)
    config = {
        "model_type": "qwen3_5_text",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "num_attention_heads": max(2, hidden // 64),
        "num_key_value_heads": 2,
        "head_dim": 64,
        "attn_output_gate": True,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 65_536,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    }
    head = DraftHead(get_family("qwen3_5"), ModelConfig(config, Path("config.json")))
    for depth in head.depths:
        head.factory.initialise(depth)
    head.attach(SharedTensors(nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab, bias=False)))
    learn = torch.arange(length)[None] >= length // 2
    return {
        "objective": MTPObjective(head, depths=depths, loss="ce", rollout="chain"),
        "tokens": TokenBatch.from_mask(torch.randint(0, vocab, (1, length)), learn),
        "hidden": torch.randn(1, length, hidden),
    }


def step(given: dict[str, Any]) -> None:
    objective = given["objective"]
    objective.head.zero_grad()
    objective(given["tokens"], given["hidden"]).loss.backward()


def growth(cases: list[tuple[int, int]], arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Time and peak of every (depths, length), and their ratios to the first."""
    found: list[dict[str, float]] = []
    for depths, length in cases:
        make = functools.partial(prepare, arguments.vocab, arguments.hidden, depths, length)
        seconds, peak = measure(make, step, repeats=arguments.repeats)
        first = found[0] if found else {"seconds": seconds, "peak_gib": peak}
        found.append(
            {
                "depths": depths,
                "length": length,
                "seconds": seconds,
                "peak_gib": peak,
                "time_ratio": seconds / first["seconds"],
                "memory_ratio": peak / first["peak_gib"],
            }
        )
    return found


def table(title: str, axis: str, rows: list[dict[str, float]]) -> str:
    cells = [
        (
            f"{row[axis]:,}",
            f"{row['seconds']:.2f}",
            f"{row['time_ratio']:.2f}",
            f"{row['peak_gib']:.3f}",
            f"{row['memory_ratio']:.2f}",
        )
        for row in rows
    ]
    return render_table(title, (axis, "s", "x first", "extra GiB", "x first"), cells, right=(0, 1, 2, 3, 4))


def plot(file: Path, by_depth: list[dict[str, float]], by_length: list[dict[str, float]]) -> None:
    """Ratios against the linear line, one panel an axis."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for panel, axis, rows in zip(panels, ("depths", "length"), (by_depth, by_length), strict=True):
        at = [row[axis] for row in rows]
        panel.plot(at, [value / at[0] for value in at], color="0.7", linestyle="--", label="linear")
        panel.plot(at, [row["time_ratio"] for row in rows], marker="o", label="time")
        panel.plot(at, [row["memory_ratio"] for row in rows], marker="s", label="peak extra memory")
        panel.set(xlabel=axis, ylabel=f"ratio to {axis} {at[0]:,}", xticks=at)
        panel.legend()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--depth", type=int, default=3, help="depths of the steps whose length grows")
    parser.add_argument("--vocab", type=int, default=16_384)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios (PNG, PDF or SVG)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    by_depth = growth([(depths, arguments.lengths[0]) for depths in arguments.depths], arguments)
    by_length = growth([(arguments.depth, length) for length in arguments.lengths], arguments)
    if arguments.plot:
        plot(arguments.plot, by_depth, by_length)
    if arguments.json:
        print(json.dumps({"depths": by_depth, "lengths": by_length}))
        return
    print(table(f"depths, at {arguments.lengths[0]:,} tokens", "depths", by_depth))
    print(table(f"length, {arguments.depth} depths", "length", by_length))


if __name__ == "__main__":
    main()
