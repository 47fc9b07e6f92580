"""Whether DDP reduces the gradient of every parameter that trains now.

DDP decides on its parameters when it is made. One that starts to train later gets a gradient on each rank, and none is
reduced: the ranks' weights differ from the next step on, without any error.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mtp_zoo.errors import AttachError

_REGISTERED: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""How many parameters each DDP module reduces; they do not change in its life."""


def check_reduced() -> None:
    """Compare the parameters that train now with those of the DDP module whose forward pass is under way, if any.

    Raises:
        AttachError: more train than DDP reduces.
    """
    wrapper: Any = DistributedDataParallel._get_active_ddp_module()  # pyright: ignore[reportPrivateUsage]
    if wrapper is None:
        return
    if wrapper not in _REGISTERED:
        _REGISTERED[wrapper] = int(wrapper._get_ddp_logging_data()["num_parameter_tensors"])
    training = sum(parameter.requires_grad for parameter in wrapper._module_parameters)
    if training > _REGISTERED[wrapper]:
        raise AttachError(
            f"Training under DDP: expected the {_REGISTERED[wrapper]} parameters that took gradients when it was made, found "
            f"{training} that take gradients now. The gradients of the others would not be reduced, so ranks would differ.",
            remedy="Set model.mtp.mode (and requires_grad) first and wrap the model again: DistributedDataParallel(model).",
        )
