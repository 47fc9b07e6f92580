"""The chain rollout: how far from a token-by-token drafting loop, and what it costs against a dense mask.

    python benchmarks/chain_rollout.py [--lengths 1024 4096] [--depths 4]

The head is Qwen3.5-shaped with random weights (hidden 64, 8 query and 2 key heads of 64), FP32. Time and peak extra
memory are of one forward and backward pass, each in a process of its own.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import torch
from measure import measure

from mtp_zoo.batch import TokenBatch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.dense_chain import dense_chain
from tests.drafting import drafting_loop, packed_batch, random_hidden, stacked
from tests.heads import tiny_head

WIDTH = {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 2}


def difference() -> float:
    """Largest difference of any state from a loop that drafts token by token with a KV cache."""
    head, tokens = tiny_head(), packed_batch()
    hidden = random_hidden(tokens)
    real = tokens.doc_ids >= 0
    with torch.no_grad():
        lean = stacked(head(tokens, hidden, depths=4))[:, real]
    return float((lean - drafting_loop(head, tokens, hidden, 4)[:, real]).abs().max())


def inputs(length: int) -> dict[str, Any]:
    tokens = TokenBatch.all_tokens(torch.randint(0, 128, (1, length), generator=torch.Generator().manual_seed(0)))
    return {"head": tiny_head(**WIDTH), "tokens": tokens, "hidden": torch.randn(1, length, 64)}


def lean(depths: int, given: dict[str, Any]) -> None:
    states = given["head"](given["tokens"], given["hidden"], depths=depths)
    sum(state.normed.sin().sum() for state in states).backward()


def dense(depths: int, given: dict[str, Any]) -> None:
    states = dense_chain(given["head"], given["tokens"], given["hidden"], depths)
    sum(state.normed.sin().sum() for state in states).backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--depths", type=int, default=4)
    arguments = parser.parse_args()
    print(f"largest difference from a drafting loop with a KV cache, packed rows, 4 depths, FP32: {difference():.1e}")
    for length in arguments.lengths:
        prepare = functools.partial(inputs, length)
        seconds, memory = measure(prepare, functools.partial(lean, arguments.depths))
        dense_seconds, dense_memory = measure(prepare, functools.partial(dense, arguments.depths), repeats=1)
        print(
            f"S {length}, {arguments.depths} depths: lean {memory:.2f} GiB extra, {seconds:.1f} s; dense {dense_memory:.2f} "
            f"GiB extra, {dense_seconds:.1f} s; memory ratio {dense_memory / memory:.1f}, time ratio "
            f"{dense_seconds / seconds:.1f}"
        )


if __name__ == "__main__":
    main()
