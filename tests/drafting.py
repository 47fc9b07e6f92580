"""A batch with every kind of document, and the loop that drafts token by token as a server does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from mtp_zoo.batch import PADDING, TokenBatch
from mtp_zoo.head import DraftHead
from mtp_zoo.rollout import slot_positions
from tests.heads import HIDDEN, VOCAB


def packed_batch() -> TokenBatch:
    """Two documents in a row, one with padding behind, one with padding in front, and one token alone."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCAB, (4, 12), generator=generator)
    doc_ids = torch.tensor([[0] * 7 + [1] * 5, [0] * 9 + [-1] * 3, [-1] * 4 + [0] * 8, [0] + [1] * 11])
    positions = torch.tensor([[*range(7), *range(5)], [*range(9), 0, 0, 0], [0] * 4 + [*range(8)], [0, *range(11)]])
    return TokenBatch(ids, doc_ids != PADDING, doc_ids, positions)


def random_hidden(tokens: TokenBatch, seed: int = 5) -> Tensor:
    return torch.randn(*tokens.shape, HIDDEN, generator=torch.Generator().manual_seed(seed))


def stacked(states: list[Any]) -> Tensor:
    return torch.stack([state.normed for state in states])


def entered(tokens: TokenBatch, depths: int) -> Tensor:
    """[depths, B, S]: slots into which a token of their document enters; what others hold is defined nowhere."""
    return torch.stack([tokens.slots(depth).enters for depth in range(1, depths + 1)])


@torch.no_grad()
def drafting_loop(
    head: DraftHead, tokens: TokenBatch, hidden: Tensor, depths: int, *, whole_cache: bool = False
) -> Tensor:
    """[depths, B, S, H]: prefill a cache up to every slot, then draft from it, as a server does.

    Args:
        whole_cache: let the cache keep entries that no window reaches any more.
    """
    out = torch.zeros(depths, *tokens.shape, HIDDEN)
    for b, t in (tokens.doc_ids != PADDING).nonzero().tolist():
        start = int((tokens.doc_ids[b] == tokens.doc_ids[b, t]).nonzero()[0])
        cache = DynamicCache() if whole_cache else DynamicCache(config=head.factory.config)
        one = slice(t, t + 1)
        until = slice(start, t + 1)
        state = head.draft_step(
            tokens.slots(1).input_ids[b : b + 1, until],
            hidden[b : b + 1, until],
            slot_positions(head, tokens.position_ids[b : b + 1, until], 1),
            cache=cache,
        )
        out[0, b, t] = state.normed[0, -1]
        recycled = state.recycled[:, -1:]
        for depth in range(2, depths + 1):
            ids = tokens.slots(depth).input_ids[b : b + 1, one]
            positions = slot_positions(head, tokens.position_ids[b : b + 1, one], depth)
            state = head.draft_step(ids, recycled, positions, cache=cache, depth=depth)
            out[depth - 1, b, t], recycled = state.normed[0, 0], state.recycled
    return out
