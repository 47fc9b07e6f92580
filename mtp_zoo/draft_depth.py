"""One depth of a draft head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mtp_zoo.blocks import BlockFactory
from mtp_zoo.spec import HeadSpec


class DraftDepth(nn.Module):
    """Fusion, block and output norm of one depth, and its lm_head where the family has one a depth."""

    def __init__(self, spec: HeadSpec, factory: BlockFactory, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        hidden = factory.config.hidden_size
        self.enorm = factory.norm()
        self.hnorm = factory.norm()
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.block = factory.layer()
        self.norm = factory.norm()
        if spec.private_head == "kept":
            self.lm_head = nn.Linear(hidden, factory.config.vocab_size, bias=False)
        for name, module in parts.items():
            # A part of depth 0 is used here and stored there: past nn.Module, so that it is registered once.
            delattr(self, name)
            object.__setattr__(self, name, module)
        self.embedding_first = spec.fuse_order == "embed_hidden"

    def fuse(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """[.., hidden] from the normed embedding and the normed state, in the family's order."""
        pair = (self.enorm(embeddings), self.hnorm(hidden))
        return self.eh_proj(torch.cat(pair if self.embedding_first else pair[::-1], dim=-1))
