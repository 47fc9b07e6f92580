"""The forward pass of a joint model: the model's own, with its final norm tapped, and the objective behind it.

Others put themselves in front of a model's `forward`: accelerate for mixed precision, TRL for a fused lm_head that never
runs the model's own forward, kernels that replace the forward of a class. So `forward` of a joint model is a slot that wraps
whatever is set on the instance, on its class or on the class that it had. Of several such layers the innermost that gets an
output computes the MTP loss, under the same autocast as the model itself; the others pass it on.

A training call (training mode, gradients recorded) computes the MTP loss or raises; see `attach_call` for those that go
around the slot.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from mtp_zoo.attach_batch import token_batch
from mtp_zoo.attach_call import JointCall, current_call, trains, under_way
from mtp_zoo.attach_gradients import check_first_step
from mtp_zoo.attach_output import is_fused, with_mtp, with_mtp_gradient
from mtp_zoo.errors import AttachError, NoMTPLossError
from mtp_zoo.objective import MTPOutput

if TYPE_CHECKING:
    from mtp_zoo.attacher import JointTraining

Forward = Callable[..., Any]
Function = TypeVar("Function", bound=Callable[..., Any])

ADDED = ("mtp_mask", "mtp_counts")
"""Keyword arguments that a joint model's forward takes beside the model's own."""


class ForwardSlot:
    """The attribute `forward` of a joint model's class.

    Args:
        source: gives the forward of the class that is to be wrapped. It is asked at every call, since others replace the
            forward of a class at any time.
    """

    def __init__(self, source: Callable[[], Forward]) -> None:
        self._source = source
        self._wrapped: tuple[Forward, Forward] | None = None

    def __get__(self, model: Any, owner: type | None = None) -> Any:
        if model is None:
            return self._of_class()
        own = model.__dict__.get("forward")
        return MethodType(self._of_class() if own is None else self._of_instance(own), model)

    def __set__(self, model: Any, value: Forward) -> None:
        model.__dict__["forward"] = value

    def __delete__(self, model: Any) -> None:
        del model.__dict__["forward"]

    def _of_class(self) -> Forward:
        original = self._source()
        if self._wrapped is None or self._wrapped[0] is not original:

            @functools.wraps(original)
            def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
                return _run(self, functools.partial(original, self), args, kwargs, inner=True)

            setattr(forward, "__signature__", joint_signature(original))  # noqa: B010 - a function has no such attribute
            self._wrapped = (original, forward)
        return self._wrapped[1]

    def _of_instance(self, value: Forward) -> Forward:
        @functools.wraps(value)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return _run(self, value, args, kwargs, inner=False)

        signature = inspect.signature(self._of_class())
        setattr(forward, "__signature__", signature)  # noqa: B010 - a function has no such attribute
        return forward


@functools.cache
def slotted(kind: type) -> type:
    """A metaclass under which assigning `forward` to a class fills its slot instead of replacing it.

    Args:
        kind: the metaclass of the model's class.
    """

    def assign(cls: Any, name: str, value: Any) -> None:
        if name == "forward" and not isinstance(value, ForwardSlot):
            function = value
            value = ForwardSlot(lambda: function)
        cast("Any", kind).__setattr__(cls, name, value)

    return type(kind.__name__, (kind,), {"__setattr__": assign})


def _skipped(function: Function) -> Function:
    """Keep a function's own code outside of compiled graphs; what it calls may be compiled."""
    return cast("Function", torch.compiler.disable(function, recursive=False))


def _outside(function: Function) -> Function:
    """Keep a function, and what it calls, outside of compiled graphs."""
    return cast("Function", torch.compiler.disable(function))


def joint_signature(original: Forward) -> inspect.Signature:
    """The original's signature with the added arguments, keyword-only; trainers choose a data set's columns by it."""
    signature = inspect.signature(original)
    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in ADDED]
    own = list(signature.parameters.values())
    last = len(own) - bool(own and own[-1].kind is inspect.Parameter.VAR_KEYWORD)
    return signature.replace(parameters=[*own[:last], *added, *own[last:]])


