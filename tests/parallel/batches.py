"""Batches of the tests over ranks: the same on every rank and in the process that computes what they must equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mtp_zoo.batch import TokenBatch
from tests.heads import HIDDEN, VOCAB


def row(*lengths: int, seed: int = 0, learnt: bool = True) -> list[tuple[list[int], list[bool]]]:
    """Documents of random tokens, for one row."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randint(0, VOCAB, (n,), generator=generator).tolist(), [learnt] * n) for n in lengths]


def batch(
    rows: Sequence[list[tuple[list[int], list[bool]]]], *, hidden: int = HIDDEN, seed: int = 9
) -> tuple[TokenBatch, Tensor]:
    """The rows, and a state for every slot that depends on its token only."""
    tokens = TokenBatch.from_rows(rows)
    table = torch.randn(VOCAB, hidden, generator=torch.Generator().manual_seed(seed))
    return tokens, table[tokens.input_ids]


def largest(values: dict[str, Tensor]) -> float:
    """The largest magnitude among tensors."""
    return max(float(value.abs().max()) for value in values.values())


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference, as a share of the largest magnitude; names must be the same."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - value).abs().max()) for name, value in expected.items()) / largest(expected)
