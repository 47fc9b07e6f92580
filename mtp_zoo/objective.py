"""MTPObjective: the loss of a head over depths 1..K, with one contract for masks, means and metrics.

    loss = sum over k of alpha_k * (sum of the gated losses of depth k) / N_k

`N_k` counts the gated slots of depth k over the whole optimiser step: every micro-batch of every rank. So the gradient
does not depend on how the step was cut; micro-batch losses add up to the loss of one big batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mtp_zoo.arguments import (
    DEPTHS,
    FLAG,
    LIST,
    checked,
    having,
    instance,
    is_number,
    number,
    one_of,
    optional,
    problems_of,
    refuse,
    shown,
    some_of,
    whole,
)
from mtp_zoo.batch import TokenBatch
from mtp_zoo.chunked_loss import DepthRows, chunked_loss
from mtp_zoo.errors import ObjectiveError
from mtp_zoo.head import DepthState, DraftHead
from mtp_zoo.host_copies import to_device
from mtp_zoo.loss_plan import DepthPlan, LossPlan
from mtp_zoo.losses import Comparison, Mix, parse_losses
from mtp_zoo.rollout import Rollout
from mtp_zoo.stats import MTPStats, all_reduce, gather_stats
from mtp_zoo.targets import check_tap
from mtp_zoo.unused_parameters import unused_parameters, with_zero_gradients

Reduction: TypeAlias = Literal["global", "main_tokens", "micro_batch"]
"""What a depth's sum is divided by: its own slots in the step, the target's next-token slots in the step (as some
trainers do, which weighs deep depths less), or its own slots in the micro-batch (which depends on the cut)."""

Cut: TypeAlias = Literal["embedding", "backbone", "lm_head"]
"""Where a head's loss can be cut off from its target: the tokens that enter, the states that enter, the output projection."""

DETACH: frozenset[Cut] = frozenset(get_args(Cut))
"""All of them cut: the head's loss trains the head alone."""

DEFAULT_BETA = 0.6
"""Depth k weighs beta^(k-1), normalised to sum 1 (FastMTP's step weights)."""


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


BATCH = instance("only TokenBatch", TokenBatch)


@checked(
    "Counting the slots of a step",
    error=ObjectiveError,
    batches=instance("an iterable of TokenBatch", Iterable),
    depths=DEPTHS,
    reduction=one_of(*get_args(Reduction)),
)
def step_counts(
    batches: Iterable[TokenBatch], depths: int, *, reduction: Reduction = "global"
) -> Float[Tensor, " depths"]:
    """Return the denominators of one optimiser step: gated slots a depth over all its micro-batches and ranks.

    Raises:
        ObjectiveError: `depths` or `reduction` is out of range.
    """
    total, device = torch.zeros(depths), torch.device("cpu")
    for tokens in batches:
        refuse("Counting the slots of a step", problems_of({"batches": tokens}, {"batches": BATCH}), ObjectiveError)
        total, device = total + _counts(tokens, depths, reduction), tokens.input_ids.device
    return all_reduce(to_device(total, device))


