"""Tiny heads without files, for tests of the modules behind the loader."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mtp_zoo.blocks import BlockSource
from mtp_zoo.head import DraftHead
from mtp_zoo.modelconfig import ModelConfig
from mtp_zoo.registry import get_family
from mtp_zoo.shared import SharedTensors
from tests.tiny import text_config, tiny_config

VOCAB, HIDDEN = 128, 64


def tiny_head(
    *,
    depths: int = 1,
    seed: int = 0,
    spec: dict[str, Any] | None = None,
    block: BlockSource | None = None,
    **config: Any,
) -> DraftHead:
    """An attached FP32 head with random, non-trivial weights; `spec` flips conventions of the family, `block` its layer."""
    family = get_family("qwen3_5")
    if block:
        family = dataclasses.replace(family, block=block)
    if spec:
        family = dataclasses.replace(family, spec=dataclasses.replace(family.spec, **spec))
    head = DraftHead(family, ModelConfig(tiny_config(**config), Path("tiny/config.json")), depths=depths)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.2
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        embedding = nn.Embedding(VOCAB, HIDDEN)
        embedding.weight.copy_(torch.randn(VOCAB, HIDDEN, generator=generator))
        lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        lm_head.weight.copy_(torch.randn(VOCAB, HIDDEN, generator=generator) * HIDDEN**-0.5)
    return head.attach(SharedTensors(embedding, lm_head))


def tiny_target(*, seed: int = 0, **config: Any) -> Any:
    """A transformers Qwen3.5 model with random weights, FP32, frozen."""
    from transformers import Qwen3_5ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        target = Qwen3_5ForCausalLM(text_config(tiny_config(**config))).eval().requires_grad_(False)
        for parameter in target.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.2)
    return target
