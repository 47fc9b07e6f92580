"""How often a step of the objective would make the host wait for a GPU: calls that read a tensor's values, by kind.

    python benchmarks/host_syncs.py
    PYTHONPATH=/path/to/another/checkout python benchmarks/host_syncs.py

Runs on a CPU, where these calls cost nothing, and counts them: `.item()`, `.tolist()`, `.cpu()`, `nonzero`, `unique`,
`torch.equal` and boolean masks as index. What a batch works out on the host when it is built is not part of a step.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import mtp_zoo
from mtp_zoo import MTPObjective, TokenBatch
from tests.heads import HIDDEN, VOCAB, tiny_head

READING_OPS = {"_local_scalar_dense": "item", "nonzero": "nonzero", "_unique2": "unique", "equal": "equal"}
READING_METHODS: dict[Callable[..., Any], str] = {Tensor.tolist: "tolist", Tensor.cpu: "cpu", Tensor.numpy: "numpy"}
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "masked_select")


class Ops(TorchDispatchMode):
    """Counts operators that need a tensor's values on the host."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READING_OPS:
            self.counts[READING_OPS[name]] += 1
        indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else args[1:2]
        if name in INDEXING and any(isinstance(each, Tensor) and each.dtype == torch.bool for each in indices):
            self.counts["boolean mask"] += 1
        return func(*args, **(kwargs or {}))


class Methods(TorchFunctionMode):
    """Counts methods that hand values to Python; on a CPU they call no operator."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READING_METHODS:
            self.counts[READING_METHODS[func]] += 1
        return func(*args, **(kwargs or {}))


def count(depths: int) -> Counter[str]:
    """The calls of one forward and backward of the default objective on a packed batch."""
    documents = [[(list(range(20, 27)), [True] * 7), (list(range(30, 35)), [True] * 5)], [(list(range(9)), [True] * 9)]]
    tokens = TokenBatch.from_rows(documents)
    hidden = torch.randn(*tokens.shape, HIDDEN)
    objective = MTPObjective(tiny_head(), depths=depths)
    if hasattr(tokens, "plan"):  # earlier versions work everything out in the forward pass
        tokens.plan(depths)
        _ = tokens.segments, tokens.last_position
    counts: Counter[str] = Counter()
    with Methods(counts), Ops(counts):
        objective(tokens, hidden).loss.backward()
    return counts


def main() -> None:
    """Print the counts as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depths", type=int, default=3)
    depths = parser.parse_args().depths
    counts = count(depths)
    found = {"code": mtp_zoo.__file__, "depths": depths, "vocabulary": VOCAB, **dict(counts), "total": counts.total()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
