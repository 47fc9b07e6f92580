"""What both sides of the comparison of training steps start from: shapes, weights, tokens, optimiser, clock.

Runs in both environments, so it imports torch and nothing of either library.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from measure import watch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

DEPTHS = 3
BETA = 0.6


@dataclass(frozen=True)
class Job:
    """One measurement. `variant` is what the side makes of it."""

    dtype: str
    tokens: int
    vocab: int
    repeats: int
    threads: int
    variant: str = ""

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch has it."""
        return getattr(torch, self.dtype)


def text_config(vocab: int) -> dict[str, Any]:
    """A Qwen3.5 of hidden size 1,024: the heads of the published 0.8B, an FFN of 3,072."""
    return {
        "model_type": "qwen3_5_text",
        "vocab_size": vocab,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "attn_output_gate": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    }


@dataclass(frozen=True)
class Inputs:
    """Token ids [1, seq], which of them are learnt, target states [1, seq, hidden], the tied embedding [vocab, hidden].

    The first half is prompt. The last DEPTHS - 1 tokens are not learnt: speculators gives every depth the slots that the
    deepest one has, and without these tokens both sides count the same slots at every depth.
    """

    input_ids: Tensor
    learn: Tensor
    hidden: Tensor
    embedding: nn.Parameter

    @classmethod
    def of(cls, job: Job) -> Inputs:
        """The same numbers in every process."""
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, job.vocab, (1, job.tokens), generator=generator)
        learn = torch.zeros(1, job.tokens, dtype=torch.bool)
        learn[:, job.tokens // 2 : job.tokens - (DEPTHS - 1)] = True
        hidden = torch.randn(1, job.tokens, 1024, generator=generator).to(job.torch_dtype)
        embedding = torch.randn(job.vocab, 1024, generator=generator).mul_(0.02).to(job.torch_dtype)
        return cls(ids, learn, hidden, nn.Parameter(embedding, requires_grad=False))


@torch.no_grad()
def fill(parameters: dict[str, nn.Parameter]) -> None:
    """Give equal values to equally shaped parameters of equal names: ours, which the other side translates to."""
    for name in sorted(parameters):
        parameter, generator = parameters[name], torch.Generator().manual_seed(zlib.crc32(name.encode()))
        scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def run(make: Callable[[Job], tuple[list[nn.Parameter], Callable[[], tuple[Tensor, list[float]]]]]) -> None:
    """Measure what `make` gives, (trained parameters, forward -> (loss, losses of the depths)), and print one JSON line.

    A step is forward, backward and AdamW. The first one counts operations and gives the losses; the others are timed.
    """
    job = Job(**json.loads(sys.argv[1]))
    if job.threads:
        torch.set_num_threads(job.threads)
    parameters, forward = make(job)
    optimizer = torch.optim.AdamW(parameters, lr=1e-5)
    counter, found = FlopCounterMode(display=False), {}

    def step() -> list[float]:
        optimizer.zero_grad()
        loss, losses = forward()
        loss.backward()
        optimizer.step()
        return losses

    def first() -> None:
        with counter:
            found["losses"] = step()

    seconds, peak = watch(step, job.repeats, warm_up=first)
    trained = sum(parameter.numel() for parameter in parameters)
    facts = {"seconds": seconds, "peak_gib": peak, "flops": counter.get_total_flops(), "trained": trained}
    print(json.dumps({**facts, **found, "threads": torch.get_num_threads()}))
