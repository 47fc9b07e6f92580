"""Attention of the draft chain where a batch is cut along its slots over several ranks.

Each rank holds the queries of its slots. The depth-1 keys and values of all ranks are gathered by torch's context-parallel
collective, whose backward hands every rank the sum of the gradients of its own. A deeper depth adds a query's own keys, and
those are local. So at depth j the query of slot t sees

    depth-1 keys of slots 0..t of its document, on whatever rank they are
    its own keys of depths 2..j

On CUDA the mask is a block mask of torch's flex_attention, compiled: blocks that nothing sees cost nothing. Elsewhere it is
dense, [batch, 1, local, seq + (j - 1) * local] booleans: flex_attention has no backward on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention

from mtp_zoo.errors import ParallelError
from mtp_zoo.key_store import KeyStore

UNSUPPORTED = {
    "sliding_window": "a sliding window",
    "softcap": "soft-capped scores",
    "s_aux": "attention sinks",
}
"""Keywords by which transformers' layers ask for what this attention does not do."""


@dataclass(frozen=True)
class KeyPlaces:
    """Where queries and keys lie.

    Attributes:
        slots, doc_ids: [batch, local], of this rank's queries.
        key_slots, key_doc_ids: [batch, seq], of the gathered keys, rank 0 first.
        group: the ranks that hold the parts.
    """

    slots: Tensor
    doc_ids: Tensor
    key_slots: Tensor
    key_doc_ids: Tensor
    group: ProcessGroup | None

    def visibility(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Whether a query sees a key, by (batch, head, query, key): what flex_attention calls a mask function.

        Keys behind the gathered ones are the queries' own, one stretch a depth. Padding sees padding in front of it, so that
        no query sees nothing.
        """
        slots, doc_ids, key_slots, key_doc_ids = self.slots, self.doc_ids, self.key_slots, self.key_doc_ids
        gathered, local = key_slots.shape[1], slots.shape[1]

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            del head
            prefix = key < gathered
            place = torch.where(prefix, key, 0)
            document = doc_ids[batch, query] == key_doc_ids[batch, place]
            earlier = key_slots[batch, place] <= slots[batch, query]
            return torch.where(prefix, document & earlier, (key - gathered) % local == query)

        return sees

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, heads, local, dim] of all ranks, [batch, heads, seq, dim]."""
        if self.key_slots.shape[1] == key.shape[2]:
            return key, value
        if self.group is None:
            raise ParallelError(
                "Attending over a split batch: other ranks hold some of the keys, and the batch was split without a group.",
                remedy="Pass group= to split.",
            )
        return _torch_gather()(key, value, 2, self.group.group_name)


class ContextState(KeyStore):
    """Depth-1 keys and values of all ranks and own ones of deeper depths, and the masks of one rollout."""

    def __init__(self, places: KeyPlaces) -> None:
        super().__init__()
        self.places = places
        self.masks: dict[int, Any] = {}

    def at(self, step: int) -> ContextView:
        """The state as depth `step` (1-based) sees it."""
        return ContextView(self, step)


class ContextView:
    """One depth's view of a `ContextState`."""

    def __init__(self, state: ContextState, step: int) -> None:
        self.state = state
        self.step = step

    def visible(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Gathered keys and values of depth 1, and behind them the own ones of depths 2..step."""
        fresh = self.state.places.gather(key, value) if self.step == 1 else (key, value)
        pairs = self.state.through(layer, self.step, fresh)
        return torch.cat([k for k, _ in pairs], dim=2), torch.cat([v for _, v in pairs], dim=2)

    def mask(self, make: Callable[[KeyPlaces, int], Any]) -> Any:
        """This depth's mask, made once a rollout by `make(places, number of keys)`."""
        if self.step not in self.state.masks:
            local = self.state.places.slots.shape[1]
            keys = self.state.places.key_slots.shape[1] + (self.step - 1) * local
            self.state.masks[self.step] = make(self.state.places, keys)
        return self.state.masks[self.step]


def context_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    mtp_chain: ContextView,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: query [batch, heads, local, dim], key and value with fewer heads under GQA.

    Raises:
        ParallelError: the layer asks for more than a causal softmax attention, or the batch has no group.
    """
    _refuse_unsupported(module, attention_mask, dropout, kwargs)
    keys, values = mtp_chain.visible(module.layer_idx, key, value)
    attend = _flex if query.device.type == "cuda" else _dense
    out = attend(query, keys, values, mtp_chain, scaling)
    return out.transpose(1, 2).contiguous(), None


def _torch_gather() -> Callable[..., tuple[Tensor, Tensor]]:
    """The collective of torch's own context-parallel flex attention. It is experimental: its place has moved before."""
    try:
        from torch.distributed.tensor.experimental._context_parallel import flex_cp_allgather
    except ImportError as error:
        raise ParallelError(
            f"Attending over a split batch: torch {torch.__version__} has no context-parallel gather in "
            "torch.distributed.tensor.experimental._context_parallel.",
            remedy="Use torch 2.13.",
        ) from error
    return flex_cp_allgather


def _refuse_unsupported(module: Any, attention_mask: Tensor | None, dropout: float, kwargs: dict[str, Any]) -> None:
    found = [what for name, what in UNSUPPORTED.items() if kwargs.get(name) is not None]
    found += ["dropout"] if dropout else []
    found += ["a mask of its own (the indexer of sparse attention)"] if attention_mask is not None else []
    if found:
        raise ParallelError(
            f"Running {type(module).__name__} on a split batch: its attention has {', '.join(found)}.",
            remedy="Run this head on whole rows; context parallel does causal softmax attention within documents.",
        )


def _dense(query: Tensor, key: Tensor, value: Tensor, view: ContextView, scale: float | None) -> Tensor:
    mask = view.mask(_dense_mask)
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _dense_mask(places: KeyPlaces, keys: int) -> Tensor:
    batch, local = places.slots.shape

    def index(size: int, axis: int) -> Tensor:
        return torch.arange(size, device=places.slots.device).view([-1 if axis == a else 1 for a in range(4)])

    return places.visibility()(index(batch, 0), index(1, 1), index(local, 2), index(keys, 3))


def _flex(query: Tensor, key: Tensor, value: Tensor, view: ContextView, scale: float | None) -> Tensor:
    mask, grouped = view.mask(_block_mask), query.shape[1] != key.shape[1]
    return _compiled().attend(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)


def _block_mask(places: KeyPlaces, keys: int) -> Any:
    batch, local = places.slots.shape
    return _compiled().block_mask(places.visibility(), batch, None, local, keys, device=places.slots.device)


@dataclass(frozen=True)
class _Compiled:
    attend: Callable[..., Tensor]
    block_mask: Callable[..., Any]


@cache
def _compiled() -> _Compiled:
    """Uncompiled, both would hold a dense mask, and the attention its scores too."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return _Compiled(torch.compile(flex_attention), torch.compile(create_block_mask))
