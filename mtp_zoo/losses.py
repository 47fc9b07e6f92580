"""The losses of one draft position, each with its gradient on the head's logits.

q is the head's distribution over the vocabulary, p the target's, y the token that the text holds; z are logits.

    name         value                     gradient on z_q
    ce           -log q[y]                 q - onehot(y)
    kl           sum p (log p - log q)     q - p                                  (forward: covers what the target does)
    reverse_kl   sum q (log q - log p)     q ((log q - log p) - reverse_kl)       (seeks one of the target's modes)
    tv           1 - sum min(p, q)         -q ([q < p] - sum q [q < p])           (probability of a rejected draft)
    lk           -log sum min(p, q)        that of tv / sum min(p, q)             (log of the accepted probability)

All but `ce` compare the two distributions: under a temperature (`z / T` on both sides, as a server samples them; no factor
T^2), and, if asked for, on the target's k best tokens. Then all other tokens count as one outcome, with the probability that
each side really leaves for them: no mass is renormalised away, the losses are those of the two coarsened distributions, and
k = vocabulary is the whole comparison. Sources: DistillSpec (arXiv 2310.08461) for the divergences, speculative sampling
(arXiv 2211.17192) for sum min(p, q) as the probability of acceptance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mtp_zoo.arguments import LIST, MAPPING, is_number, shown
from mtp_zoo.errors import ObjectiveError

Mix: TypeAlias = Mapping[str, float]
"""Losses and their weights."""


@dataclass(frozen=True)
class Side:
    """One side's logits in n positions, under a temperature."""

    logits: Float[Tensor, "n vocab"]

    @cached_property
    def choice(self) -> Int[Tensor, " n"]:
        """The likeliest token; the first of equals."""
        return self.logits.argmax(-1)

    @cached_property
    def probs(self) -> Float[Tensor, "n vocab"]:
        """The distribution."""
        return self.logits.softmax(-1)

    @cached_property
    def log_total(self) -> Float[Tensor, " n"]:
        """log sum exp of the logits, from the likeliest token, whose probability is never small."""
        best = self.choice[:, None]
        return (self.logits.gather(-1, best) - self.probs.gather(-1, best).log()).squeeze(-1)

    def at(self, temperature: float) -> Side:
        """The same side under a temperature."""
        return self if temperature == 1.0 else Side(self.logits / temperature)

    def rows(self, rows: slice | Tensor) -> Side:
        """Some positions; what is known of them is not computed again."""
        part = Side(self.logits[rows])
        known = ((name, self.__dict__.get(name)) for name in ("choice", "probs", "log_total"))
        part.__dict__.update({name: value[rows] for name, value in known if value is not None})
        return part


Valued: TypeAlias = "tuple[Float[Tensor, ' n'], Float[Tensor, 'n vocab']]"
"""A loss in n positions, and its gradient on the head's logits."""

Divergence: TypeAlias = Callable[[Side, Side], Valued]


def ce(head: Side, labels: Int[Tensor, " n"]) -> Valued:
    """Cross-entropy with the token that the text holds, in nats."""
    index = labels[:, None]
    value = head.log_total - head.logits.gather(-1, index).squeeze(-1)
    return value, head.probs.scatter_add(-1, index, torch.full_like(index, -1, dtype=head.probs.dtype))


def kl(head: Side, target: Side) -> Valued:
    """Forward KL, in nats."""
    inner = _expected(target.probs, target.logits - head.logits).sum(-1)
    return inner - target.log_total + head.log_total, head.probs - target.probs


def reverse_kl(head: Side, target: Side) -> Valued:
    """Reverse KL, in nats."""
    gap = head.logits - target.logits
    inner = _expected(head.probs, gap).sum(-1)
    return inner - head.log_total + target.log_total, _expected(head.probs, gap - inner[:, None])


def tv(head: Side, target: Side) -> Valued:
    """Total variation: the probability that rejection sampling turns a draft down."""
    return 1 - accepted(head, target), _overlap_gradient(head, target).neg_()


def lk(head: Side, target: Side) -> Valued:
    """Minus the log of the probability that rejection sampling accepts a draft."""
    overlap = accepted(head, target).clamp(min=_smallest(head.probs))
    return -overlap.log(), _overlap_gradient(head, target).div_(-overlap[:, None])


def accepted(head: Side, target: Side) -> Float[Tensor, " n"]:
    """sum min(p, q): the probability that rejection sampling accepts a draft from q."""
    return torch.minimum(head.probs, target.probs).sum(-1)


def _expected(probs: Tensor, values: Tensor) -> Tensor:
    """Return `probs * values`, 0 where the probability is 0: a token at -inf on both sides has the value NaN."""
    return (probs * values).masked_fill_(probs == 0, 0.0)


