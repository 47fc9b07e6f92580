"""A joint model's state dict: the head's names in it are those of its parameters, and checkpoints' names go in as well.

    state_dict()        mtp_head.depths.0.eh_proj.weight, as in named_parameters()
    load_state_dict()   mtp.fc.weight  ->  mtp_head.depths.0.eh_proj.weight; the module's own names are taken as they are

Torch's distributed checkpoint looks every name of a state dict up as an attribute, and pairs it with the optimiser's state
by the parameter's name. So the names that engines read are made where a checkpoint is written: see `attach_save`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mtp_zoo.checkpoint import stored_dtype
from mtp_zoo.errors import HeadMismatchError
from mtp_zoo.head import DraftHead
from mtp_zoo.keymap import Binding, to_head
from mtp_zoo.loader import key_map
from mtp_zoo.parallel import unsharded

HEAD = "mtp_head"
"""Name of the head among the model's submodules."""


@dataclass(frozen=True)
class _Stored:
    """Name, dtype and shape of a tensor of a state dict, as plans ask for them."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def add_state_hooks(model: Any) -> None:
    """Let `load_state_dict` of `model`, alone or inside another module, take the head under native names."""
    model.register_load_state_dict_pre_hook(_to_module_names)


def remove_state_hooks(model: Any) -> None:
    """Take away what `add_state_hooks` put there."""
    hooks = model._load_state_dict_pre_hooks
    for key, hook in list(hooks.items()):
        if getattr(hook, "hook", hook) is _to_module_names:
            del hooks[key]


def bindings_of(head: DraftHead) -> tuple[Binding, ...]:
    """The stored layout that the head came in, at its own place."""
    return key_map(head).layout(like=head.origin.bindings if hasattr(head, "origin") else ())


def canonical_tensors(head: DraftHead, natives: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Head tensors by canonical name out of the native ones.

    Args:
        head: says which are needed.
        natives: every native tensor of a head, and no other.

    Raises:
        HeadMismatchError: with every tensor that is missing, unexpected or misshapen.
    """
    stored = [_Stored(name, stored_dtype(value.dtype), tuple(value.shape)) for name, value in natives.items()]
    return to_head(key_map(head).plan(stored).bindings, natives)


def split_state(head: DraftHead, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The trunk's tensors, and the head's by canonical name, out of a joint model's state dict; DTensors are gathered.

    Raises:
        HeadMismatchError: the state dict holds a part of the head.
    """
    own = {name: value for name, value in state.items() if name.startswith(f"{HEAD}.")}
    natives = {name: value for name, value in state.items() if name not in own and head.site.in_scope(name)}
    trunk = {name: value for name, value in state.items() if name not in own and name not in natives}
    tensors = {name.removeprefix(f"{HEAD}."): unsharded(value) for name, value in own.items()}
    if natives:
        tensors |= canonical_tensors(head, {name: unsharded(value) for name, value in natives.items()})
    if tensors:
        _refuse_other_names(head, set(tensors))
    return trunk, tensors


def _refuse_other_names(head: DraftHead, found: set[str]) -> None:
    """Refuse a part of the head: what is absent would keep its values, and load_state_dict(strict=False) says nothing."""
    expected = set(head.state_dict())
    problems = [f"{HEAD}.{name}: missing" for name in sorted(expected - found)]
    problems += [f"{HEAD}.{name}: unexpected" for name in sorted(found - expected)]
    if problems:
        raise HeadMismatchError(
            "Reading the head in a joint model's state dict: it holds a part of the head, or more than that.",
            remedy="Pass every tensor of the head, or none of them to keep the model's own.",
            problems=problems,
        )


def _to_module_names(model: Any, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
    head: DraftHead = getattr(model, HEAD)
    bare = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    natives = {name: value for name, value in bare.items() if head.site.in_scope(name)}
    if not natives:
        own = {name.removeprefix(f"{HEAD}.") for name in bare if name.startswith(f"{HEAD}.")}
        if own:
            _refuse_other_names(head, own)
        return
    tensors = canonical_tensors(head, natives)
    for name in natives:
        del state[prefix + name]
    state.update({f"{prefix}{HEAD}.{name}": value for name, value in tensors.items()})
