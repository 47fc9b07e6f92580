"""What the loss of a head's third depth trains, for every way of cutting the head from its target.

python scripts/gradient_map.py           # a table of gradient norms; "-" is no gradient, or one of exactly 0
python scripts/gradient_map.py --json    # the same, for programs

A real backward pass over the checkpoint that ships with the package: with its one block recycled, and with a block a depth;
with an lm_head of its own, and with one that is the embedding. The third depth is the only one in the loss, so a block of
depth 1 or 2 that gets a gradient gets it through the chain.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from mtp_zoo import DraftHead, MTPObjective, SharedTensors, TokenBatch, load_head, target_states
from mtp_zoo.modelconfig import ModelConfig
from mtp_zoo.objective import DETACH
from mtp_zoo.tables import render_table

CHECKPOINT = Path(__file__).parents[1] / "mtp_zoo/demo/assets/tiny-qwen3_5"
COLUMNS = ("block 1", "block 2", "block 3", "embedding", "lm_head", "backbone")
"""What may get a gradient; `backbone` is the gradient on the target's states."""


def main() -> int:
    """Print the map."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows = gradient_map()
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return 0
    cells = [
        (
            row["head"],
            "tied" if row["tied"] else "untied",
            ", ".join(row["detach"]) or "nothing",
            *map(_norm, _norms(row)),
        )
        for row in rows
    ]
    headers = ("head", "lm_head is", "detached", *COLUMNS)
    print(render_table("Gradients of the depth-3 loss", headers, cells, right=range(3, len(headers))))
    return 0


def gradient_map() -> list[dict[str, Any]]:
    """One entry for each kind of head, tie and set of cuts: the norm of every gradient, None where there is none."""
    target = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    recycled = load_head(CHECKPOINT, target=target, dtype=torch.float32)
    tokens = TokenBatch.all_tokens(torch.arange(40, 64)[None])
    states = target_states(target, tokens, recycled.spec)
    heads = {"recycled": recycled, "distinct": _distinct(recycled)}
    cuts = [each for size in range(len(DETACH) + 1) for each in itertools.combinations(sorted(DETACH), size)]
    rows = []
    for (name, head), tied, detach in itertools.product(heads.items(), (False, True), cuts):
        shared = _shared(target, tied)
        head.zero_grad()
        hidden = states.clone().requires_grad_()
        objective = MTPObjective(head.attach(shared), depths=3, weights=(0, 0, 1), detach=detach)
        objective(tokens, hidden).loss.backward()
        blocks = [_length(*head.depths[depth % head.num_depths].block.parameters()) for depth in range(3)]
        reached = [_length(shared.embedding.weight), _length(shared.lm_head.weight), _length(hidden)]
        norms = dict(zip(COLUMNS, (*blocks, *reached), strict=True))
        rows.append({"head": name, "tied": tied, "detach": list(detach), **norms})
    return rows


def _distinct(head: DraftHead) -> DraftHead:
    """A head of three blocks, each a copy of the one."""
    stack = DraftHead(head.family, ModelConfig.read(CHECKPOINT), depths=3)
    stack.depths[0].load_state_dict(head.depths[0].state_dict())
    for depth in stack.depths:
        depth.block.load_state_dict(head.depths[0].block.state_dict())
    return stack


def _shared(target: Any, tied: bool) -> SharedTensors:
    """The target's embedding and an lm_head of the same values: the same tensor, or one of its own."""
    embedding = nn.Embedding.from_pretrained(target.get_input_embeddings().weight.detach().clone(), freeze=False)
    lm_head = nn.Linear(*reversed(embedding.weight.shape), bias=False)
    lm_head.weight = embedding.weight if tied else nn.Parameter(embedding.weight.detach().clone())
    return SharedTensors(embedding, lm_head)


def _length(*tensors: torch.Tensor) -> float | None:
    """Norm of the gradients together; None where there is none, or only zeros."""
    grads = [tensor.grad.flatten() for tensor in tensors if tensor.grad is not None]
    return (float(torch.cat(grads).norm()) if grads else 0.0) or None


def _norms(row: dict[str, Any]) -> list[float | None]:
    return [row[column] for column in COLUMNS]


def _norm(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
