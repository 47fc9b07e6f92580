"""Which rows each optimiser step sees: a pure function of (seed, step, rank, world size).

Nothing is remembered between steps, so a run resumes at any step without replaying the ones before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class BatchPlan:
    """Rows for every optimiser step of every process.

    Epoch after epoch the rows are shuffled anew, and a step takes the next `rows_per_step` of that endless sequence; a
    step may run over the end of an epoch. Cutting a step into other micro-batches or over other processes moves rows
    between them, and never changes which rows the step sees.

    Attributes:
        rows: number of rows.
        batch_size: rows in a micro-batch.
        accumulation: micro-batches in a step, for each process.
        world: number of processes.
        seed: of the shuffles.
    """

    rows: int
    batch_size: int
    accumulation: int = 1
    world: int = 1
    seed: int = 0

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimiser step, over all processes."""
        return self.batch_size * self.accumulation * self.world

    def steps(self, epochs: float) -> int:
        """Steps that see at least `epochs` times every row; at least one."""
        return max(1, math.ceil(self.rows * epochs / self.rows_per_step))

    def step_rows(self, step: int) -> list[int]:
        """Row numbers of step `step` (the first is 1), over all processes.

        Example: with 5 rows and 2 a step, steps 1 to 5 hold two whole shuffles, and step 3 a row of each.
        """
        first = (step - 1) * self.rows_per_step
        return [self._row(place) for place in range(first, first + self.rows_per_step)]

    def micro_batches(self, step: int, rank: int = 0) -> list[list[int]]:
        """Row numbers of the micro-batches of `rank` in step `step` (the first is 1)."""
        rows = self.step_rows(step)
        size = self.batch_size
        starts = range(rank * size, len(rows), self.world * size)
        return [rows[start : start + size] for start in starts]

    def _row(self, place: int) -> int:
        epoch, position = divmod(place, self.rows)
        return int(_shuffled(self.rows, self.seed, epoch)[position])


@lru_cache(maxsize=2)
def _shuffled(rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(rows)
