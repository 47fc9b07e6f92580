"""The forward pass of a joint model: the model's own, with its final norm tapped, and the objective behind it.

Others put themselves in front of a model's `forward`: accelerate for mixed precision, TRL for a fused lm_head that never
runs the model's own forward. So `forward` of a joint model is a slot that wraps whatever is set. Of several such layers the
innermost that gets an output computes the MTP loss, under the same autocast as the model itself; the others pass it on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtp_zoo.attach_batch import token_batch
from mtp_zoo.attach_output import is_fused, with_mtp, with_mtp_gradient
from mtp_zoo.batch import TokenBatch
from mtp_zoo.errors import AttachError
from mtp_zoo.objective import MTPOutput
from mtp_zoo.shared import language_model

if TYPE_CHECKING:
    from mtp_zoo.attacher import JointTraining

Forward = Callable[..., Any]

ADDED = ("mtp_mask", "mtp_counts")
"""Keyword arguments that a joint model's forward takes beside the model's own."""


@dataclass
class JointCall:
    """One call of a joint model, through all its layers.

    Attributes:
        tokens: the batch that it describes.
        counts: `mtp_counts`.
        grad: whether gradients were recorded when the call came in.
        hidden: what the tap saw, [batch, seq, hidden].
        finished: whether the MTP loss is in the output.
    """

    tokens: TokenBatch
    counts: Tensor | None
    grad: bool
    hidden: Tensor | None = None
    finished: bool = False


class ForwardSlot:
    """The attribute `forward` of a joint model's class.

    Args:
        original: the forward of the class that the model had.
    """

    def __init__(self, original: Forward) -> None:
        @functools.wraps(original)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return _run(self, functools.partial(original, self), args, kwargs, inner=True)

        setattr(forward, "__signature__", joint_signature(original))  # noqa: B010 - a function has no such attribute
        self._forward = forward

    def __get__(self, model: Any, owner: type | None = None) -> Any:
        if model is None:
            return self._forward
        return model.__dict__.get("forward") or MethodType(self._forward, model)

    def __set__(self, model: Any, value: Forward) -> None:
        @functools.wraps(value)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return _run(self, value, args, kwargs, inner=False)

        model.__dict__["forward"] = MethodType(forward, model)

    def __delete__(self, model: Any) -> None:
        del model.__dict__["forward"]


def joint_signature(original: Forward) -> inspect.Signature:
    """The original's signature with the added arguments, keyword-only; trainers choose a data set's columns by it."""
    signature = inspect.signature(original)
    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in ADDED]
    own = list(signature.parameters.values())
    last = len(own) - bool(own and own[-1].kind is inspect.Parameter.VAR_KEYWORD)
    return signature.replace(parameters=[*own[:last], *added, *own[last:]])


def _run(model: Any, run: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], *, inner: bool) -> Any:
    control: JointTraining | None = model.__dict__.get("mtp")
    if control is None:  # an instance that was made from the class, not by attach
        return run(*args, **kwargs)
    mask, counts = (kwargs.pop(name, None) for name in ADDED)
    if control.call is not None:
        return _layer(model, control, control.call, run, args, kwargs, inner=inner)
    named = _named(model, args, kwargs)
    if mask is None and named.get("labels") is None:
        return run(*args, **kwargs)
    control.check(model)
    call = JointCall(token_batch(named, mask, model.config), counts, torch.is_grad_enabled())
    with _tapped(model, control, call):
        return _layer(model, control, call, run, args, kwargs, inner=inner)


def _layer(
    model: Any,
    control: JointTraining,
    call: JointCall,
    run: Forward,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    inner: bool,
) -> Any:
    frozen = control.mode == "mtp_only"
    named = _named(model, args, kwargs)
    if frozen and inner and model.training:
        args, kwargs = (), _without_logits(model, named)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
        out = run(*args, **kwargs)
    if call.finished:
        return out
    call.finished = True
    with torch.set_grad_enabled(call.grad):
        return _finish(model, control, call, named, out)


def _finish(model: Any, control: JointTraining, call: JointCall, named: Mapping[str, Any], out: Any) -> Any:
    if call.hidden is None:
        raise AttachError(
            f"Computing the MTP loss: the final norm of {type(model).__name__} did not run in its forward pass.",
            remedy="Call the whole model; one that runs in pipeline stages can't be tapped.",
        )
    hidden, call.hidden = call.hidden, None
    fused = is_fused(out)
    counts = hidden.new_ones(control.objective.depths) if fused else _counts(control, call, named, hidden.device)
    result = control.objective(call.tokens, hidden, step_counts=counts)
    control.last = MTPOutput(result.loss.detach(), result.stats)
    metrics = {name: value.float() for name, value in result.stats.means().items()}
    if fused:
        return with_mtp_gradient(out, control.mtp_lambda * result.loss, metrics)
    has_loss = named.get("labels") is not None and not (control.mode == "mtp_only" and model.training)
    joint = control.mode == "joint"
    return with_mtp(out, result.loss, control.mtp_lambda, metrics, has_loss=has_loss, joint=joint, keys=model.training)


def _counts(control: JointTraining, call: JointCall, named: Mapping[str, Any], device: torch.device) -> Tensor | None:
    """What each depth's sum is divided by: the step's own slots, or the step's labels, or (None) this call's slots."""
    items = named.get("num_items_in_batch")
    if call.counts is not None or items is None:
        return call.counts
    return torch.as_tensor(items, dtype=torch.float32, device=device).expand(control.objective.depths)


@contextmanager
def _tapped(model: Any, control: JointTraining, call: JointCall) -> Generator[None]:
    """Keep what the head reads of the next forward pass: behind the final norm, or in front of it."""
    before = control.objective.head.spec.hidden_tap == "pre_norm"

    def keep(_module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        call.hidden = inputs[0] if before else output

    handle = language_model(model).norm.register_forward_hook(keep)
    control.call = call
    try:
        yield
    finally:
        control.call = None
        handle.remove()


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]  # pyright: ignore[reportAttributeAccessIssue]


def _named(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The call's arguments by name."""
    return {**dict(zip(_names(type(model)), args, strict=False)), **kwargs}


def _without_logits(model: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """The same call without the model's own loss, and with one token's logits where it can be told so."""
    keep = {"logits_to_keep": 1} if "logits_to_keep" in _names(type(model)) else {}
    return {**named, "labels": None, **keep}