class MTPObjective(nn.Module):
    """The training objective of a head, as a module over it: what DDP, FSDP2 and accelerate wrap.

    Args:
        head: an attached head.
        depths: how many depths to unroll; a recycled head is drafted with as many steps as it was trained for. Of a head with
            more depths of its own the others get gradients of exactly zero, so that data parallelism does not wait for them.
        loss: "kl" (towards the target's own distribution), "ce" (towards the text), "reverse_kl", "tv", "lk", a mix
            {"kl": .9, "ce": .1}, or a sequence of these, one a depth; see `mtp_zoo.losses`.
        beta: depth weights beta^(k-1), normalised.
        weights: explicit depth weights instead, taken as they are.
        rollout: "chain" or "sequence"; None takes what serves the head.
        reduction: see `Reduction`.
        chunk_size: predicted tokens whose logits are held at once; None fits a fixed amount of memory.
        detach: which ways into the target are cut, see `Cut`; all by default. Each is cut on its own, also where embedding and
            lm_head are one tensor. The cut of the backbone lies in front of depth 1: between depths the graph is whole.
        temperature: at which the head's distribution and the target's are compared (all losses but "ce").
        top_k: compare the target's k best tokens, and all others as one; None compares all.
        agreement: also measure what verification would accept; without it "ce" needs no logits of the target.

    Raises:
        ObjectiveError: an argument outside its range, or a divergence from the target without `agreement`.

    Example:
        >>> out = objective(tokens, hidden)                                 # doctest: +SKIP
        >>> counts = step_counts(micro_batches, depths=3)                   # doctest: +SKIP
        >>> for tokens, hidden in ...:                                      # doctest: +SKIP
        ...     objective(tokens, hidden, step_counts=counts).loss.backward()
    """

    @checked(
        "Building the objective",
        error=ObjectiveError,
        head=having("a draft head (DraftHead, or a module of the same interface)", "run_depth", "spec"),
        depths=DEPTHS,
        beta=number(least=0),
        rollout=optional(one_of(*get_args(Rollout))),
        reduction=one_of(*get_args(Reduction)),
        chunk_size=optional(whole(least=1)),
        detach=some_of(DETACH),
        temperature=number(above=0),
        top_k=optional(whole(least=1)),
        agreement=FLAG,
    )
    def __init__(
        self,
        head: DraftHead,
        *,
        depths: int = 3,
        loss: str | Mix | Sequence[str | Mix] = "kl",
        beta: float = DEFAULT_BETA,
        weights: Sequence[float] | None = None,
        rollout: Rollout | None = None,
        reduction: Reduction = "global",
        chunk_size: int | None = None,
        detach: Collection[Cut] = DETACH,
        temperature: float = 1.0,
        top_k: int | None = None,
        agreement: bool = True,
    ) -> None:
        super().__init__()
        self.head = head
        self.depths = depths
        self.mixes = parse_losses(loss, depths)
        self.weights = _weights(depths, beta, weights)
        self.rollout = rollout
        self.reduction: Reduction = reduction
        self.chunk_size = chunk_size
        self.detach: frozenset[Cut] = frozenset(detach)
        self.comparison = Comparison(temperature, top_k)
        self.agreement = agreement
        self._check()

    def _check(self) -> None:
        """Check what depends on two arguments at once."""
        if not self.agreement and any(set(mix) != {"ce"} for mix in self.mixes):
            refuse(
                "Building the objective",
                ["agreement: may be False only where every loss is 'ce'; others compare with the target anyway"],
                ObjectiveError,
            )

    def _check_labels(self, tokens: TokenBatch) -> None:
        shared = self.head.shared
        entries = shared.rule.vocab_size or cast("Tensor", shared.lm_head.weight).shape[0]
        if tokens.largest_label >= entries:
            raise ObjectiveError(
                f"Computing the loss: expected labels below {entries}, the vocabulary of the target's lm_head, got "
                f"{tokens.largest_label}.",
                remedy="Tokenise with the target's tokenizer, or resize the target's embeddings before the head is attached.",
            )

    def forward(
        self,
        tokens: TokenBatch,
        hidden: Float[Tensor, "batch seq hidden"],
        step_counts: Float[Tensor, " depths"] | None = None,
    ) -> MTPOutput:
        """The loss and the sums of one micro-batch.

        Args:
            tokens: the batch.
            hidden: target states at the family's tap (`target_states`, or a joint forward pass).
            step_counts: denominators of the whole step, from `step_counts`; None makes this batch the step.

        Raises:
            ObjectiveError: `target_states` took the states at another tap, or `step_counts` are of other depths.
        """
        check_tap(hidden, self.head.spec)
        self._check_labels(tokens)
        if not tokens.input_ids.numel():
            # Layers can't reshape nothing. A row of padding has no slots either, and reaches every collective of the ranks.
            tokens = TokenBatch.from_rows([[]], length=1).to(hidden.device)
            hidden = hidden.new_zeros(1, 1, hidden.shape[-1])
        hidden = hidden.detach() if "backbone" in self.detach else hidden
        states = self.head(
            tokens,
            hidden,
            depths=self.depths,
            rollout=self.rollout,
            detach_embedding="embedding" in self.detach,
        )
        counts = step_counts
        if counts is not None and counts.shape != (self.depths,):
            raise ObjectiveError(
                f"Computing the loss: expected step_counts of shape [{self.depths}], one count a depth, got "
                f"{list(counts.shape)}.",
                remedy="Pass what step_counts(batches, depths=objective.depths) returns.",
            )
        if counts is None or self.reduction == "micro_batch":
            counts = _counts(tokens, self.depths, self.reduction)
        weights = to_device(torch.tensor(self.weights), hidden.device)
        scale = weights / to_device(counts, hidden.device).clamp(min=1)
        plan = tokens.plan(self.depths)
        loss, parts = chunked_loss(
            [self._rows(k, states[k], plan.depths[k], scale[k]) for k in range(self.depths)],
            self._target(tokens, plan, hidden.detach()) if self.agreement else None,
            self.head.shared.projection(detach="lm_head" in self.detach),
            rule=self.head.shared.rule,
            comparison=self.comparison,
            chunk_size=self.chunk_size,
        )
        loss = with_zero_gradients(loss, [*unused_parameters(self.head, self.depths)])
        return MTPOutput(loss, gather_stats(plan, tokens.input_ids.numel(), parts))

    def _rows(self, k: int, state: DepthState, plan: DepthPlan, scale: Tensor) -> DepthRows:
        # A depth without slots still gives every parameter a gradient, of exactly zero: nothing is left out of the graph.
        states = state.normed.flatten(0, 1).index_select(0, plan.slots)
        return DepthRows(
            states, plan.labels, plan.target_rows, self.mixes[k], scale, plan.known_rows, self.head.own_lm_head(k + 1)
        )

    def _target(self, tokens: TokenBatch, plan: LossPlan, hidden: Tensor) -> Tensor:
        """The target states that some depth is compared with, each once."""
        return self._before_lm_head(tokens.reached(hidden, self.depths).index_select(0, plan.target_slots))

    @torch.no_grad()
    def _before_lm_head(self, states: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows hidden"]:
        """Target states as the target's lm_head gets them: behind its final norm, also where the tap lies before it."""
        if self.head.spec.hidden_tap == "post_norm":
            return states
        norm = self.head.shared.final_norm
        if norm is None:
            raise ObjectiveError(
                f"Computing the target's distribution: the {self.head.family.name} head reads states before the final "
                "norm, and the shared tensors hold no final norm.",
                remedy="Attach the target itself, or the result of load_shared.",
            )
        return norm(states)


def _counts(tokens: TokenBatch, depths: int, reduction: str) -> Tensor:
    """What a batch adds to the denominators, [depths], on the CPU."""
    if reduction == "main_tokens":
        return tokens.host.main_gate().sum().float().expand(depths)
    return tokens.host.plan(depths).counts


def _weights(depths: int, beta: float, weights: Sequence[float] | None) -> list[float]:
    if weights is None:
        # counted from the heavier end, so that no power overflows
        raw = [beta**k if beta <= 1 else (1 / beta) ** (depths - 1 - k) for k in range(depths)]
        return [value / sum(raw) for value in raw]
    wrong = not LIST.accepts(weights) or len(weights) != depths
    if wrong or not all(is_number(each) and each >= 0 for each in weights) or not any(weights):
        raise ObjectiveError(
            f"Reading the depth weights: expected {depths} finite numbers >= 0, not all 0, got {shown(weights)}.",
            remedy="Give one weight a depth.",
        )
    return [float(weight) for weight in weights]
