"""From states to logits: the output projection with what some models do behind it, forwards and backwards, in FP32.

    logits = softcap * tanh(scale * (states @ weight.T) / softcap)

Importing this file loads no model code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

VOCAB_BLOCK = 4096
"""Rows of a half-precision projection that are widened at a time on a CPU: 16 MiB at a hidden size of 1,024."""


@dataclass(frozen=True)
class LogitRule:
    """What a model does with the product of states and lm_head.

    Attributes:
        scale: factor on the product (Cohere's `logit_scale`; one over Granite's `logits_scaling`).
        softcap: bound of the logits, softcap * tanh(x / softcap) (Gemma's `final_logit_softcapping`); None: none.
        vocab_size: entries that are tokens; the rest of a padded lm_head gets no probability. None: all are.
    """

    scale: float = 1.0
    softcap: float | None = None
    vocab_size: int | None = None

    @classmethod
    def of(cls, config: Any) -> LogitRule:
        """The rule that a transformers text config states. A padded lm_head is in no config: say `vocab_size` yourself."""
        divisor = getattr(config, "logits_scaling", None) or 1.0
        scale = getattr(config, "logit_scale", None) or 1.0
        return cls(scale=float(scale) / float(divisor), softcap=getattr(config, "final_logit_softcapping", None))

    def apply_(self, product: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch vocab"]:
        """Logits from the product, in its place."""
        if self.scale != 1.0:
            product.mul_(self.scale)
        if self.softcap is not None:
            product.div_(self.softcap).tanh_().mul_(self.softcap)
        return product

    def backward_(self, grad: Float[Tensor, "n vocab"], logits: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
        """Gradient on the product from the gradient on the logits, in its place."""
        if self.softcap is not None:
            grad.mul_(1 - (logits / self.softcap).square_())
        if self.scale != 1.0:
            grad.mul_(self.scale)
        return grad

    def entries(self, weight: Float[Tensor, "vocab hidden"]) -> Float[Tensor, "tokens hidden"]:
        """The rows of the lm_head that are tokens; a view."""
        return weight if self.vocab_size is None else weight[: self.vocab_size]


PLAIN = LogitRule()
"""The product itself."""


def compute_dtype(states: Tensor) -> torch.dtype:
    """FP32, or FP64 for FP64 states."""
    return torch.promote_types(states.dtype, torch.float32)


def project(states: Float[Tensor, "n hidden"], weight: Float[Tensor, "vocab hidden"]) -> Float[Tensor, "n vocab"]:
    """`states @ weight.T` with sums and result in FP32 (FP64 where both are); no graph.

    A half-precision product would round every logit to 8 or 11 bits. GPUs give FP32 out of it; a CPU widens the weight a
    block of the vocabulary at a time, which is also faster than its half-precision products where it emulates them.
    """
    states, wide = states.to(weight.dtype), compute_dtype(weight)
    if weight.dtype == wide:
        return states @ weight.T
    if weight.is_cuda:
        return torch.mm(states, weight.T, out_dtype=wide)
    out = torch.empty(len(states), len(weight), dtype=wide, device=weight.device)
    states = states.to(wide)
    for here, block in _widened(weight, wide):
        out[:, here] = states @ block.T
    return out


def project_back(grad: Float[Tensor, "n vocab"], weight: Float[Tensor, "vocab hidden"]) -> Float[Tensor, "n hidden"]:
    """`grad @ weight`, the gradient on the states, with the sums over the vocabulary in FP32; no graph."""
    if weight.dtype == grad.dtype:
        return grad @ weight
    if weight.is_cuda:
        return torch.mm(grad.to(weight.dtype), weight, out_dtype=grad.dtype)
    out = torch.zeros(len(grad), weight.shape[1], dtype=grad.dtype, device=grad.device)
    for here, block in _widened(weight, grad.dtype):
        out.addmm_(grad[:, here], block)
    return out


def add_weight_gradient_(
    total: Float[Tensor, "vocab hidden"], grad: Float[Tensor, "n vocab"], states: Float[Tensor, "n hidden"]
) -> None:
    """`total += grad.T @ states`, in FP32."""
    total.addmm_(grad.T, states.to(total.dtype))


def _widened(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows in a wider dtype, in one buffer that is used again and again."""
    buffer = torch.empty(min(VOCAB_BLOCK, len(weight)), weight.shape[1], dtype=dtype, device=weight.device)
    for start in range(0, len(weight), VOCAB_BLOCK):
        rows = weight[start : start + VOCAB_BLOCK]
        yield slice(start, start + len(rows)), buffer[: len(rows)].copy_(rows)
