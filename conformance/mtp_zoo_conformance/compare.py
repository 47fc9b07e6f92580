"""Comparison of two sides, stage by stage: how far apart, where, and which stage is the first to differ.

Outputs are named `<step>.<stage>` with step `prefill`, `step2`, .., and hold one row a slot of the prefill, or one a
request of a chained step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtp_zoo.spec import Engine
from mtp_zoo_conformance.case import STAGES, TAP, Tolerance
from mtp_zoo_conformance.inputs import Requests
from mtp_zoo_conformance.ours import ROLLOUT

DRAFTS = "drafts"
ROLLOUT_STAGE = "rollout"

FP32: Mapping[str, Tolerance] = {
    "vllm": Tolerance("fp32_vllm", 1e-4, "15 times the largest difference that was seen (6.4e-6), on states up to 6"),
    "sglang": Tolerance("fp32_sglang", 1e-5, "half as much again as the largest difference that was seen (6.4e-6)"),
    "reference": Tolerance("fp32_reference", 2e-5, "sums of a few hundred FP32 products in another order"),
    "transformers": Tolerance("fp32_transformers", 1e-5, "twice the largest difference that was seen (4.9e-6)"),
}
"""Largest difference of two FP32 runs, by judge."""

BF16_FACTOR = 3.0
"""Two BF16 runs may lie this many times our own BF16 error apart: each has an error of that size, in its own direction
(factor 2), and the largest of many entries scatters by half of that again."""


@dataclass(frozen=True)
class Difference:
    """The largest difference in one stage of one step.

    Attributes:
        stage: the stage, `tap`, or `rollout` (the training rollout's states and logits).
        max_abs: largest absolute difference; infinite where one side is not finite.
        tolerance: what is allowed.
        where: step, request and position of the largest difference.
    """

    stage: str
    max_abs: float
    tolerance: float
    where: str

    @property
    def within(self) -> bool:
        """Whether it is allowed."""
        return self.max_abs <= self.tolerance

    def __str__(self) -> str:
        return f"{self.stage} by {self.max_abs:.2e} ({self.where})"


def differences(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], requests: Requests, tolerances: Mapping[str, float]
) -> list[Difference]:
    """Differences in everything that both sides give, in the order in which it was computed: the tap, then step by step
    the stages of the data flow, then the training rollout.

    Args:
        ours, theirs: outputs.
        requests: the inputs, to name places.
        tolerances: stage -> bound.
    """
    found: list[Difference] = []
    for name, stage in _in_order(ours, requests.steps):
        other = theirs.get(name.removeprefix(ROLLOUT))
        if other is not None:
            distance, row = _largest(ours[name], other)
            found.append(Difference(stage, distance, tolerances[stage], _where(name, row, requests)))
    return found


def _in_order(ours: Mapping[str, Tensor], steps: int) -> list[tuple[str, str]]:
    """(name, stage) of our outputs."""
    parts = ["prefill", *(f"step{step}" for step in range(2, steps + 1))]
    looped = [(f"{part}.{stage}", stage) for part in parts for stage in STAGES]
    rolled = [(f"{ROLLOUT}{name}", ROLLOUT_STAGE) for name, _ in looped]
    return [(name, stage) for name, stage in ((TAP, TAP), *looped, *rolled) if name in ours]


def worst(found: Sequence[Difference]) -> list[Difference]:
    """The largest difference of each stage over all steps; stages in the order of the data flow."""
    stages = dict.fromkeys(difference.stage for difference in found)
    return [max((d for d in found if d.stage == stage), key=lambda d: d.max_abs) for stage in stages]


def first_miss(found: Sequence[Difference]) -> Difference | None:
    """The first difference that is not allowed, in the order in which things were computed."""
    return next((difference for difference in found if not difference.within), None)


def _largest(a: Tensor, b: Tensor) -> tuple[float, int]:
    """Largest absolute difference and its row; shapes that differ count as infinitely far apart."""
    if a.shape != b.shape:
        return float("inf"), 0
    distance = (a.double() - b.double()).abs().nan_to_num(nan=torch.inf, posinf=torch.inf).flatten(1).amax(1)
    row = int(distance.argmax())
    return float(distance[row]), row


def _where(name: str, row: int, requests: Requests) -> str:
    if name == TAP:
        return requests.where(row)
    step = name.split(".")[-2]
    return f"prefill, {requests.where(row)}" if step == "prefill" else f"{step}, request {row}"


def draft_mismatches(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], requests: Requests, tolerance: float
) -> list[str]:
    """Greedy drafts of ours that are not the other side's, in words.

    Where our two best logits lie within twice the tolerance, either side may pick either: that is a tie, not a mismatch.
    """
    wrong: list[str] = []
    for step in range(requests.steps):
        logits = ours["prefill.logits"][requests.last] if step == 0 else ours[f"step{step + 1}.logits"]
        for request, row in enumerate(logits):
            best, theirs_choice = row.topk(2), int(theirs[DRAFTS][request, step])
            if int(best.indices[0]) == theirs_choice:
                continue
            if float(best.values[0] - row[theirs_choice]) > 2 * tolerance:
                wrong.append(f"request {request}, draft {step + 1}: {int(best.indices[0])} for {theirs_choice}")
    return wrong


def fp32_tolerances(judge: Engine | str) -> dict[str, float]:
    """One bound for every stage."""
    return dict.fromkeys((TAP, *STAGES, ROLLOUT_STAGE), FP32[judge].absolute)


def bf16_tolerances(rough: Mapping[str, Tensor], exact: Mapping[str, Tensor], requests: Requests) -> dict[str, float]:
    """Bounds from our own error: `rough` is our BF16 run, `exact` our FP32 run on the same inputs."""
    nothing: dict[str, float] = dict.fromkeys((TAP, *STAGES, ROLLOUT_STAGE), 0.0)
    errors = worst(differences(rough, exact, requests, nothing))
    return {error.stage: BF16_FACTOR * error.max_abs for error in errors}