def _smallest(probs: Tensor) -> float:
    """What stands for a probability of zero where a logarithm is taken: far from it, and far from underflow."""
    return torch.finfo(probs.dtype).eps ** 4


def _overlap_gradient(head: Side, target: Side) -> Tensor:
    below = head.probs * (head.probs < target.probs)
    return below - head.probs * below.sum(-1, keepdim=True)


DIVERGENCES: dict[str, Divergence] = {"kl": kl, "reverse_kl": reverse_kl, "tv": tv, "lk": lk}
"""Losses that compare the head with the target."""

LOSSES = ("ce", *DIVERGENCES)
"""The losses that a mix may name."""


@dataclass(frozen=True)
class Comparison:
    """How the divergences compare head and target.

    Attributes:
        temperature: both sides' logits are divided by it.
        top_k: compare the target's k best tokens and the rest as one; None: every token.
    """

    temperature: float = 1.0
    top_k: int | None = None


WHOLE = Comparison()
"""Every token, at temperature 1."""


def mixed(mix: Mix, head: Side, pair: tuple[Side, Side] | None, labels: Int[Tensor, " n"], how: Comparison) -> Valued:
    """The weighted sum of a mix, and its gradient on the head's logits.

    Args:
        mix: from `parse_mix`; only `ce` where there is no pair.
        head: at temperature 1.
        pair: head and target, both under the comparison's temperature.
        labels: the tokens that the text holds.
        how: the comparison.
    """
    total: Valued | None = None
    for name, weight in mix.items():
        if name == "ce":
            value, grad = ce(head, labels)
        else:
            assert pair is not None
            value, grad = _compared(DIVERGENCES[name], *pair, how.top_k)
            grad.div_(how.temperature)
        value, grad = value * weight, grad.mul_(weight)
        total = (value, grad) if total is None else (total[0] + value, total[1].add_(grad))
    assert total is not None
    return total


def _compared(divergence: Divergence, head: Side, target: Side, top_k: int | None) -> Valued:
    if top_k is None or top_k >= head.logits.shape[1]:
        return divergence(head, target)
    best = target.logits.topk(top_k, dim=-1).indices
    coarse_head, coarse_target = _coarsened(head, best), _coarsened(target, best)
    value, coarse = divergence(coarse_head, coarse_target)
    # A loss of the coarse logits (log-probabilities of the outcomes) moves z as the outcomes' probabilities do: the tail's
    # share is spread over its tokens by their probability within the tail.
    share = coarse[:, -1:] / coarse_head.probs[:, -1:]
    return value, (head.probs * share).scatter_(-1, best, coarse[:, :-1])


def _coarsened(side: Side, best: Int[Tensor, "n k"]) -> Side:
    """Log-probabilities of the tokens in `best` and of all others together, as logits."""
    rest = side.probs.scatter(-1, best, 0.0).sum(-1, keepdim=True).clamp(min=_smallest(side.probs))
    return Side(torch.cat([side.logits.gather(-1, best) - side.log_total[:, None], rest.log()], dim=-1))


def parse_mix(loss: str | Mix) -> dict[str, float]:
    """`"kl"` or `{"kl": 0.9, "ce": 0.1}` as a checked mix.

    Raises:
        ObjectiveError: an unknown loss, an empty mix, or a weight that is no finite number > 0.
    """
    mix = {loss: 1.0} if isinstance(loss, str) else dict(loss) if MAPPING.accepts(loss) else {}
    wrong = [f"{name!r}: no such loss" for name in mix if name not in LOSSES]
    wrong += [
        f"'{name}': expected a finite weight > 0, got {shown(weight)}"
        for name, weight in mix.items()
        if not (is_number(weight) and weight > 0)
    ]
    if wrong or not mix:
        raise ObjectiveError(
            f"Reading the loss {loss!r}: it is no loss and no mix of losses.",
            remedy=f"Use one of {sorted(LOSSES)}, or a mapping from these to positive weights.",
            problems=wrong,
        )
    return mix


def parse_losses(loss: str | Mix | Sequence[str | Mix], depths: int) -> tuple[dict[str, float], ...]:
    """One mix a depth: a loss or a mix stands for every depth, a sequence names each.

    Example: `parse_losses(["ce", "kl"], 2)` trains depth 1 towards the text and depth 2 towards the target.

    Raises:
        ObjectiveError: see `parse_mix`; also a sequence whose length is not `depths`.
    """
    if isinstance(loss, (str, Mapping)) or not LIST.accepts(loss):
        return (parse_mix(cast("str | Mix", loss)),) * depths
    if len(loss) != depths:
        raise ObjectiveError(
            f"Reading the losses {list(loss)}: expected one loss, or one for each of {depths} depths, got {len(loss)}.",
            remedy="Give one loss or mix a depth.",
        )
    return tuple(parse_mix(each) for each in loss)
