from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mtp_zoo.training.batches import BatchPlan

SIZES = st.integers(1, 4)


def test_a_step_is_a_literal_stretch_of_shuffled_epochs() -> None:
    """Pins the order: a change here breaks every run that is resumed with it."""
    plan = BatchPlan(rows=5, batch_size=2, seed=0)
    assert [plan.step_rows(step) for step in range(1, 6)] == [[2, 4], [3, 0], [1, 1], [4, 3], [0, 2]]


@given(rows=st.integers(1, 30), batch=SIZES, accumulation=SIZES, seed=st.integers(0, 5), epochs=st.integers(1, 3))
def test_every_epoch_holds_every_row_once(rows: int, batch: int, accumulation: int, seed: int, epochs: int) -> None:
    plan = BatchPlan(rows, batch, accumulation, seed=seed)
    seen = [row for step in range(1, plan.steps(epochs) + 1) for row in plan.step_rows(step)]
    assert len(seen) >= rows * epochs
    assert len(seen) - rows * epochs < plan.rows_per_step
    for epoch in range(epochs):
        assert sorted(seen[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


@given(rows=st.integers(1, 30), step=st.integers(1, 20), batch=SIZES, accumulation=SIZES, world=SIZES)
def test_the_rows_of_a_step_do_not_depend_on_how_it_is_cut(
    rows: int, step: int, batch: int, accumulation: int, world: int
) -> None:
    plan = BatchPlan(rows, batch, accumulation, world, seed=3)
    whole = BatchPlan(rows, plan.rows_per_step, seed=3)
    parts = [plan.micro_batches(step, rank) for rank in range(world)]
    assert all(len(part) == accumulation and all(len(rows) == batch for rows in part) for part in parts)
    assert Counter(row for part in parts for micro in part for row in micro) == Counter(whole.step_rows(step))


def test_a_step_needs_none_of_the_steps_before() -> None:
    plan = BatchPlan(rows=17, batch_size=3, accumulation=2, world=2, seed=9)
    in_order = [plan.micro_batches(step, rank=1) for step in range(1, 50)]
    backwards = [plan.micro_batches(step, rank=1) for step in range(49, 0, -1)][::-1]
    assert in_order == backwards


def test_seeds_and_epochs_shuffle_differently() -> None:
    orders = {
        tuple(BatchPlan(rows=20, batch_size=20, seed=seed).step_rows(step)) for seed in (0, 1) for step in (1, 2, 3)
    }
    assert len(orders) == 6
