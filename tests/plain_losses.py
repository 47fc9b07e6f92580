"""The losses as their definitions say, over whole logits and through autograd; shares no code with the library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def plain_logits(states: Tensor, weight: Tensor, rule: Any) -> Tensor:
    logits = (states @ weight.T).to(torch.promote_types(states.dtype, torch.float32)) * rule.scale
    if rule.softcap is not None:
        logits = rule.softcap * torch.tanh(logits / rule.softcap)
    return logits if rule.vocab_size is None else logits[:, : rule.vocab_size]


def plain_loss(
    mix: Mapping[str, float], states: Tensor, target: Tensor, labels: Tensor, weight: Tensor, rule: Any, how: Any
) -> Tensor:
    """[n], the mixed loss of every slot."""
    logits = plain_logits(states, weight, rule)
    with torch.no_grad():
        p = (plain_logits(target, weight, rule) / how.temperature).softmax(-1)
    q = (logits / how.temperature).softmax(-1)
    if how.top_k is not None:
        best = p.topk(how.top_k, dim=-1).indices
        kept = torch.zeros_like(p, dtype=torch.bool).scatter(-1, best, True)
        p, q = (torch.cat([d.gather(-1, best), (d * ~kept).sum(-1, keepdim=True)], dim=-1) for d in (p, q))
    values = {
        "ce": -logits.log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1),
        "kl": (p * (p.log() - q.log())).sum(-1),
        "reverse_kl": (q * (q.log() - p.log())).sum(-1),
        "tv": 1 - torch.minimum(p, q).sum(-1),
        "lk": -torch.minimum(p, q).sum(-1).log(),
    }
    return torch.stack([weight * values[name] for name, weight in mix.items()]).sum(0)
