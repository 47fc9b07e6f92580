"""The class of a joint model: a subclass of the model's own, of the same name, that can be copied and pickled.

The class is made at run time, so a pickle can't name it. It names the original, and the joint class is made again where it
is read.
"""

from __future__ import annotations

import functools
from typing import Any

from mtp_zoo.attach_forward import ForwardSlot, slotted
from mtp_zoo.attach_save import JointSaving
from mtp_zoo.attach_state import HEAD
from mtp_zoo.head import DraftHead
from mtp_zoo.made_class import Made


class _Joint(Made, JointSaving):
    """What a joint model's class has in front of its original."""

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        """As for the trunk; the head recomputes whole depths, since a layer alone does not see the state of the chain."""
        super()._set_gradient_checkpointing(enable, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        head: DraftHead = getattr(self, HEAD)
        for module in head.modules():
            if hasattr(module, "gradient_checkpointing"):
                setattr(module, "gradient_checkpointing", False)  # noqa: B010 - nn.Module declares tensors only
        head.gradient_checkpointing_enable(enable)

    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        """Take the state of a pickle or of a copy; the head borrows from this model, not from the one that was copied."""
        super().__setstate__(state)  # pyright: ignore[reportAttributeAccessIssue]
        control = state.get("mtp")
        if control is not None and control.model is self:
            control.objective.head.attach(self)


@functools.cache
def joint_class(original: type) -> type:
    """The class of a joint model; one for each class that models have, of the same name."""
    own = {
        "forward": ForwardSlot(lambda: original.forward),  # pyright: ignore[reportAttributeAccessIssue]
        "_made_from": (joint_class, original),
        **{name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")},
    }
    return slotted(type(original))(original.__name__, (_Joint, original), own)
