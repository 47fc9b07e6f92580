"""The draft chain as one masked attention over [S, j * S] keys: slow, plain, and the judge of the lean one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mtp_zoo.batch import PADDING, TokenBatch
from mtp_zoo.head import DepthState, DraftHead
from mtp_zoo.rollout import slot_positions


class ConcatCache:
    """What a layer needs of a cache; keys of later depths are appended, with their graph."""

    def __init__(self) -> None:
        self.pair: tuple[Tensor, Tensor] | None = None

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.pair is not None:
            key, value = (torch.cat([old, new], dim=-2) for old, new in zip(self.pair, (key, value), strict=True))
        self.pair = (key, value)
        return self.pair


def dense_mask(doc_ids: Tensor, depth: int, window: int | None = None) -> Tensor:
    """[B, 1, S, depth * S]: depth-1 keys causal within the document, deeper keys on the diagonal.

    The key of slot s at depth d lies in entry s + d - 1 of a server's cache. A query sees entries at a distance below
    the window, and no window where there is None.
    """
    batch, seq = doc_ids.shape
    causal = torch.ones(seq, seq, dtype=torch.bool).tril()
    same = (doc_ids[:, :, None] == doc_ids[:, None, :]) & (doc_ids != PADDING)[:, :, None]
    own = torch.eye(seq, dtype=torch.bool).expand(batch, seq, seq)
    mask = torch.cat([causal & same, *[own] * (depth - 1)], dim=-1)
    entries = torch.cat([torch.arange(seq) + step for step in range(depth)])
    if window is not None:
        mask = mask & (entries[-seq:, None] - entries[None, :] < window)
    # a query of padding without any key would give NaN
    padding = own & (doc_ids == PADDING)[:, :, None]
    mask[..., :seq] |= padding
    return mask[:, None]


def dense_chain(
    head: DraftHead, tokens: TokenBatch, hidden: Tensor, depths: int, window: int | None = None
) -> list[DepthState]:
    cache, recycled, states = ConcatCache(), hidden, []
    with own_masks(head):
        for depth in range(1, depths + 1):
            state = head.run_depth(
                depth,
                head.shared.embed(tokens.slots(depth).input_ids),
                recycled,
                slot_positions(head, tokens.position_ids, depth),
                cache=cache,
                mask=dense_mask(tokens.doc_ids, depth, window),
            )
            states.append(state)
            recycled = state.recycled
    return states


@contextmanager
def own_masks(head: DraftHead) -> Iterator[None]:
    """Let the layer attend through transformers' own function, which takes a mask as it is, whatever the layer's window."""
    config = head.factory.config
    ours = config._attn_implementation
    config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        config._attn_implementation = ours
