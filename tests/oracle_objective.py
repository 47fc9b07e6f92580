"""The whole objective once more: plain, slow, and independent of what it judges.

Loops over documents, slots and depths, with shifts, gates, losses, means and metrics of its own; nothing of `mtp_zoo` is
imported. A head takes part only through `draft_step`, fed token by token with a KV cache as a server drafts. Documents come
one by one: a batch's layout must not matter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


@dataclass(frozen=True)
class Text:
    """One document: token ids, which of them are to be learnt, and the target's state of each [n, hidden]."""

    ids: Sequence[int]
    learn: Sequence[bool]
    hidden: Tensor
    start: int = 0
    """Position of its first token."""


@dataclass(frozen=True)
class Options:
    """What to compute; the names are those of the objective's own arguments."""

    mixes: Sequence[Mapping[str, float]]
    weights: Sequence[float]
    rollout: str = "chain"
    temperature: float = 1.0
    top_k: int | None = None
    reduction: str = "global"
    placeholders: frozenset[int] = frozenset()
    scale: float = 1.0
    softcap: float | None = None
    vocab_size: int | None = None

    @property
    def depths(self) -> int:
        return len(self.mixes)


@dataclass
class Sums:
    """One depth's sums over its slots."""

    loss: Any = 0.0
    slots: int = 0
    correct: int = 0
    matched: int = 0
    accepted: float = 0.0


@dataclass
class Result:
    """The loss (with its graph) and the metrics."""

    loss: Tensor
    depths: list[Sums]
    accept_length: float
    accept_length_sampled: float
    denominators: list[int] = field(default_factory=list)

    @property
    def metrics(self) -> dict[str, float]:
        out = {"mtp/accept_length": self.accept_length, "mtp/accept_length_sampled": self.accept_length_sampled}
        for k, sums in enumerate(self.depths, start=1):
            count = max(sums.slots, 1)
            out |= {
                f"mtp/loss_{k}": float(torch.as_tensor(sums.loss).detach()) / count,
                f"mtp/acc_{k}": sums.correct / count,
                f"mtp/match_{k}": sums.matched / count,
                f"mtp/accept_{k}": sums.accepted / count,
                f"mtp/slots_{k}": sums.slots,
            }
        return out


def counts(text: Text, t: int, k: int, placeholders: frozenset[int] = frozenset()) -> bool:
    """Whether depth k in slot t of this document counts: depths 1 to k read tokens t + 1 to t + k, k predicts t + k + 1."""
    read = text.ids[t + 1 : t + k + 1]
    return t + k + 1 < len(text.ids) and text.learn[t + k + 1] and placeholders.isdisjoint(read)


def objective(head: Any, texts: Sequence[Text], options: Options, denominators: Sequence[int] | None = None) -> Result:
    """The objective over these documents; `denominators` are those of a step of which they are a part."""
    depths = [Sums() for _ in range(options.depths)]
    greedy, sampled, full = 0.0, 0.0, 0
    for text in texts:
        states = (
            chain(head, text, options.depths) if options.rollout == "chain" else sequence(head, text, options.depths)
        )
        for t in range(len(text.ids)):
            matched, accepted = [], []
            for k in range(1, options.depths + 1):
                if counts(text, t, k, options.placeholders):
                    match, accept = add_slot(depths[k - 1], head, text, t, k, states[t, k], options)
                    matched.append(match)
                    accepted.append(accept)
            if len(matched) == options.depths:
                full += 1
                greedy += sum(all(matched[: k + 1]) for k in range(options.depths))
                sampled += sum(math.prod(accepted[: k + 1]) for k in range(options.depths))
    below = list(denominators) if denominators is not None else [*step_denominators(texts, options)]
    loss = sum(
        weight * sums.loss / max(count, 1) for weight, sums, count in zip(options.weights, depths, below, strict=True)
    )
    return Result(torch.as_tensor(loss), depths, 1 + greedy / max(full, 1), 1 + sampled / max(full, 1), below)


def step_denominators(texts: Sequence[Text], options: Options) -> list[int]:
    """What each depth's sum is divided by."""
    if options.reduction == "main_tokens":
        return [sum(sum(text.learn[1:]) for text in texts)] * options.depths
    return [
        sum(counts(text, t, k, options.placeholders) for text in texts for t in range(len(text.ids)))
        for k in range(1, options.depths + 1)
    ]


