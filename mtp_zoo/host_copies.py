"""Copies between the host and a device: from a device in one wait, to a device without any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")


def to_host(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Copy tensors to the CPU; all whole numbers and flags come in one copy, so that the host waits for the device once.

    Floats (masks that some pipelines make) are copied one by one. What lies on the CPU is taken as it is.
    """
    given = {name: value for name, value in tensors.items() if value is not None}
    packed = [name for name, value in given.items() if value.device.type != "cpu" and not value.is_floating_point()]
    copies = {name: value if name in packed else value.cpu() for name, value in given.items()}
    if packed:
        flat = torch.cat([given[name].flatten().long() for name in packed]).cpu()
        for name, part in zip(packed, flat.split([given[name].numel() for name in packed]), strict=True):
            copies[name] = part.view(given[name].shape).to(given[name].dtype)
    return {name: copies.get(name) for name in tensors}


def to_device(value: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device, from pinned memory where the device is CUDA: the host waits for nothing.

    A copy to the CPU is finished when it is returned.
    """
    device = torch.device(device)
    if device.type == "cuda" and value.device.type == "cpu":
        value = value.pin_memory()
    return value.to(device, non_blocking=device.type != "cpu")


def moved(value: T, device: torch.device | str) -> T:
    """Copy every tensor in a dataclass, in a tuple of them or on its own to a device; see `to_device`."""
    if isinstance(value, Tensor):
        return cast("T", to_device(value, device))
    if isinstance(value, tuple):
        return cast("T", tuple(moved(each, device) for each in cast("tuple[Any, ...]", value)))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: moved(getattr(value, f.name), device) for f in fields(value)})
    return value
