"""Rotary embeddings whose frequencies stay FP32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class FloatRotary(nn.Module):
    """A transformers rotary embedding that moves between devices and ignores dtype casts.

    `head.to(torch.bfloat16)` would round the inverse frequencies, and rounded frequencies are wrong positions.

    Args:
        inner: the model's own rotary module.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def _apply(self, fn: Any, recurse: bool = True) -> FloatRotary:
        del recurse
        for buffer in self.inner.buffers():
            self.inner.to(device=fn(torch.empty(0, device=buffer.device)).device)
        return self

    def forward(self, states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for `position_ids` [batch, seq], in the dtype of `states`."""
        return self.inner(states, position_ids)
