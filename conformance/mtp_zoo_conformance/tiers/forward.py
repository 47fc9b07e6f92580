"""Tier forward: our head against heads that run here, on the CPU in FP32: plain torch, and transformers' own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import modeling_layers

from mtp_zoo.corrections import LATENT_NORMS
from mtp_zoo.shared import language_model
from mtp_zoo.training.target import load_target
from mtp_zoo_conformance.case import TAP
from mtp_zoo_conformance.inputs import Requests
from mtp_zoo_conformance.prepared import Prepared
from mtp_zoo_conformance.record import Cell, FlipResult
from mtp_zoo_conformance.reference.chain import run_chain
from mtp_zoo_conformance.tiers.judged import Judge, judge_outputs, judged


def judge(prepared: Prepared) -> tuple[list[Cell], list[FlipResult]]:
    """Cells of the plain reference and of transformers' `MtpModel`; flips on the case's first variant.

    Variants in a lower precision are left to the engines: here they would repeat their FP32 twins.
    """
    if prepared.dtype != torch.float32:
        return [], []
    plain = Judge("reference", torch.__version__, "forward")
    theirs = prepared.case.reference(
        load_file(prepared.checkpoint / "model.safetensors"), prepared.variant.text_config, prepared.requests
    )
    theirs = {**theirs, TAP: target_tap(prepared.checkpoint, prepared.case.tap, prepared.requests)}
    cells, flips = judged(prepared, plain, theirs)
    return [*cells, *_transformers(prepared)], flips


def _transformers(prepared: Prepared) -> list[Cell]:
    judge = Judge("transformers", transformers.__version__, "forward")
    settings = prepared.case.mtp_model
    if settings is None:
        return []
    if not hasattr(modeling_layers, "MtpModel"):
        return [judge.cell(prepared, "all", "not_judged", "this transformers release has no MtpModel", expected=True)]
    theirs = mtp_model_outputs(prepared.checkpoint, settings, prepared.requests)
    return judge_outputs(prepared, judge, theirs)


@torch.no_grad()
def target_tap(checkpoint: Path, tap: str, requests: Requests) -> Tensor:
    """[slots, hidden]: what transformers' own target has behind its final norm, or in front of it, request by request."""
    decoder = language_model(load_target(checkpoint, dtype=torch.float32))
    seen: list[tuple[Tensor, Tensor]] = []
    with decoder.norm.register_forward_hook(lambda _module, inputs, output: seen.append((inputs[0], output))):
        for span in requests.spans:
            decoder(input_ids=requests.target_ids[None, span], use_cache=False)
    return torch.cat([states[tap == "post_norm"][0] for states in seen]).float()


@torch.no_grad()
def mtp_model_outputs(checkpoint: Path, settings: Mapping[str, Any], requests: Requests) -> dict[str, Tensor]:
    """What transformers' `MtpModel` (5.24, modeling_layers.py) gives for a recycled head, loaded by its own name map.

    Two things are set that it has for released models only, or otherwise than both engines. It finds a head behind the
    target's layers by the number of the released model's layer (61 in DeepSeek-V3); here it gets that of the tiny model. And it
    norms latents with an epsilon of its own; here with the config's.

    Args:
        checkpoint: the checkpoint.
        settings: config fields that `MtpModel` asks for and the published config lacks.
        requests: the inputs.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

    config = AutoConfig.from_pretrained(checkpoint).get_text_config()
    for name, value in settings.items():
        setattr(config, name, value)
    main: Any = AutoModelForCausalLM.from_pretrained(checkpoint, config=config, dtype=torch.float32).eval()
    known = main._keys_to_ignore_on_load_unexpected or []
    main._keys_to_ignore_on_load_unexpected = [*known, rf"model\.layers\.{config.num_hidden_layers}\."]
    model = MtpModel.from_pretrained(main, dtype=torch.float32).eval()
    for name, module in model.named_modules():
        if name.endswith(LATENT_NORMS):
            module.variance_epsilon = config.rms_norm_eps

    def layer(ids: Tensor, states: Tensor, positions: Tensor) -> dict[str, Tensor]:
        out = model.forward_layer(0, states[None], positions[None], None, input_ids=ids[None])[0]
        return {"recycle": out, "logits": main.lm_head(out)}

    return run_chain(layer, requests)
