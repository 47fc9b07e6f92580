"""The chain of a recycled head, without a KV cache: every step runs the layer over all that is known so far.

Slow and simple on purpose. A step's keys are those of the prefill (made from the target's states) and those of the steps
before (made from the head's own states), which is what a server's cache holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

Layer = Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]
"""(ids [slots], states [slots, hidden], positions [slots]) -> stages, each [slots, *]."""


class HasRequests(Protocol):
    """What the chain needs to know of the requests; all that it shares with the other side is the input."""

    @property
    def input_ids(self) -> Tensor:
        """[slots]."""
        ...

    @property
    def hidden_states(self) -> Tensor:
        """[slots, hidden]."""
        ...

    @property
    def spans(self) -> Sequence[slice]:
        """Where each request lies."""
        ...

    @property
    def steps(self) -> int:
        """Applications of the head."""
        ...


def run_chain(layer: Layer, requests: HasRequests) -> dict[str, Tensor]:
    """Outputs of the prefill and of each chained step, as engine workers write them.

    Args:
        layer: one application of the head over a whole request; its stages include `recycle` and `logits`.
        requests: the inputs.
    """
    runs = [
        _request(layer, requests.input_ids[span], requests.hidden_states[span], requests.steps)
        for span in requests.spans
    ]
    out = {f"prefill.{stage}": torch.cat([run[0][stage] for run in runs]) for stage in runs[0][0]}
    for step in range(1, requests.steps):
        for stage in runs[0][step]:
            out[f"step{step + 1}.{stage}"] = torch.cat([run[step][stage] for run in runs])
    out["drafts"] = torch.tensor([[int(stages["logits"][-1].argmax()) for stages in run] for run in runs])
    return out


def _request(layer: Layer, ids: Tensor, states: Tensor, steps: int) -> list[dict[str, Tensor]]:
    runs: list[dict[str, Tensor]] = []
    for step in range(steps):
        found = layer(ids, states, torch.arange(len(ids)))
        runs.append(found if step == 0 else {stage: value[-1:] for stage, value in found.items()})
        ids = torch.cat([ids, found["logits"][-1:].argmax(-1)])
        states = torch.cat([states, found["recycle"][-1:]])
    return runs
