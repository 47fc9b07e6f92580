"""The losses of all depths over a large vocabulary, in chunks of tokens, in one pass.

Logits of a 248,320-entry vocabulary take 1 MB a token in FP32; a batch of them is never held. Each chunk computes the
target's logits once for every depth that predicts the same token, the head's logits, the losses, their gradient on the
states (and on the lm_head, if it trains), and what verification would accept; then it drops the logits. Memory is
O(chunk x vocab), and the backward pass only hands out [tokens, hidden] gradients that are there already.

    target rows        0   1   2   3   4   5         depth 1 and depth 2 both predict the token behind target row 3:
    depth 1 states     a0  a1  a2  a3  a4  .         depth 1 from slot t = 2 (row t + 1), depth 2 from slot t = 1 (row t + 2),
    depth 2 states     .   b1  b2  b3  .   .         and one target distribution serves both
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtp_zoo.logits import PLAIN, LogitRule, add_weight_gradient_, compute_dtype, project, project_back
from mtp_zoo.losses import WHOLE, Comparison, Mix, Side, accepted, mixed

CHUNK_ELEMENTS = {"cpu": 2**27, "other": 2**28}
"""Logits that a chunk may hold by default, head and target together: 512 MiB of FP32 on a CPU, 1 GiB elsewhere. A product of
few rows spends much of its time on reading the lm_head."""

BLOCK_ELEMENTS = 2**20
"""Logits that a CPU works on at a time within a chunk: what the losses make of them stays in its cache."""


@dataclass(frozen=True)
class DepthRows:
    """The slots of one depth that count.

    Attributes:
        states: what the head puts in front of the lm_head.
        labels: the tokens that the text holds.
        target_rows: for each slot, the row of the target states that predicts the same token; rising.
        mix: losses and their weights.
        scale: what the sum of the depth's losses is multiplied by in the total.
        known_rows: the numbers in `target_rows`, where the host has them.
        lm_head: the depth's own output projection; None: the target's.
    """

    states: Float[Tensor, "n hidden"]
    labels: Int[Tensor, " n"]
    target_rows: Int[Tensor, " n"]
    mix: Mix
    scale: Float[Tensor, ""]
    known_rows: Sequence[int] | None = None
    lm_head: Float[Tensor, "vocab hidden"] | None = None

    def host_rows(self) -> Sequence[int]:
        """Return `target_rows` as numbers: those that are known, or else what the device holds, for which the host waits."""
        return self.target_rows.tolist() if self.known_rows is None else self.known_rows


@dataclass(frozen=True)
class DepthLoss:
    """Losses of n slots, without a graph.

    Attributes:
        values: the mixed loss of every slot.
        correct: the head's first choice is the label.
        matched: the head's first choice is the target's: what greedy verification accepts. None without a target.
        accepted: sum of min(p, q), under the comparison's temperature: the probability with which rejection sampling
            accepts. None without a target.
    """

    values: Float[Tensor, " n"]
    correct: Bool[Tensor, " n"]
    matched: Bool[Tensor, " n"] | None
    accepted: Float[Tensor, " n"] | None


def chunked_loss(
    depths: Sequence[DepthRows],
    target_states: Float[Tensor, "rows hidden"] | None,
    lm_head: Float[Tensor, "vocab hidden"],
    *,
    rule: LogitRule = PLAIN,
    comparison: Comparison = WHOLE,
    chunk_size: int | None = None,
) -> tuple[Float[Tensor, ""], list[DepthLoss]]:
    """sum over depths of scale * sum over slots of the mixed loss, and each depth's losses and agreement.

    Args:
        depths: the slots that count.
        target_states: what the target puts in front of the lm_head; taken without a graph. None: mixes of `ce` alone, and
            no agreement with the target.
        lm_head: the target's output projection, which depths without an own one share; as those of the depths, it gets a
            gradient where it asks for one.
        rule: what the model does behind the projection.
        comparison: how divergences compare the two distributions.
        chunk_size: target rows a chunk; None fits `CHUNK_ELEMENTS`.
    """
    states = [depth.states for depth in depths]
    weights = [lm_head, *(depth.lm_head for depth in depths if depth.lm_head is not None)]
    differentiate = torch.is_grad_enabled() and any(t.requires_grad for t in (*weights, *states))
    with torch.no_grad():
        run = _Run(depths, target_states, [_autocast(weight.detach()) for weight in weights], rule, comparison)
        run.compute(chunk_size, differentiate, [differentiate and weight.requires_grad for weight in weights])
        total = torch.stack([loss.values.sum() * d.scale for loss, d in zip(run.losses, depths, strict=True)]).sum()
    if differentiate:
        units = [_power_of_two(depth.scale) for depth in depths]
        total = cast("Tensor", _Known.apply(total, [*run.weight_grads, *run.grads], units, *weights, *states))
    return total, run.losses


def _power_of_two(scale: Tensor) -> Tensor:
    """The power of two next to a scale; multiplying by it rounds nothing."""
    return torch.exp2(scale.clamp(min=torch.finfo(scale.dtype).tiny).log2().round())


class _Known(torch.autograd.Function):
    """A loss whose gradients are known already.

    A gradient that holds 1 / N of a large step is below what FP16 can hold until a loss scale has multiplied it. So the
    gradients on states are kept in units of a power of two near 1 / N, those on projections in FP32, and both meet the
    factor from outside in FP32 before they are rounded.
    """

    @staticmethod
    def forward(ctx: Any, total: Tensor, grads: list[Tensor | None], units: list[Tensor], *inputs: Tensor) -> Tensor:
        weights, states = grads[: len(grads) - len(units)], inputs[len(inputs) - len(units) :]
        kept = [
            (cast("Tensor", grad) / unit).to(state.dtype)
            for grad, unit, state in zip(grads[len(weights) :], units, states, strict=True)
        ]
        ctx.dtypes = [each.dtype for each in inputs]
        ctx.save_for_backward(*units, *weights, *kept)
        return total.clone()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *outer: Tensor
    ) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: checkpointing and offloading hand each tensor back a single time
        factor, count = outer[0], len(saved) - len(ctx.dtypes)
        units, grads = saved[:count], saved[count:]
        factors = [*[factor] * (len(grads) - count), *(unit * factor for unit in units)]
        scaled = [
            None if grad is None else (grad.to(compute_dtype(grad)) * one).to(dtype)
            for grad, one, dtype in zip(grads, factors, ctx.dtypes, strict=True)
        ]
        return None, None, None, *scaled


def _autocast(weight: Tensor) -> Tensor:
    """The weight in the dtype in which a matrix product would run here."""
    device = weight.device.type
    return weight.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else weight


@dataclass(frozen=True)
class _Product:
    """What one projection makes of a chunk: of the slots of the depths that share it, laid end to end."""

    weight: int
    depths: Sequence[int]
    states: Tensor
    logits: Tensor


class _Run:
    """One pass over all chunks."""

    def __init__(
        self,
        depths: Sequence[DepthRows],
        target_states: Tensor | None,
        weights: Sequence[Tensor],
        rule: LogitRule,
        comparison: Comparison,
    ) -> None:
        self.depths, self.target_states, self.rule, self.comparison = depths, target_states, rule, comparison
        self.weights = [rule.entries(weight) for weight in weights]
        self.weight = self.weights[0]
        self.shapes = [weight.shape for weight in weights]
        self.users = _users(depths)
        self.rows = [depth.host_rows() for depth in depths]
        self.losses = [_empty(depth, self.weight, target_states is not None) for depth in depths]
        dtype = compute_dtype(self.weight)
        self.grads = [torch.zeros(depth.states.shape, dtype=dtype, device=self.weight.device) for depth in depths]
        self.weight_grads: list[Tensor | None] = []

    def compute(self, chunk_size: int | None, differentiate: bool, differentiate_weights: Sequence[bool]) -> None:
        """Fill losses and gradients."""
        self.weight_grads = [
            weight.new_zeros(shape, dtype=compute_dtype(weight)) if wanted else None
            for weight, shape, wanted in zip(self.weights, self.shapes, differentiate_weights, strict=True)
        ]
        last = max((rows[-1] for rows in self.rows if rows), default=-1)
        size = chunk_size or self._default_chunk()
        with torch.autocast(self.weight.device.type, enabled=False):
            for start in range(0, last + 1, size):
                self._chunk(start, min(start + size, last + 1), differentiate)

    def _default_chunk(self) -> int:
        sides = len(self.depths) + (self.target_states is not None)
        budget = CHUNK_ELEMENTS.get(self.weight.device.type, CHUNK_ELEMENTS["other"])
        return max(1, budget // (sides * len(self.weight)))

    def _chunk(self, start: int, stop: int, differentiate: bool) -> None:
        """All depths whose target row lies in start:stop; logits of depths that share a projection come out of one product,
        and so does their gradient."""
        spans = [_span(rows, start, stop) for rows in self.rows]
        if all(span.start == span.stop for span in spans):
            return
        products = [self._product(weight, numbers, spans) for weight, numbers in self.users.items()]
        logits = dict(_by_depth(products, spans))
        target = None if self.target_states is None else self._logits(self.target_states[start:stop].detach(), 0)
        for first, last in self._blocks(start, stop):
            side = None if target is None else Side(target[first - start : last - start])
            for number, span in enumerate(spans):
                part = _span(self.rows[number], first, last)
                place = slice(part.start - span.start, part.stop - span.start)
                if part.start < part.stop:
                    logits[number][place] = self._block(number, part, logits[number][place], side, first)
        if differentiate:
            for product in products:
                self._add_gradients(product, spans)

    def _product(self, weight: int, numbers: Sequence[int], spans: Sequence[slice]) -> _Product:
        states = torch.cat([self.depths[number].states[spans[number]].detach() for number in numbers])
        return _Product(weight, numbers, states, self._logits(states, weight))

    def _logits(self, states: Tensor, weight: int) -> Tensor:
        return self.rule.apply_(project(states, self.weights[weight]))

    def _block(self, number: int, here: slice, logits: Tensor, target: Side | None, first: int) -> Tensor:
        """Losses of some slots of one depth; returns the gradient on the product behind their logits."""
        depth, loss, how = self.depths[number], self.losses[number], self.comparison
        head, labels, pair = Side(logits), depth.labels[here], None
        if target is not None:
            opposite = target.rows(_index(self.rows[number][here], depth.target_rows[here], first))
            pair = head.at(how.temperature), opposite.at(how.temperature)
            assert loss.matched is not None
            assert loss.accepted is not None
            loss.matched[here] = head.choice == opposite.choice
            loss.accepted[here] = accepted(*pair)
        loss.correct[here] = head.choice == labels
        loss.values[here], grad = mixed(depth.mix, head, pair, labels, how)
        return self.rule.backward_(grad, logits)

    def _add_gradients(self, product: _Product, spans: Sequence[slice]) -> None:
        """`product.logits` holds the gradient on the product by now."""
        sizes = [spans[number].stop - spans[number].start for number in product.depths]
        scales = torch.cat([self.depths[n].scale.expand(size) for n, size in zip(product.depths, sizes, strict=True)])
        back = project_back(product.logits, self.weights[product.weight]) * scales[:, None]
        for number, part in zip(product.depths, back.split(sizes), strict=True):
            self.grads[number][spans[number]] = part
        weight_grad = self.weight_grads[product.weight]
        if weight_grad is not None:
            scaled = product.states.to(product.logits.dtype) * scales[:, None]
            add_weight_gradient_(self.rule.entries(weight_grad), product.logits, scaled)

    def _blocks(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        rows = stop - start
        if self.weight.device.type == "cpu":
            rows = max(torch.get_num_threads(), BLOCK_ELEMENTS // len(self.weight))
        for first in range(start, stop, rows):
            yield first, min(first + rows, stop)


def _users(depths: Sequence[DepthRows]) -> dict[int, list[int]]:
    """Which depths use which projection: 0 is the target's, 1 and up are those of depths with their own, in order."""
    users: dict[int, list[int]] = {}
    own = count(1)
    for number, depth in enumerate(depths):
        users.setdefault(0 if depth.lm_head is None else next(own), []).append(number)
    return users


def _by_depth(products: Sequence[_Product], spans: Sequence[slice]) -> Iterator[tuple[int, Tensor]]:
    """Every depth's part of the logits; views."""
    for product in products:
        parts = product.logits.split([spans[number].stop - spans[number].start for number in product.depths])
        yield from zip(product.depths, parts, strict=True)


def _empty(depth: DepthRows, weight: Tensor, compared: bool) -> DepthLoss:
    n, device = len(depth.states), weight.device
    values = torch.empty(n, dtype=compute_dtype(weight), device=device)
    flags = torch.empty(n, dtype=torch.bool, device=device)
    return DepthLoss(
        values, flags, torch.empty_like(flags) if compared else None, torch.empty_like(values) if compared else None
    )


def _span(rows: Sequence[int], start: int, stop: int) -> slice:
    """Where the rising `rows` lie in start:stop."""
    return slice(bisect_left(rows, start), bisect_left(rows, stop))


def _index(rows: Sequence[int], on_device: Tensor, first: int) -> slice | Tensor:
    """Rows counted from `first`; a slice where none is left out, so that nothing is copied."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0] - first, rows[-1] - first + 1)
    return on_device - first
