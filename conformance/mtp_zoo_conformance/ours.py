"""Our side of a comparison: the head as `mtp_zoo` loads it, run as a server drafts and as the objective trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mtp_zoo as mz
from mtp_zoo.head import DepthState, DraftHead
from mtp_zoo.registry import get_family
from mtp_zoo.rollout import run_rollout, slot_positions
from mtp_zoo.shared import load_shared
from mtp_zoo.spec import Engine
from mtp_zoo.training.target import load_target
from mtp_zoo_conformance.case import ConformanceCase
from mtp_zoo_conformance.flips import Flip
from mtp_zoo_conformance.inputs import Requests

ROLLOUT = "rollout."
"""Prefix of outputs that come from the training rollout instead of the drafting loop."""


def load(
    case: ConformanceCase,
    checkpoint: Path,
    *,
    engine: Engine | None,
    dtype: torch.dtype = torch.float32,
    flip: Flip | None = None,
) -> DraftHead:
    """The checkpoint's head under an engine's conventions, wrong in one of them if a flip is given."""
    family = get_family(case.family)
    if flip and flip.spec:
        family = dataclasses.replace(family, spec=flip.spec(family.spec, engine))
    head = mz.load_head(checkpoint, family=family, dtype=dtype, engine=engine)
    head.attach(load_shared(checkpoint, family=family, dtype=dtype))
    if flip and flip.weights:
        flip.weights(head)
    return head.eval()


@torch.no_grad()
def run(head: DraftHead, requests: Requests, drafts: Tensor, stages: Mapping[str, str]) -> dict[str, Tensor]:
    """Outputs of the drafting loop and of the training rollout, FP32, under the names that engine workers use.

    Args:
        head: the head.
        requests: the inputs.
        drafts: [requests, steps], the other side's drafts. Both sides read the same tokens, so that one near tie between
            two logits does not send them down different paths.
        stages: stage -> path of our submodule behind `depths.0.`.
    """
    looped = [_draft(head, requests, number, drafts[number], stages) for number in range(len(requests.seq_lens))]
    out = {f"prefill.{stage}": torch.cat([steps[0][stage] for steps in looped]) for stage in looped[0][0]}
    for step in range(1, requests.steps):
        out |= {f"step{step + 1}.{s}": torch.cat([steps[step][s] for steps in looped]) for s in looped[0][step]}
    return {**out, **_rolled_out(head, requests, drafts)}


def _draft(
    head: DraftHead, requests: Requests, number: int, drafts: Tensor, stages: Mapping[str, str]
) -> list[dict[str, Tensor]]:
    """One request, token by token behind its prefill, with a KV cache."""
    from transformers import DynamicCache

    span, cache = requests.spans[number], DynamicCache(config=head.factory.config)
    ids, hidden = requests.input_ids[None, span], requests.hidden_states[None, span]
    positions, steps = torch.arange(ids.shape[1])[None], list[dict[str, Tensor]]()
    for depth in range(1, requests.steps + 1):
        with _watched(head, stages) as seen:
            state = head.draft_step(ids, hidden, slot_positions(head, positions, depth), cache=cache, depth=depth)
        steps.append({**seen, **_ends(head, state)})
        ids, hidden, positions = drafts[None, depth - 1 : depth], state.recycled[:, -1:], positions[:, -1:]
    return steps


def _ends(head: DraftHead, state: DepthState) -> dict[str, Tensor]:
    return {"recycle": state.recycled[0].float(), "logits": head.shared.logits(state.normed)[0].float()}


@contextmanager
def _watched(head: DraftHead, stages: Mapping[str, str]) -> Generator[dict[str, Tensor]]:
    """Collect what the submodules of depth 0 give, [slots, *]."""
    seen: dict[str, Tensor] = {}

    def hook(stage: str) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            seen[stage] = first.detach().float().flatten(0, 1).clone()

        return keep

    handles = [
        head.get_submodule(f"depths.0.{path}").register_forward_hook(hook(stage)) for stage, path in stages.items()
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _rolled_out(head: DraftHead, requests: Requests, drafts: Tensor) -> dict[str, Tensor]:
    """The same numbers from one packed pass of the training rollout.

    The token of slot 0 is read by nobody; slot t at depth 1 reads token t + 1, so a request's tokens stand one to the
    right, and its drafts behind them: at depth k the last slot reads draft k - 1.
    """
    documents = [
        (
            [0, *requests.input_ids[span].tolist(), *row[:-1].tolist()],
            [True] * (span.stop - span.start + requests.steps),
        )
        for span, row in zip(requests.spans, drafts, strict=True)
    ]
    tokens = mz.TokenBatch.from_rows([documents])
    hidden = torch.zeros(1, tokens.shape[1], requests.hidden_states.shape[1])
    slots = [
        slice(span.start + n * requests.steps, span.stop + n * requests.steps) for n, span in enumerate(requests.spans)
    ]
    for slot, span in zip(slots, requests.spans, strict=True):
        hidden[0, slot] = requests.hidden_states[span]
    states = run_rollout(head, tokens, hidden, depths=requests.steps, rollout="chain")
    out: dict[str, Tensor] = {}
    for step, state in enumerate(states, start=1):
        rows = [slot if step == 1 else slice(slot.stop - 1, slot.stop) for slot in slots]
        picked = DepthState(*(torch.cat([part[:, r] for r in rows], 1) for part in (state.normed, state.recycled)))
        where = "prefill" if step == 1 else f"step{step}"
        out |= {f"{ROLLOUT}{where}.{stage}": value for stage, value in _ends(head, picked).items()}
    return out


@torch.no_grad()
def tap(head: DraftHead, checkpoint: Path, requests: Requests, dtype: torch.dtype = torch.float32) -> Tensor:
    """[slots, hidden]: states of transformers' own target at the head's tap, FP32."""
    target = load_target(checkpoint, dtype=dtype)
    states = [
        mz.target_states(target, mz.TokenBatch.all_tokens(requests.target_ids[None, span]), head.spec)[0]
        for span in requests.spans
    ]
    return torch.cat(states).float()
