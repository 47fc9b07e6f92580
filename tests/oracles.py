"""A target whose next token is known, and a head that knows it: drafts are right where the test wants them to be."""

from __future__ import annotations

from typing import Any

import torch

from mtp_zoo.head import DraftHead
from tests.heads import HIDDEN, VOCAB, tiny_head, tiny_target

FULL_ATTENTION = {"layer_types": ["full_attention", "full_attention"]}


def oracle_pair(*, wrong_after: int | None = None) -> tuple[Any, DraftHead]:
    """A target that maps each token to the next by a fixed permutation, and a head that knows the permutation.

    All trunk layers are silenced, so the state of a slot is the normed embedding of its token, and lm_head answers with
    the permuted embedding. The head hands on the embedding of the token it reads: its drafts are always right. With
    `wrong_after` the embedding it sees of every token from that id on is spoilt.
    """
    target = tiny_target(tied=False, **FULL_ATTENTION)
    head = tiny_head()
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4))
        embedding = target.model.embed_tokens.weight
        # Token `order[i]` follows token i: its row of lm_head is the direction of the embedding of i.
        target.lm_head.weight[order] = torch.nn.functional.normalize(embedding, dim=-1)
        for parameter in head.parameters():
            parameter.zero_()
        head.depths[0].eh_proj.weight[:, :HIDDEN] = torch.eye(HIDDEN)
    head.attach(target)
    if wrong_after is not None:
        embed = head.shared.embed

        def confused(ids: torch.Tensor, **cuts: bool) -> torch.Tensor:
            return torch.where((ids < wrong_after)[..., None], embed(ids, **cuts), -embed(ids, **cuts))

        head.shared.embed = confused  # type: ignore[method-assign]
        head.attach = lambda target: head  # type: ignore[method-assign] - keep the spoilt embedding
    return target, head


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]
