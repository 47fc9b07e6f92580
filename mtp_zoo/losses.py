"""Losses over the vocabulary, computed in chunks of tokens.

Logits of a 248,320-entry vocabulary take 1 MB a token in FP32; a batch of them is never held. Each chunk computes its
logits, its losses and their gradient on the states, and drops the logits: memory is O(chunk x vocab), and the backward
pass only multiplies stored [tokens, hidden] gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mtp_zoo.errors import ObjectiveError

CHUNK_ELEMENTS = 2**25
"""Logits a chunk may hold by default: 128 MiB of FP32, 135 tokens of a 248,320-entry vocabulary."""

LossFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(head log-probs [n, vocab], target log-probs [n, vocab], labels [n]) -> loss [n]."""


def ce(log_q: Tensor, log_p: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy with the token that the text holds."""
    return -log_q.gather(-1, labels[:, None]).squeeze(-1)


def kl(log_q: Tensor, log_p: Tensor, labels: Tensor) -> Tensor:
    """Forward KL from the target's distribution p to the head's q: sum of p * (log p - log q), in nats."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


LOSSES: dict[str, LossFunction] = {"ce": ce, "kl": kl}
"""The losses that a mix may name."""


def parse_mix(loss: str | Mapping[str, float]) -> dict[str, float]:
    """`"kl"` or `{"kl": 0.9, "ce": 0.1}` as a checked mix.

    Raises:
        ObjectiveError: an unknown loss, an empty mix, or a weight that is not positive.
    """
    mix = {loss: 1.0} if isinstance(loss, str) else dict(loss)
    wrong = [f"'{name}': no such loss" for name in mix if name not in LOSSES]
    wrong += [f"'{name}': expected a weight > 0, got {weight}" for name, weight in mix.items() if not weight > 0]
    if wrong or not mix:
        raise ObjectiveError(
            f"Reading the loss {loss!r}: it is no loss and no mix of losses.",
            remedy=f"Use one of {sorted(LOSSES)}, or a mapping from these to positive weights.",
            problems=wrong,
        )
    return mix


@dataclass(frozen=True)
class ChunkedLoss:
    """Losses of n slots.

    Attributes:
        total: differentiable sum over the slots.
        correct: the head's first choice is the label.
        matched: the head's first choice is the target's: what greedy verification accepts.
        accepted: sum of min(p, q): the probability with which rejection sampling accepts.
    """

    total: Float[Tensor, ""]
    correct: Bool[Tensor, " n"]
    matched: Bool[Tensor, " n"]
    accepted: Float[Tensor, " n"]


def chunked_loss(
    states: Float[Tensor, "n hidden"],
    target_states: Float[Tensor, "n hidden"],
    labels: Int[Tensor, " n"],
    lm_head: Float[Tensor, "vocab hidden"],
    mix: Mapping[str, float],
    *,
    chunk_size: int | None = None,
) -> ChunkedLoss:
    """Sum of the mixed loss over n slots, with per-slot agreement.

    Args:
        states: what the head puts in front of the lm_head.
        target_states: what the target puts there for the same prediction; taken without a graph.
        labels: the tokens that the text holds.
        lm_head: the shared output projection; taken without a graph.
        mix: losses and their weights, from `parse_mix`.
        chunk_size: slots a chunk; None fits `CHUNK_ELEMENTS`.
    """
    chunk = chunk_size or max(1, CHUNK_ELEMENTS // lm_head.shape[0])
    return ChunkedLoss(*_ChunkedLoss.apply(states, target_states, labels, lm_head, dict(mix), chunk))


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        target_states: Tensor,
        labels: Tensor,
        lm_head: Tensor,
        mix: dict[str, float],
        chunk: int,
    ) -> tuple[Tensor, ...]:
        differentiate = ctx.needs_input_grad[0]
        total = torch.zeros((), dtype=torch.float32, device=states.device)
        grad = torch.empty_like(states) if differentiate else None
        correct = torch.empty(len(states), dtype=torch.bool, device=states.device)
        matched, accepted = torch.empty_like(correct), torch.empty(len(states), device=states.device)
        for start in range(0, len(states), chunk):
            here = slice(start, start + chunk)
            with torch.set_grad_enabled(differentiate):
                part = states[here].detach().requires_grad_(differentiate)
                log_q = _log_probs(part, lm_head)
                log_p = _log_probs(target_states[here].detach(), lm_head.detach())
                parts = [weight * LOSSES[name](log_q, log_p, labels[here]).sum() for name, weight in mix.items()]
                loss = torch.stack(parts).sum()
            if grad is not None:
                (grad[here],) = torch.autograd.grad(loss, part)
            with torch.no_grad():
                total += loss
                choice = log_q.argmax(-1)
                correct[here] = choice == labels[here]
                matched[here] = choice == log_p.argmax(-1)
                accepted[here] = torch.minimum(log_q, log_p).exp_().sum(-1)
        ctx.mark_non_differentiable(correct, matched, accepted)
        ctx.save_for_backward(grad)
        return total, correct, matched, accepted

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * grads[0].to(grad.dtype), None, None, None, None, None


def _log_probs(states: Tensor, lm_head: Tensor) -> Tensor:
    return (states.to(lm_head.dtype) @ lm_head.T).float().log_softmax(-1)
