"""How far a step on two ranks is from the same step in one process: DDP, FSDP2, context parallel.

python scripts/parallel_equality.py           # a table; two processes over gloo, FP32, under two minutes
python scripts/parallel_equality.py --json    # the same, for programs
python scripts/parallel_equality.py --first   # one row of each way to share

Each row is one AdamW step of the head that ships with the package, three depths unrolled, on batches whose ranks hold unequal
numbers of slots. Figures are the largest difference of any entry, as a share of the largest entry: of the loss, of the
gradients, and of the weights behind the step. AdamW's eps is 1e-4: under 1e-8, its first step moves an entry whose gradient is
nothing but rounding by a whole learning rate. Ends with 1 where a figure is above 1e-6: FP32 sums in another order differ by
less.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mtp_zoo import MTPObjective, TokenBatch, load_head, load_shared, pad_documents, shard_head, split, step_counts
from mtp_zoo.tables import render_table

CHECKPOINT = Path(__file__).parents[1] / "mtp_zoo/demo/assets/tiny-qwen3_5"
RANKS, DEPTHS, EPS, LIMIT = 2, 3, 1e-4, 1e-6

Batch: TypeAlias = "list[int]"
"""Lengths of the documents in one row."""

Wrap: TypeAlias = Literal["DDP", "FSDP2", "zigzag", "contiguous"]

DATA: Mapping[str, list[list[Batch]]] = {
    "5 and 500 slots": [[[7]], [[502]]],
    "no slot and 500": [[[2]], [[502]]],
    "two micro-batches a rank": [[[7], [3, 90]], [[40, 12], [200]]],
}
"""Micro-batches a rank."""

CONTEXT: Mapping[str, Batch] = {"one document": [256], "packed documents": [97, 5, 130, 1]}


@dataclass(frozen=True)
class Step:
    """One row: how the ranks share the work, blocks of the head, and a key of `DATA` or `CONTEXT`."""

    wrap: Wrap
    blocks: int
    batch: str


STEPS = [Step(*each) for each in itertools.product(("DDP", "FSDP2"), (1, DEPTHS), DATA)]
STEPS += [Step(*each) for each in itertools.product(("zigzag", "contiguous"), (1, DEPTHS), CONTEXT)]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.add_argument("--first", action="store_true", help="the first row of each way to share the work")
    arguments = parser.parse_args()
    firsts = list({step.wrap: step for step in reversed(STEPS)}.values())[::-1]
    rows = equality(firsts if arguments.first else STEPS)
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        figures = ("loss", "gradients", "weights")
        cells = [(r["ranks"], r["head"], r["batch"], *(f"{r[name]:.1e}" for name in figures)) for r in rows]
        headers = ("ranks share", "head", "batch", *figures)
        print(render_table("Two ranks against one process", headers, cells, right=range(3, len(headers))))
    return int(any(row[name] > LIMIT for row in rows for name in ("loss", "gradients", "weights")))


def labels(step: Step) -> tuple[str, str, str]:
    """What the table calls a step."""
    ranks = step.wrap if step.wrap in ("DDP", "FSDP2") else f"context, {step.wrap}"
    return ranks, "one block, recycled" if step.blocks == 1 else f"{step.blocks} blocks", step.batch


def equality(steps: Sequence[Step] = STEPS) -> list[dict[str, Any]]:
    """One entry a step."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, args=(folder, steps), nprocs=RANKS)
        ranks = [torch.load(f"{folder}/{rank}.pt") for rank in range(RANKS)]
    rows: list[dict[str, Any]] = []
    for step, *found in zip(steps, *ranks, strict=True):
        one = run(step, None)
        loss = sum(float(each["loss"]) for each in found)
        rows.append(
            {
                **dict(zip(("ranks", "head", "batch"), labels(step), strict=True)),
                "loss": abs(loss - float(one["loss"])) / float(one["loss"]),
                "gradients": max(_distance(each["gradients"], one["gradients"]) for each in found),
                "weights": max(_distance(each["weights"], one["weights"]) for each in found),
            }
        )
    return rows


def _rank(rank: int, folder: str, steps: Sequence[Step]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.save([run(step, rank) for step in steps], f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def run(step: Step, rank: int | None) -> dict[str, Any]:
    """One optimiser step on a rank, or with `rank` None on all that the ranks have."""
    options: dict[str, Any] = {} if step.blocks == 1 else {"init": "random", "depths": step.blocks}
    head = load_head(CHECKPOINT, dtype=torch.float32, target=load_shared(CHECKPOINT, dtype=torch.float32), **options)
    if rank is not None and step.wrap == "FSDP2":
        shard_head(head)
    objective: Any = MTPObjective(head, depths=DEPTHS)
    batches = _batches(step, rank, head.hidden_size)
    counts = step_counts([tokens for tokens, _ in batches], DEPTHS)
    factor = 1
    if rank is not None and step.wrap != "FSDP2":  # context parallel too, for the mean that DDP takes
        objective, factor = DistributedDataParallel(objective), RANKS
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, eps=EPS)
    loss = 0.0
    for tokens, hidden in batches:
        out = objective(tokens, hidden, step_counts=counts)
        (factor * out.loss).backward()
        loss += out.loss.item()
    gradients = {name: _whole(parameter.grad) for name, parameter in head.named_parameters()}
    optimizer.step()
    return {"loss": loss, "gradients": gradients, "weights": {n: _whole(p) for n, p in head.named_parameters()}}


def _batches(step: Step, rank: int | None, width: int) -> list[tuple[TokenBatch, Tensor]]:
    if step.batch in DATA:
        ranks = DATA[step.batch] if rank is None else [DATA[step.batch][rank]]
        return [_batch([lengths], width) for batches in ranks for lengths in batches]
    tokens, hidden = _batch([CONTEXT[step.batch]], width, padded=True)
    if rank is None:
        return [(tokens, hidden)]
    part = split(tokens, DEPTHS, layout=step.wrap, group=torch.distributed.group.WORLD)  # type: ignore[arg-type]
    return [(part, part.take(hidden))]


def _batch(rows: list[Batch], width: int, *, padded: bool = False) -> tuple[TokenBatch, Tensor]:
    """Tokens, and states that depend on a token and its position only."""
    documents = [[([2 + 37 * i % 900 for i in range(n)], [True] * n) for n in lengths] for lengths in rows]
    tokens = TokenBatch.from_rows(documents)
    tokens = pad_documents(tokens, 2 * RANKS) if padded else tokens
    table = torch.randn(1024, width, generator=torch.Generator().manual_seed(0))
    return tokens, table[tokens.input_ids] + table[tokens.position_ids % 1024]


def _whole(value: Any) -> Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def _distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    largest = max(float(value.abs().max()) for value in expected.values())
    return max(float((found[name] - value).abs().max()) for name, value in expected.items()) / largest


if __name__ == "__main__":
    sys.exit(main())