@_skipped
def _run(model: Any, run: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], *, inner: bool) -> Any:
    control: JointTraining | None = model.__dict__.get("mtp")
    if control is None:  # an instance that was made from the class, not by attach
        return run(*args, **kwargs)
    mask, counts = (kwargs.pop(name, None) for name in ADDED)
    call = current_call(control)
    if call is not None:
        return _layer(model, control, call, run, args, kwargs, inner=inner)
    call = _call(model, control, _named(model, args, kwargs), mask, counts)
    if call is None:
        return run(*args, **kwargs)
    with under_way(control, call):
        return _layer(model, control, call, run, args, kwargs, inner=inner)


@_outside
def _call(
    model: Any, control: JointTraining, named: Mapping[str, Any], mask: Tensor | None, counts: Tensor | None
) -> JointCall | None:
    """The call that these arguments make, or None where it is the model's own."""
    if mask is None and named.get("labels") is None:
        if trains(model):
            raise _without_labels(model)
        return None
    control.check(model)
    return JointCall(token_batch(named, mask, model.config), counts, torch.is_grad_enabled())


def _without_labels(model: Any) -> NoMTPLossError:
    return NoMTPLossError(
        f"Training {type(model).__name__}: expected labels or mtp_mask in a call in training mode that records gradients, got "
        "neither, so the head would get no gradient. Label smoothing, compute_loss_func and trainers that make a loss of "
        "their own out of logits take the labels away from the model.",
        remedy="Pass labels or mtp_mask; where a step is to train the model alone, call it under `with model.mtp.paused()`.",
    )


@_skipped
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
    if call.finished:
        return run(*args, **kwargs)
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


@_outside
def _finish(model: Any, control: JointTraining, call: JointCall, named: Mapping[str, Any], out: Any) -> Any:
    if call.hidden is None:
        raise AttachError(
            f"Computing the MTP loss: the final norm of {type(model).__name__} did not run in its forward pass.",
            remedy="Call the whole model; one that runs in pipeline stages can't be tapped.",
        )
    hidden, call.hidden = call.hidden, None
    fused = is_fused(out)
    counts = hidden.new_ones(control.objective.depths) if fused else _counts(control, call, named, hidden.device)
    assert call.tokens is not None
    result = control.objective(call.tokens, hidden, step_counts=counts)
    if call.grad and model.training:
        check_first_step(model, control.objective.head)
    control.last = MTPOutput(result.loss.detach(), result.stats)
    metrics = {name: value.float() for name, value in result.stats.means().items()}
    if fused:
        return with_mtp_gradient(out, control.mtp_lambda * result.loss, metrics)
    has_loss = named.get("labels") is not None and not (control.mode == "mtp_only" and model.training)
    joint = control.mode == "joint"
    control.own_loss = (out[0] if isinstance(out, tuple) else out.loss).detach() if has_loss else None
    return with_mtp(out, result.loss, control.mtp_lambda, metrics, has_loss=has_loss, joint=joint, keys=model.training)


def _counts(control: JointTraining, call: JointCall, named: Mapping[str, Any], device: torch.device) -> Tensor | None:
    """What each depth's sum is divided by: the step's own slots, or the step's labels, or (None) this call's slots."""
    items = named.get("num_items_in_batch")
    if call.counts is not None or items is None:
        return call.counts
    return torch.as_tensor(items, dtype=torch.float32, device=device).expand(control.objective.depths)


@functools.cache
def _names(forward: Forward) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


@_outside
def _named(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The call's arguments by name."""
    return {**dict(zip(_names(type(model).forward), args, strict=False)), **kwargs}


def _without_logits(model: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """The same call without the model's own loss, and with one token's logits where it can be told so."""
    keep = {"logits_to_keep": 1} if "logits_to_keep" in _names(type(model).forward) else {}
    return {**named, "labels": None, **keep}
