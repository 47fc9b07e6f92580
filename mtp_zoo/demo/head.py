"""The demo's head training: the library in a plain torch loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel, get_cosine_with_min_lr_schedule_with_warmup

from mtp_zoo.batch import TokenBatch
from mtp_zoo.demo.target import random_windows
from mtp_zoo.head import DraftHead
from mtp_zoo.objective import MTPObjective
from mtp_zoo.targets import target_states

DEPTHS = 3
WEIGHTS = (1.0, 0.8, 0.64)
"""Weights of the depths: a draft is worth something only behind the drafts before it."""


def train_head(
    head: DraftHead,
    target: PreTrainedModel,
    token_ids: Int[Tensor, " tokens"],
    *,
    steps: int,
    lr: float,
    weights: Sequence[float] = WEIGHTS,
    batch_size: int = 8,
    length: int = 256,
    warmup: int = 10,
    seed: int = 0,
    progress: Callable[[], object] | None = None,
) -> list[dict[str, float]]:
    """Train a head towards the distribution of its frozen target, on random windows of a token stream.

    Args:
        head: the head, attached to the target here and changed in place.
        target: the model; it is frozen.
        token_ids: the stream, int64.
        steps: optimiser steps.
        lr: peak learning rate, warmed up and lowered along a cosine to a tenth.
        weights: one a depth.
        batch_size: windows a step.
        length: tokens a window.
        warmup: steps until the peak.
        seed: of the choice of windows.
        progress: called after each step.

    Returns:
        The objective's metrics of each step, and its loss under `loss`.
    """
    target.requires_grad_(False).eval()
    head.attach(target).train()
    objective = MTPObjective(head, depths=len(weights), loss="kl", weights=weights)
    optimizer = torch.optim.AdamW(head.trainable_parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, steps, min_lr_rate=0.1)
    generator = torch.Generator().manual_seed(seed)
    history: list[dict[str, float]] = []
    for _ in range(steps):
        tokens = TokenBatch.all_tokens(random_windows(token_ids, batch_size, length, generator))
        out = objective(tokens, target_states(target, tokens, head.spec))
        out.loss.backward()
        nn.utils.clip_grad_norm_(head.trainable_parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        history.append({"loss": out.loss.item(), **out.metrics})
        if progress is not None:
            progress()
    head.eval()
    return history
