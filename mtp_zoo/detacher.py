"""detach: the model that `attach` was given, as it was, and the head by itself."""

from __future__ import annotations

from typing import Any

from mtp_zoo.attach_call import remove_tap
from mtp_zoo.attach_gradients import forget_first_step
from mtp_zoo.attach_peft import JointAdapter, base_model
from mtp_zoo.attach_state import HEAD, remove_state_hooks
from mtp_zoo.corrections import latent_norms
from mtp_zoo.errors import AttachError
from mtp_zoo.head import DraftHead
from mtp_zoo.made_class import original_class


def detach(model: Any) -> DraftHead:
    """Undo `attach`: give the model its class, hooks, latent norms and trainable parameters back.

    What training changed stays: weights, gradients, adapters.

    Args:
        model: a joint model, or the PEFT model around one that `attach` was given.

    Returns:
        The head, which goes on borrowing the model's embedding and lm_head. It can be attached again.

    Raises:
        AttachError: the model has no head, or a wrapper has changed its class since.

    Example:
        >>> head = mz.detach(model)                                      # doctest: +SKIP
        >>> mz.replay(model, head, prompts, k=3, max_new_tokens=64)          # doctest: +SKIP
    """
    base = base_model(model)
    _refuse(base)
    control = base.mtp
    control.mode = "joint"
    for norm, epsilon in zip(latent_norms(base), control.epsilons, strict=True):
        norm.variance_epsilon = epsilon
    remove_tap(base)
    remove_state_hooks(base)
    forget_first_step(control.objective.head)
    base.__class__ = original_class(type(base))
    delattr(base, HEAD)
    del base.mtp
    if isinstance(model, JointAdapter):
        model.__class__ = original_class(type(model)) or type(model)
    return control.objective.head


def _refuse(base: Any) -> None:
    name = type(base).__name__
    if "mtp" not in getattr(base, "__dict__", {}) or not hasattr(base, HEAD):
        raise AttachError(
            f"Detaching the head: expected a joint model, got a {name}, which has none.",
            remedy="Call mz.detach on a model that mz.attach was called on.",
        )
    if original_class(type(base)) is None:
        raise AttachError(
            f"Detaching the head: something put the class {name} in front of the joint model's, as FSDP2 does; expected the "
            "class that attach gave it.",
            remedy="Detach before the model is sharded, or save it and load the checkpoint.",
        )