def add_slot(sums: Sums, head: Any, text: Text, t: int, k: int, state: Tensor, options: Options) -> tuple[bool, float]:
    """Count one slot; returns whether greedy verification accepts its draft, and how probably sampling does."""
    label = text.ids[t + k + 1]
    z_head, z_target = logits(head, state, options), logits(head, text.hidden[t + k].detach(), options)
    log_q, log_p = (torch.log_softmax(z / options.temperature, -1) for z in (z_head, z_target))
    log_q_plain = torch.log_softmax(z_head, -1)
    for name, weight in options.mixes[k - 1].items():
        value = -log_q_plain[label] if name == "ce" else DIVERGENCES[name](*coarse(log_p, log_q, options.top_k))
        sums.loss = sums.loss + weight * value
    choice, best = int(z_head.argmax()), int(z_target.argmax())
    accept = 1 - float(total_variation(log_p, log_q).detach())
    sums.slots += 1
    sums.correct += choice == label
    sums.matched += choice == best
    sums.accepted += accept
    return choice == best, accept


def logits(head: Any, state: Tensor, options: Options) -> Tensor:
    weight = head.shared.lm_head.weight[: options.vocab_size]
    out = (weight @ state.to(weight.dtype)) * options.scale
    return out if options.softcap is None else options.softcap * torch.tanh(out / options.softcap)


def coarse(log_p: Tensor, log_q: Tensor, top_k: int | None) -> tuple[Tensor, Tensor]:
    """Both distributions over the target's best tokens, and everything else as one outcome."""
    if top_k is None or top_k >= len(log_p):
        return log_p, log_q
    order = sorted(range(len(log_p)), key=(-log_p.detach()).tolist().__getitem__)
    best, rest = order[:top_k], order[top_k:]
    return tuple(torch.cat([each[best], each[rest].logsumexp(0)[None]]) for each in (log_p, log_q))  # type: ignore[return-value]


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum()


DIVERGENCES = {
    "kl": lambda log_p, log_q: (log_p.exp() * (log_p - log_q)).sum(),
    "reverse_kl": lambda log_p, log_q: (log_q.exp() * (log_q - log_p)).sum(),
    "tv": total_variation,
    "lk": lambda log_p, log_q: -torch.log(1 - total_variation(log_p, log_q)),
}


def chain(head: Any, text: Text, depths: int) -> dict[tuple[int, int], Tensor]:
    """States by (slot, depth): a cache of the verified prefix up to every slot, then one draft behind the other."""
    out = {}
    for t in range(len(text.ids) - 2):
        cache = DynamicCache(config=head.factory.config)
        prefix = step(head, text.ids[1 : t + 2], text.hidden[: t + 1], text.start, cache, 1)
        state, recycled = prefix.normed[0, -1], prefix.recycled[0, -1:]
        out[t, 1] = state
        for k in range(2, min(depths, len(text.ids) - t - 2) + 1):
            drafted = step(head, [text.ids[t + k]], recycled, text.start + t + k - 1, cache, k)
            out[t, k], recycled = drafted.normed[0, 0], drafted.recycled[0]
    return out


def sequence(head: Any, text: Text, depths: int) -> dict[tuple[int, int], Tensor]:
    """States by (slot, depth): each depth runs over the whole document with a cache of its own."""
    out, recycled = {}, text.hidden
    for k in range(1, depths + 1):
        slots = len(text.ids) - k
        if slots < 1:
            break
        ran = step(head, text.ids[k:], recycled[:slots], text.start, DynamicCache(config=head.factory.config), k)
        out |= {(t, k): ran.normed[0, t] for t in range(slots)}
        recycled = ran.recycled[0]
    return out


def step(head: Any, ids: Sequence[int], hidden: Tensor, first_position: int, cache: Any, depth: int) -> Any:
    positions = torch.arange(first_position, first_position + len(ids))[None]
    return head.draft_step(torch.tensor([list(ids)]), hidden[None], positions, cache=cache, depth=depth)
