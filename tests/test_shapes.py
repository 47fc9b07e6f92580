"""The shapes in signatures are checked while tests run."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Float, Int, TypeCheckError
from torch import Tensor

from mtp_zoo.rollout import run_rollout
from tests.heads import tiny_head
from tests.shapes import declares_shape, modules_with_shapes


def test_a_wrong_dtype_or_rank_is_caught_at_the_signature() -> None:
    shared = tiny_head().shared
    assert shared.embed(torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3, 64)
    with pytest.raises(TypeCheckError, match="input_ids"):
        shared.embed(torch.zeros(2, 3))
    with pytest.raises(TypeCheckError, match="input_ids"):
        shared.embed(torch.zeros(3, dtype=torch.int64))


def test_every_module_that_declares_shapes_is_hooked_and_others_are_not() -> None:
    hooked = modules_with_shapes()
    assert {"mtp_zoo.batch", "mtp_zoo.head", "mtp_zoo.losses", "mtp_zoo.shared"} <= set(hooked)
    assert run_rollout.__module__ not in hooked


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (Float[Tensor, "batch seq"], True),
        (Int[Tensor, "batch seq"] | None, True),
        (dict[str, Float[Tensor, "hidden"]], True),  # noqa: F821
        (Tensor, False),
        (str | None, False),
    ],
)
def test_a_shape_is_found_wherever_it_stands_in_an_annotation(hint: object, expected: bool) -> None:
    assert declares_shape(hint) is expected
