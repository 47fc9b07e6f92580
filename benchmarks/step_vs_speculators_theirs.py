"""One measurement of the MTP model of speculators; run by step_vs_speculators.py in the environment made for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
from speculators.models.mtp.core import compute_step_weights
from speculators.proposals.greedy import GreedyTokenProposalConfig
from step_vs_speculators_shared import BETA, DEPTHS, Inputs, Job, fill, run, text_config
from torch import Tensor, nn
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

OURS = {
    "mtp_layers.0.token_layernorm.": "depths.0.enorm.",
    "mtp_layers.0.hidden_layernorm.": "depths.0.hnorm.",
    "mtp_layers.0.input_proj.": "depths.0.eh_proj.",
    "mtp_layers.0.final_layernorm.": "depths.0.norm.",
    "mtp_layers.0.": "depths.0.block.",
}
"""Their prefixes of names and ours; the first that fits counts."""


def our_name(name: str) -> str:
    prefix = next(prefix for prefix in OURS if name.startswith(prefix))
    return OURS[prefix] + name.removeprefix(prefix)


def build(job: Job) -> MTPDraftModel:
    proposal = GreedyTokenProposalConfig(speculative_tokens=DEPTHS)
    config = MTPSpeculatorConfig(
        transformer_layer_config=Qwen3_5TextConfig(**text_config(job.vocab)),
        speculators_config=SpeculatorsConfig(
            algorithm="mtp",
            proposal_methods=[proposal],
            default_proposal_method=proposal.proposal_type,
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    model = MTPDraftModel(config)
    del model.verifier_lm_head  # as load_verifier_weights does: the MTP model has no use for it
    return model


def make(job: Job) -> tuple[list[nn.Parameter], Callable[[], tuple[Tensor, list[float]]]]:
    model, inputs, weights = build(job), Inputs.of(job), compute_step_weights(BETA, DEPTHS)
    model.embed_tokens.weight = model.lm_head.weight = inputs.embedding
    trained = {our_name(name): value for name, value in model.named_parameters() if value.requires_grad}
    fill(trained)
    model.to(job.torch_dtype).train()
    positions = torch.arange(job.tokens)[None]

    def forward() -> tuple[Tensor, list[float]]:
        _, loss, metrics = model(
            inputs.input_ids,
            inputs.hidden,
            position_ids=positions,
            loss_mask=inputs.learn,
            step_weights=weights,
        )
        return loss, [float(metrics[f"loss_step_{step}"]) / weights[step] for step in range(DEPTHS)]

    return list(trained.values()), forward


def main() -> None:
    run(make)
