"""The demo's target: a language model of Qwen3.5's shape, small enough for two CPU cores, and how it is trained.

`fine_tune` stands for the many trainers that know nothing of a draft head: it sees a transformers model, which holds no
head, and so the head of the checkpoint stays as it was while the model under it moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3_5TextConfig, get_cosine_with_min_lr_schedule_with_warmup

from mtp_zoo.errors import EmptyDatasetError

WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
CLIP_NORM = 1.0
FINAL_LR_RATIO = 0.1
SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attn_output_gate": True,
    "linear_num_key_heads": 2,  # vLLM's kernel for linear attention on a CPU takes heads of 64 and 128
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "mamba_ssm_dtype": "float32",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
}


def demo_config(vocab_size: int, *, end_of_text: int | None = None) -> Qwen3_5TextConfig:
    """The configuration of the demo's target: 1.04 M parameters at a vocabulary of 1,024.

    Text only, tied, three gated-delta layers and one of full attention, and one draft head declared. There is no
    `mrope_section`: without images the three position grids are the same, and vLLM 0.32.0 crashes on a text-only
    configuration that has one.

    Args:
        vocab_size: entries of the tokenizer.
        end_of_text: the token that ends a document, if there is one.
    """
    return Qwen3_5TextConfig(**SHAPE, vocab_size=vocab_size, eos_token_id=end_of_text)


def fine_tune(
    target: PreTrainedModel,
    token_ids: Int[Tensor, " tokens"],
    *,
    steps: int,
    lr: float,
    batch_size: int = 8,
    length: int = 256,
    warmup: int = 10,
    seed: int = 0,
    progress: Callable[[], object] | None = None,
) -> list[float]:
    """Train all of the target on random windows of a token stream; it is left in eval mode.

    AdamW with weight decay on matrices only, gradients clipped to norm 1, the rate warmed up and then lowered along a
    cosine to a tenth.

    Args:
        target: the model, changed in place.
        token_ids: the stream, int64, longer than one window.
        steps: optimiser steps.
        lr: peak learning rate.
        batch_size: windows a step.
        length: tokens a window.
        warmup: steps until the peak.
        seed: of the choice of windows.
        progress: called after each step.

    Returns:
        Cross-entropy of each step, in nats a token.

    Raises:
        EmptyDatasetError: the stream is shorter than one window.
    """
    _check_length(token_ids, length)
    generator = torch.Generator().manual_seed(seed)
    optimizer = _optimizer(target, lr)
    schedule = get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, steps, min_lr_rate=FINAL_LR_RATIO)
    losses: list[float] = []
    target.train()
    for _ in range(steps):
        windows = random_windows(token_ids, batch_size, length, generator)
        loss = _token_losses(target, windows).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(target.parameters(), CLIP_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if progress is not None:
            progress()
    target.eval()
    return losses


@torch.no_grad()
def perplexity(
    target: PreTrainedModel,
    token_ids: Int[Tensor, " tokens"],
    *,
    windows: int = 48,
    length: int = 256,
    batch_size: int = 16,
) -> float:
    """Perplexity over evenly spaced windows of a token stream; each window starts without context.

    Raises:
        EmptyDatasetError: the stream is shorter than one window.
    """
    _check_length(token_ids, length)
    batches = even_windows(token_ids, windows, length).split(batch_size)
    return math.exp(torch.cat([_token_losses(target, batch) for batch in batches]).mean().item())


def random_windows(
    token_ids: Int[Tensor, " tokens"], count: int, length: int, generator: torch.Generator
) -> Int[Tensor, "count length"]:
    """`count` windows of `length` tokens that start at random places of the stream."""
    starts = torch.randint(0, len(token_ids) - length + 1, (count,), generator=generator)
    return token_ids[starts[:, None] + torch.arange(length)]


def even_windows(token_ids: Int[Tensor, " tokens"], count: int, length: int) -> Int[Tensor, "count length"]:
    """`count` windows of `length` tokens, evenly spaced from the start of the stream to its end.

    `even_windows(torch.arange(10), 3, 4)` is `[[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]`.
    """
    starts = torch.linspace(0, len(token_ids) - length, count, dtype=torch.float64).long()
    return token_ids[starts[:, None] + torch.arange(length)]


def _token_losses(target: PreTrainedModel, windows: Int[Tensor, "batch length"]) -> Float[Tensor, " predicted"]:
    logits = target(input_ids=windows, use_cache=False).logits[:, :-1]
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten(), reduction="none")


def _optimizer(target: PreTrainedModel, lr: float) -> torch.optim.AdamW:
    parameters = list(target.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS)


def _check_length(token_ids: Int[Tensor, " tokens"], length: int) -> None:
    if len(token_ids) < length:
        raise EmptyDatasetError(
            f"Cutting windows of {length} tokens: the stream holds {len(token_ids)}.",
            remedy="Give more text, or ask for shorter windows.",
        )
