"""Parameters of a head that no depth of an objective reaches.

Data parallelism waits for a gradient of every parameter that takes one. So an objective gives those that it does not run a
gradient of exactly zero; weight decay still moves them. Whoever wants them left alone freezes them (`freeze_unused`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def unused_parameters(head: nn.Module, depths: int) -> Iterator[nn.Parameter]:
    """Iterate over what the depths behind `depths` have to themselves; parts that they share belong to the first.

    Example: of a head with three depths and `depths=1`, all of `depths.1` and `depths.2`.
    """
    for name, parameter in head.named_parameters():
        _, found, inside = name.rpartition("depths.")
        if found and int(inside.split(".")[0]) >= depths:
            yield parameter


def freeze_unused(head: nn.Module, depths: int) -> None:
    """Let what depths behind `depths` have to themselves take no gradient."""
    for parameter in unused_parameters(head, depths):
        parameter.requires_grad_(False)


def with_zero_gradients(loss: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return the same loss, whose backward also gives these parameters gradients of exactly zero."""
    taking = [parameter for parameter in parameters if parameter.requires_grad]
    if not taking or not loss.requires_grad:
        return loss
    return cast("Tensor", _ZeroGradients.apply(loss, *taking))


class _ZeroGradients(torch.autograd.Function):
    """The first argument, with the others in its graph."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (outer[0], *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors))
