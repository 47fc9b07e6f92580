"""AdamW over a head, and its learning rate as a pure function of the step."""

from __future__ import annotations

import math

import torch

from mtp_zoo.head import DraftHead
from mtp_zoo.training.config import OptimizerConfig


def make_optimizer(head: DraftHead, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW in two groups: matrices decay, 1-D tensors (norms, biases) do not."""
    parameters = list(head.trainable_parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.lr, betas=config.betas)


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """The rate of step `step` (the first is 1) of `steps`.

    Rises linearly to `lr` at step `warmup_steps`, then falls along half a cosine to `lr * min_lr_ratio` at the last.

    Example: lr 1, 4 warm-up steps of 8, min_lr_ratio 0: .25 .5 .75 1 .854 .5 .146 0
    """
    if step < config.warmup_steps:
        return config.lr * step / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    height = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * height)
