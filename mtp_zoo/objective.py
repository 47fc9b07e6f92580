"""MTPObjective: the loss of a head over depths 1..K, with one contract for masks, means and metrics.

    loss = sum over k of alpha_k * (sum of the gated losses of depth k) / N_k

`N_k` counts the gated slots of depth k over the whole optimiser step: every micro-batch of every rank. So the gradient
does not depend on how the step was cut; micro-batch losses add up to the loss of one big batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from mtp_zoo.batch import TokenBatch, ahead
from mtp_zoo.errors import ObjectiveError
from mtp_zoo.head import DepthState, DraftHead
from mtp_zoo.losses import ChunkedLoss, chunked_loss, parse_mix
from mtp_zoo.rollout import Rollout

Reduction: TypeAlias = Literal["global", "main_tokens", "micro_batch"]
"""What a depth's sum is divided by: its own slots in the step, the target's next-token slots in the step (as some
trainers do, which weighs deep depths less), or its own slots in the micro-batch (which depends on the cut)."""

DEFAULT_BETA = 0.6
"""Depth k weighs beta^(k-1), normalised to sum 1 (FastMTP's step weights)."""


@dataclass(frozen=True)
class MTPStats:
    """Sums of one or several batches; `a + b` is what one batch of both would give.

    Attributes:
        loss, slots, correct, matched, accepted: [depths], sums over gated slots.
        leading_greedy: sum over slots with every gate open of the number of leading depths that match the target.
        leading_sampled: the same for rejection sampling, in expectation.
        full_slots: number of slots with every gate open.
    """

    loss: Tensor
    slots: Tensor
    correct: Tensor
    matched: Tensor
    accepted: Tensor
    leading_greedy: Tensor
    leading_sampled: Tensor
    full_slots: Tensor

    def __add__(self, other: MTPStats) -> MTPStats:
        return MTPStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def all_reduce(self) -> MTPStats:
        """The sums over all ranks; itself where torch.distributed is not initialised."""
        return MTPStats(*(_all_reduce(getattr(self, f.name)) for f in fields(self)))

    def metrics(self) -> dict[str, float]:
        """Micro averages: sums over counts. A depth without slots reports `mtp/slots_k` 0 and zeros."""
        out: dict[str, float] = {}
        for index, slots in enumerate(self.slots.tolist()):
            for name, sums in (
                ("loss", self.loss),
                ("acc", self.correct),
                ("match", self.matched),
                ("accept", self.accepted),
            ):
                out[f"mtp/{name}_{index + 1}"] = float(sums[index]) / max(slots, 1)
            out[f"mtp/slots_{index + 1}"] = slots
        full = max(float(self.full_slots), 1.0)
        out["mtp/accept_length"] = 1.0 + float(self.leading_greedy) / full
        out["mtp/accept_length_sampled"] = 1.0 + float(self.leading_sampled) / full
        return out


@dataclass(frozen=True)
class MTPOutput:
    """Attributes:
    loss: the scalar to call backward on.
    stats: detached sums, for metrics.
    """

    loss: Float[Tensor, ""]
    stats: MTPStats

    @property
    def metrics(self) -> dict[str, float]:
        """This batch's metrics; `stats` of several batches add up."""
        return self.stats.metrics()


def step_counts(
    batches: Iterable[TokenBatch], depths: int, *, reduction: Reduction = "global"
) -> Float[Tensor, " depths"]:
    """Denominators of one optimiser step: gated slots a depth over all its micro-batches and ranks."""
    total = torch.zeros(depths)
    for tokens in batches:
        total = total.to(tokens.input_ids.device) + _counts(tokens, depths, reduction)
    return _all_reduce(total)


class MTPObjective:
    """The training objective of a head.

    Args:
        head: an attached head.
        depths: how many depths to unroll; a recycled head is drafted with as many steps as it was trained for.
        loss: "kl" (towards the target's own distribution), "ce" (towards the text), or a mix {"kl": .9, "ce": .1}.
        beta: depth weights beta^(k-1), normalised.
        weights: explicit depth weights instead, taken as they are.
        rollout: "chain" or "sequence"; None takes what serves the head.
        reduction: see `Reduction`.
        chunk_size: slots whose logits are held at once; None fits 128 MiB.

    Example:
        >>> out = objective(tokens, hidden)                                 # doctest: +SKIP
        >>> counts = step_counts(micro_batches, depths=3)                   # doctest: +SKIP
        >>> for tokens, hidden in ...:                                      # doctest: +SKIP
        ...     objective(tokens, hidden, step_counts=counts).loss.backward()
    """

    def __init__(
        self,
        head: DraftHead,
        *,
        depths: int = 3,
        loss: str | Mapping[str, float] = "kl",
        beta: float = DEFAULT_BETA,
        weights: Sequence[float] | None = None,
        rollout: Rollout | None = None,
        reduction: Reduction = "global",
        chunk_size: int | None = None,
    ) -> None:
        self.head = head
        self.depths = depths
        self.mix = parse_mix(loss)
        self.weights = _weights(depths, beta, weights)
        self.rollout = rollout
        self.reduction: Reduction = reduction
        self.chunk_size = chunk_size
        if depths < 1 or reduction not in get_args(Reduction) or (chunk_size is not None and chunk_size < 1):
            raise ObjectiveError(
                f"Building the objective: expected depths >= 1, a reduction of {get_args(Reduction)} and chunk_size >= 1, "
                f"got {depths}, {reduction!r} and {chunk_size}.",
                remedy="Correct the arguments.",
            )

    def __call__(
        self,
        tokens: TokenBatch,
        hidden: Float[Tensor, "batch seq hidden"],
        *,
        step_counts: Float[Tensor, " depths"] | None = None,
    ) -> MTPOutput:
        """The loss and the sums of one micro-batch.

        Args:
            tokens: the batch.
            hidden: target states at the family's tap (`target_states`); taken without a graph.
            step_counts: denominators of the whole step, from `step_counts`; None makes this batch the step.
        """
        hidden = hidden.detach()
        states = self.head(tokens, hidden, depths=self.depths, rollout=self.rollout)
        parts = [self._depth(depth, state, tokens, hidden) for depth, state in enumerate(states, start=1)]
        counts = step_counts
        if counts is None or self.reduction == "micro_batch":
            counts = _counts(tokens, self.depths, self.reduction)
        scale = torch.tensor(self.weights, device=hidden.device) / counts.to(hidden.device).clamp(min=1)
        loss = torch.stack([part.loss.total for part in parts]).mul(scale).sum()
        return MTPOutput(loss, _stats(parts))

    def _depth(self, depth: int, state: DepthState, tokens: TokenBatch, hidden: Tensor) -> _DepthPart:
        slots = tokens.slots(depth)
        predicting = self._before_lm_head(ahead(hidden, depth, 0.0))
        if not bool(slots.gate.any()):
            # A depth without slots still gives every parameter a gradient, of exactly zero.
            nothing = (state.normed * 0.0).float().sum()
            flags = slots.gate[slots.gate]
            return _DepthPart(slots.gate, ChunkedLoss(nothing, flags, flags, nothing.new_zeros(0)))
        loss = chunked_loss(
            state.normed[slots.gate],
            predicting[slots.gate],
            slots.labels[slots.gate],
            self.head.shared.lm_head_weight,
            self.mix,
            chunk_size=self.chunk_size,
        )
        return _DepthPart(slots.gate, loss)

    @torch.no_grad()
    def _before_lm_head(self, hidden: Tensor) -> Tensor:
        """Target states as the target's lm_head gets them: behind its final norm, also where the tap lies before it."""
        if self.head.spec.hidden_tap == "post_norm":
            return hidden
        norm = self.head.shared.final_norm
        if norm is None:
            raise ObjectiveError(
                f"Computing the target's distribution: the {self.head.family.name} head reads states before the final "
                "norm, and the shared tensors hold no final norm.",
                remedy="Attach the target itself, or the result of load_shared.",
            )
        return norm(hidden)


@dataclass(frozen=True)
class _DepthPart:
    gate: Tensor
    loss: ChunkedLoss


def _stats(parts: Sequence[_DepthPart]) -> MTPStats:
    every = torch.stack([part.gate for part in parts]).all(dim=0)
    greedy, sampled = every.float(), every.float()
    leading_greedy, leading_sampled = torch.zeros_like(greedy), torch.zeros_like(sampled)
    for part in parts:
        greedy = greedy * _on_grid(part.gate, part.loss.matched.float())
        sampled = sampled * _on_grid(part.gate, part.loss.accepted)
        leading_greedy, leading_sampled = leading_greedy + greedy, leading_sampled + sampled

    def sums(values: Iterable[Tensor]) -> Tensor:
        return torch.stack([value.detach().double().sum() for value in values])

    return MTPStats(
        loss=sums(part.loss.total for part in parts),
        slots=sums(part.gate for part in parts),
        correct=sums(part.loss.correct for part in parts),
        matched=sums(part.loss.matched for part in parts),
        accepted=sums(part.loss.accepted for part in parts),
        leading_greedy=leading_greedy.double().sum(),
        leading_sampled=leading_sampled.double().sum(),
        full_slots=every.double().sum(),
    )


def _on_grid(gate: Tensor, values: Tensor) -> Tensor:
    out = torch.zeros(gate.shape, device=gate.device)
    out[gate] = values
    return out


def _counts(tokens: TokenBatch, depths: int, reduction: Reduction) -> Tensor:
    if reduction == "main_tokens":
        return tokens.main_gate().sum().float().expand(depths)
    return torch.stack([tokens.slots(depth).gate.sum() for depth in range(1, depths + 1)]).float()


def _weights(depths: int, beta: float, weights: Sequence[float] | None) -> list[float]:
    if weights is None:
        raw = [beta**index for index in range(depths)]
        return [value / sum(raw) for value in raw]
    if len(weights) != depths or min(weights, default=-1.0) < 0:
        raise ObjectiveError(
            f"Reading the depth weights: expected {depths} numbers >= 0, got {list(weights)}.",
            remedy="Give one weight a depth.",
        )
    return [float(weight) for weight in weights]


def _all_reduce(value: Tensor) -> Tensor:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    value = value.clone()
    torch.distributed.all_reduce(value)
    return value
