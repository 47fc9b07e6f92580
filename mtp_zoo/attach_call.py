"""One call of a joint model: what belongs to it, and the tap behind or in front of the model's final norm.

A call is kept in a context variable, so that calls of other threads, and of other joint models, do not meet it. The tap stays
on the norm: it gives its states to the call that is under way, and refuses a training pass that no call knows of.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtp_zoo.batch import TokenBatch
from mtp_zoo.errors import NoMTPLossError
from mtp_zoo.shared import language_model

if TYPE_CHECKING:
    from mtp_zoo.attacher import JointTraining


@dataclass
class JointCall:
    """One call of a joint model, through all its layers.

    Attributes:
        tokens: the batch that it describes; None for a call that computes no MTP loss.
        counts: `mtp_counts`.
        grad: whether gradients were recorded when the call came in.
        hidden: what the tap saw, [batch, seq, hidden].
        finished: whether the MTP loss is in the output, or none is computed.
    """

    tokens: TokenBatch | None
    counts: Tensor | None
    grad: bool
    hidden: Tensor | None = None
    finished: bool = False


_CALLS: ContextVar[dict[int, JointCall]] = ContextVar("mtp_zoo_calls")
"""The calls under way in this context, by the id of the model's JointTraining."""


def current_call(control: JointTraining) -> JointCall | None:
    """The call of this model that is under way in this thread."""
    return _CALLS.get({}).get(id(control))


@contextmanager
def under_way(control: JointTraining, call: JointCall) -> Generator[None]:
    """Let `call` be the one that the model's layers and its tap belong to."""
    token = _CALLS.set({**_CALLS.get({}), id(control): call})
    try:
        yield
    finally:
        _CALLS.reset(token)


@contextmanager
def paused(control: JointTraining) -> Generator[None]:
    """Let every call of the model be the model's own."""
    with under_way(control, JointCall(None, None, grad=False, finished=True)):
        yield


def trains(model: Any) -> bool:
    """Whether a forward pass now is one of training: the model is in training mode and gradients are recorded."""
    return model.training and torch.is_grad_enabled()


class Tap:
    """Forward hook of a joint model's final norm.

    Args:
        model: the joint model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.compiler.disable
    def __call__(self, _norm: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keep what the head reads.

        Raises:
            NoMTPLossError: a training pass that did not come in through the model's `forward`.
        """
        control: JointTraining | None = self._model.__dict__.get("mtp")
        if control is None:
            return
        call = current_call(control)
        if call is not None:
            call.hidden = inputs[0] if control.objective.head.spec.hidden_tap == "pre_norm" else output
        elif trains(self._model):
            raise NoMTPLossError(
                f"Training {type(self._model).__name__}: its decoder ran in a training pass that went around the forward "
                "which attach put there, so the head would get no gradient.",
                remedy="Call the model itself, not its decoder or a forward that was kept from before attach; or pause the "
                "head: with model.mtp.paused().",
            )


def add_tap(model: Any) -> None:
    """Put the tap on the model's final norm."""
    language_model(model).norm.register_forward_hook(Tap(model))


def remove_tap(model: Any) -> None:
    """Take the tap off the model's final norm."""
    hooks = language_model(model).norm._forward_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, Tap)]:
        del hooks[key]
