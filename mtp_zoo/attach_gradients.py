"""Whether a head's gradients are there when an optimiser steps for the first time.

The check is a hook in front of an optimiser's step: by then micro-batches are accumulated, ranks are reduced (DDP, FSDP2), and
a GradScaler has left out a step whose gradients overflowed. It ends with the first step of every optimiser that holds a part of
the head, so later steps cost nothing.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from mtp_zoo.head import DraftHead

_WATCHED: weakref.WeakSet[DraftHead] = weakref.WeakSet()
"""Heads whose first step was, or is going to be, checked."""

_PENDING: list[_FirstStep] = []
"""Those that are going to be. One hook of torch serves all, since none can be removed while it runs."""


class HeadGradientWarning(UserWarning):
    """The head's gradients are missing or not finite at an optimiser's first step, or no optimiser holds its tensors."""


def check_first_step(model: Any, head: DraftHead) -> None:
    """Check the head's gradients when an optimiser steps for the first time; a head is checked once.

    Warns:
        HeadGradientWarning: from within the step. Trainable tensors of the head that have no gradient, or one that is not
            finite; or, at the second step of an optimiser that holds the model, those that no optimiser has stepped.
    """
    if head not in _WATCHED:
        _WATCHED.add(head)
        _register()
        _PENDING.append(_FirstStep(model, head))


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if not _PENDING:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    problems = [problem for watch in list(_PENDING) for problem in watch.check(optimizer, held)]
    if problems:
        warnings.warn(
            "Training the head: at the first step of the optimiser, " + "; ".join(problems),
            HeadGradientWarning,
            stacklevel=4,
        )


class _FirstStep:
    """The check of one head, which may be spread over several optimisers."""

    def __init__(self, model: Any, head: DraftHead) -> None:
        self._model, self._head = weakref.ref(model), weakref.ref(head)
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._seen: set[str] = set()

    @property
    def head(self) -> DraftHead | None:
        """The head, while it lives."""
        return self._head()

    def check(self, optimizer: Optimizer, held: set[int]) -> list[str]:
        """What is wrong with the head's tensors in this optimiser, whose parameters have the ids `held`."""
        model, head = self._model(), self._head()
        if model is None or head is None:
            _PENDING.remove(self)
            return []
        if held.isdisjoint(id(parameter) for parameter in model.parameters()):
            return []
        trained = {name: p for name, p in head.named_parameters() if p.requires_grad}
        first = {name: p for name, p in trained.items() if id(p) in held and name not in self._seen}
        # A fused optimiser is called by the GradScaler also for a step that overflowed; it leaves that out itself.
        problems = _problems(first, finite=getattr(optimizer, "found_inf", None) is None)
        self._seen |= first.keys()
        missing = trained.keys() - self._seen
        if optimizer in self._stepped:
            problems += [f"{name}: in no optimiser that steps" for name in trained if name in missing]
        self._stepped.add(optimizer)
        if problems or not missing:
            _PENDING.remove(self)
        return problems


@torch.no_grad()
def _problems(parameters: Mapping[str, Tensor], *, finite: bool) -> list[str]:
    problems: list[str] = []
    for name, parameter in parameters.items():
        if parameter.grad is None:
            problems.append(f"{name}: no gradient")
        if parameter.grad is None or not finite:
            continue
        grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        if not bool(grad.isfinite().all()):
            problems.append(f"{name}: a gradient that is not finite")
    return problems


def forget_first_step(head: DraftHead) -> None:
    """Drop the check of a head that no longer trains with its model."""
    _WATCHED.discard(head)
    _PENDING[:] = [watch for watch in _PENDING if watch.head is not head]
