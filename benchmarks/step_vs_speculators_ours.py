"""One measurement of our objective, or of plain matrix products; run by step_vs_speculators.py."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from step_vs_speculators_shared import BETA, DEPTHS, Inputs, Job, fill, run, text_config
from torch import Tensor, nn

from mtp_zoo import MTPObjective, SharedTensors, TokenBatch
from mtp_zoo.head import DraftHead
from mtp_zoo.modelconfig import ModelConfig
from mtp_zoo.registry import get_family

GEMM = "gemm"


def build(job: Job, inputs: Inputs) -> DraftHead:
    head = DraftHead(get_family("qwen3_5"), ModelConfig(text_config(job.vocab), Path("config.json")))
    fill(dict(head.named_parameters()))
    embedding, lm_head = (
        nn.Embedding(*inputs.embedding.shape, device="meta"),
        nn.Linear(1, 1, bias=False, device="meta"),
    )
    embedding.weight = lm_head.weight = inputs.embedding
    return head.to(job.torch_dtype).train().attach(SharedTensors(embedding, lm_head))


def make(job: Job) -> tuple[list[nn.Parameter], Callable[[], tuple[Tensor, list[float]]]]:
    inputs, (rollout, *rest) = Inputs.of(job), job.variant.split(", ")
    head = build(job, inputs)
    objective = MTPObjective(head, depths=DEPTHS, loss="ce", beta=BETA, rollout=rollout, agreement=rest == ["metrics"])
    tokens = TokenBatch.from_mask(inputs.input_ids, inputs.learn)

    def forward() -> tuple[Tensor, list[float]]:
        out = objective(tokens, inputs.hidden)
        metrics = out.metrics
        return out.loss, [metrics[f"mtp/loss_{depth}"] for depth in range(1, DEPTHS + 1)]

    return list(head.trainable_parameters()), forward


def products(job: Job) -> None:
    """FLOP/s of each product that a step is made of, as plain matrix products of the same shapes."""
    hidden, ffn = 1024, text_config(job.vocab)["intermediate_size"]
    shapes = {
        "logits": (job.tokens, hidden, job.vocab),
        "their gradient on the states": (job.tokens, job.vocab, hidden),
        "FFN": (job.tokens, hidden, ffn),
        "gradient of its weight": (ffn, job.tokens, hidden),
    }
    rates = {}
    for name, (rows, inner, columns) in shapes.items():
        left, right = (torch.randn(shape).to(job.torch_dtype) for shape in ((rows, inner), (inner, columns)))
        left @ right
        rates[name] = 2 * rows * inner * columns / statistics.median(timed(left, right) for _ in range(3))
    print(json.dumps({"rates": rates, "threads": torch.get_num_threads()}))


def timed(left: Tensor, right: Tensor) -> float:
    began = time.perf_counter()
    left @ right
    return time.perf_counter() - began


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    if job.variant == GEMM:
        torch.set_num_threads(job.threads or torch.get_num_threads())
        products(job)
    else:
        run(make)
