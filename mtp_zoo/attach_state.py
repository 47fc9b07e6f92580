"""A joint model's state dict: the head stands in it under the names that checkpoints use.

    state_dict()        mtp_head.depths.0.eh_proj.weight  ->  mtp.fc.weight
    load_state_dict()   mtp.fc.weight  ->  mtp_head.depths.0.eh_proj.weight; the module's own names are taken as well

Where the head's parameters are DTensors (FSDP2), its module's names stay: torch's distributed checkpoint looks each name
up as an attribute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mtp_zoo.checkpoint import stored_dtype
from mtp_zoo.head import DraftHead
from mtp_zoo.keymap import Binding, to_head, to_native
from mtp_zoo.loader import key_map
from mtp_zoo.parallel import is_sharded, unsharded

HEAD = "mtp_head"
"""Name of the head among the model's submodules."""


@dataclass(frozen=True)
class _Stored:
    """Name, dtype and shape of a tensor of a state dict, as plans ask for them."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def add_state_hooks(model: Any) -> None:
    """Let the state dict of `model`, alone or inside another module, hold the head under native names."""
    model.register_state_dict_post_hook(_to_native_names)
    model.register_load_state_dict_pre_hook(_to_module_names)


def remove_state_hooks(model: Any) -> None:
    """Take away what `add_state_hooks` put there."""
    for hooks in (model._state_dict_hooks, model._load_state_dict_pre_hooks):
        for key, hook in list(hooks.items()):
            if getattr(hook, "hook", hook) in (_to_native_names, _to_module_names):
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
    return trunk, tensors


def _to_native_names(model: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    start = f"{prefix}{HEAD}."
    found = {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
    if not found or any(map(is_sharded, found.values())):
        return
    for name in found:
        del state[start + name]
    state.update({prefix + name: value for name, value in _natives(bindings_of(getattr(model, HEAD)), found).items()})


def _natives(bindings: Iterable[Binding], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Native tensors: the head's own where a whole one is stored as it is, as in any state dict; else copies."""
    out: dict[str, Tensor] = {}
    for binding in bindings:
        moves = binding.moves
        if len(moves) == 1 and not moves[0].native_index and not moves[0].head_index:
            out[moves[0].native] = tensors[moves[0].head]
        else:
            out |= to_native([binding], tensors)
    return out


def _to_module_names(model: Any, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
    head: DraftHead = getattr(model, HEAD)
    bare = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    natives = {name: value for name, value in bare.items() if head.site.in_scope(name)}
    if not natives:
        return
    tensors = canonical_tensors(head, natives)
    for name in natives:
        del state[prefix + name]
    state.update({f"{prefix}{HEAD}.{name}": value for name, value in tensors.items()})
