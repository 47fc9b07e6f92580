"""Jobs of kind "module": vLLM's own draft module, without the engine around it.

The module is built by vLLM's registry from a config with `method: mtp`, filled by its own loader, and attends through the
platform's own backend, with KV caches and metadata from vLLM's own functions (`caches`). It is called as vLLM's proposer
calls it (vllm/v1/spec_decode/llm_base_proposer.py, `propose`, 0.32.0), prefill and greedy chain. Unlike the engine it keeps
an embedding and an output matrix that its own load filled, where the engine always takes the target's.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from caches import Caches, Step
from canary import Canary
from safetensors.torch import load_file, save_file
from settings import Job, engine_arguments, settings_in_words
from torch import Tensor, nn
from vllm.config import VllmConfig, get_layers_from_vllm_config, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models import supports_multimodal_embeddings
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
from vllm.v1.worker.workspace import init_workspace_manager

SHORTEST_MODEL_LEN = 64


def run_module(job: Job) -> dict[str, Any]:
    """Run the draft module, and the target if `run_target`; writes `outputs.safetensors` in the job's folder.

    Inputs and outputs are those of the worker protocol: `prefill.*` [N,*], `step{i}.*` [B,*], `drafts` [B,K], `tap` [N,H].
    """
    inputs = load_file(job["inputs"])
    lengths = tuple(int(n) for n in inputs["seq_lens"])
    max_len = max(SHORTEST_MODEL_LEN, max(lengths) + job["steps"])
    canary = Canary()
    config = open_config(job, max_len=max_len, requests=len(lengths))
    device = start(config)
    target = build(config, config.model_config) if job["run_target"] else None
    target_layers = attention_layers(config)
    draft = build(config, config.speculative_config.draft_model_config)
    draft_layers = attention_layers(config) - target_layers
    if target is not None:
        share(draft, target, canary.unfilled[type(draft).__name__])
    caches = Caches(config, requests=len(lengths), max_len=max_len, device=device)
    outputs: dict[str, Tensor] = {}
    if target is not None:
        outputs["tap"] = run_target(config, caches, target, target_layers, inputs["target_ids"], lengths)
    outputs |= Drafter(config, caches, draft, draft_layers, job["stages"]).run(inputs, lengths, job["steps"])
    path = Path(job["folder"]) / "outputs.safetensors"
    save_file({name: tensor.contiguous().cpu() for name, tensor in outputs.items()}, path)
    return {
        "draft_class": type(draft).__name__,
        "target_class": type(target).__name__ if target is not None else None,
        "backend": ", ".join(backends(config, draft_layers)),
        "kernels": kernels(config, target_layers),
        "parameters": canary.parameters[type(draft).__name__],
        "unfilled": canary.unfilled[type(draft).__name__],
        "target_unfilled": canary.unfilled[type(target).__name__] if target is not None else [],
        "settings": settings_in_words(job),
    }


def open_config(job: Job, *, max_len: int, requests: int) -> VllmConfig:
    """The engine's config of the checkpoint, with its own head as drafter."""
    drafts = 1  # right for every declared depth; how far the module is chained is the job's matter
    arguments = engine_arguments(job, max_model_len=max_len, max_num_seqs=requests, drafts=drafts)
    return EngineArgs(**arguments).create_engine_config()


def start(config: VllmConfig) -> torch.device:
    """What the platform's worker does before it builds a model (vllm/v1/worker/{gpu,cpu}_worker.py); returns the device."""
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

        _set_torch_accelerator_to_noop()  # torch.accelerator raises where there is none
        device = torch.device("cpu")
    else:
        device = torch.device(current_platform.device_type, 0)
        current_platform.set_device(device)
        current_platform.check_if_supports_dtype(config.model_config.dtype)
        init_workspace_manager(device, 1)
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        init_worker_distributed_environment(config, 0, f"file://{folder}/store", 0, current_platform.dist_backend)
    return device


def build(config: VllmConfig, model_config: Any) -> nn.Module:
    """A model of the config, built and filled by vLLM's own loader."""
    with set_current_vllm_config(config):
        return get_model(vllm_config=config, model_config=model_config).eval()


def share(draft: nn.Module, target: nn.Module, unfilled: list[str]) -> None:
    """Hand the target's embedding and output matrix to a draft whose checkpoint stores none for it.

    As `_maybe_share_embeddings` and `_maybe_share_lm_head` in vllm/v1/spec_decode/llm_base_proposer.py, 0.32.0.
    """
    sources = {"embed_tokens.weight": "model.embed_tokens", "shared_head.head.weight": "lm_head"}
    for name in unfilled:
        for ending, source in sources.items():
            if name.endswith(ending):
                parent, _, child = name.removesuffix(".weight").rpartition(".")
                setattr(draft.get_submodule(parent), child, target.get_submodule(source))


def attention_layers(config: VllmConfig) -> set[str]:
    """Names of the attention (and recurrent) layers built so far."""
    return set(get_layers_from_vllm_config(config, AttentionLayerBase))


def backends(config: VllmConfig, names: set[str]) -> list[str]:
    """Names of the attention backends of those layers."""
    layers = get_layers_from_vllm_config(config, AttentionLayerBase)
    return sorted({layers[name].get_attn_backend().get_name() for name in names})


def kernels(config: VllmConfig, target_layers: set[str]) -> dict[str, Any]:
    """Which implementations ran."""
    return {
        "custom_ops": list(config.compilation_config.custom_ops),
        "block_size": config.cache_config.block_size,
        "kv_cache_layout": config.cache_config.kv_cache_layout,
        "target_backends": backends(config, target_layers),
    }


def run_target(
    config: VllmConfig, caches: Caches, target: nn.Module, names: set[str], ids: Tensor, lengths: tuple[int, ...]
) -> Tensor:
    """The state [N,H] that vLLM hands to its proposer: what the target returns, or the one that it keeps for the purpose.

    See `propose_draft_token_ids` in vllm/v1/worker/gpu_model_runner.py, 0.32.0.
    """
    step = Step(lengths, (0,) * len(lengths))
    arguments = token_arguments(target, config.model_config, ids.to(caches.device), step, caches.device)
    metadata, slots = caches.metadata(step, names, draft_index=None)
    with forward(config, metadata, slots, len(ids)), torch.inference_mode():
        states = target(intermediate_tensors=None, **arguments)
        kept = getattr(target, "get_mtp_target_hidden_states", lambda: None)()
        return (states if kept is None else kept[: len(ids)]).float().clone()


def token_arguments(
    model: nn.Module, model_config: Any, ids: Tensor, step: Step, device: torch.device
) -> dict[str, Tensor | None]:
    """`input_ids`, `positions` and `inputs_embeds` as vLLM's runner and proposer pass them."""
    positions = step.positions.to(device)
    if model_config.uses_mrope:  # a text token has the same position in every dimension
        positions = positions.expand(model_config.mrope_num_dims, -1)
    if model_config.supports_multimodal_inputs and supports_multimodal_embeddings(model):
        return {"input_ids": None, "positions": positions, "inputs_embeds": model.embed_input_ids(ids.int())}
    return {"input_ids": ids.int(), "positions": positions, "inputs_embeds": None}


def forward(config: VllmConfig, metadata: dict[str, Any], slots: dict[str, Tensor], tokens: int) -> Any:
    """The context that a pass runs in."""
    return set_forward_context(metadata, config, num_tokens=tokens, slot_mapping=slots)


class Drafter:
    """vLLM's proposer in a few lines: one ragged prefill, then a greedy chain of single tokens.

    Args:
        config: the engine's config.
        caches: KV caches and metadata.
        draft: the draft module.
        names: its attention layers.
        stages: stage -> path of the submodule whose output is kept.
    """

    def __init__(
        self, config: VllmConfig, caches: Caches, draft: nn.Module, names: set[str], stages: dict[str, str]
    ) -> None:
        self.config, self.caches, self.draft, self.names = config, caches, draft, names
        self.paths = stages
        self.seen: dict[str, list[Tensor]] = {}
        for stage, path in stages.items():
            draft.get_submodule(path).register_forward_hook(self._keep(stage))

    def _keep(self, stage: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            self.seen.setdefault(stage, []).append(tensor.float().clone())  # vLLM goes on writing in place

        return hook

    def run(self, inputs: dict[str, Tensor], lengths: tuple[int, ...], steps: int) -> dict[str, Tensor]:
        """Outputs of the protocol, all but `tap`."""
        step = Step(lengths, (0,) * len(lengths))
        state = inputs["hidden_states"].to(self.caches.device, self.config.model_config.dtype)
        recycle, outputs = self._call("prefill", inputs["input_ids"].to(self.caches.device), state, step, index=0)
        last = step.last.to(self.caches.device)
        drafts = [outputs["prefill.logits"][last].argmax(-1)]
        recycle = recycle[last]
        for number in range(2, steps + 1):
            step = Step((1,) * len(lengths), tuple(n + number - 2 for n in lengths))
            recycle, found = self._call(f"step{number}", drafts[-1], recycle, step, index=number - 1)
            drafts.append(found[f"step{number}.logits"].argmax(-1))
            outputs |= found
        return {**outputs, "drafts": torch.stack(drafts, 1)}

    def _call(
        self, name: str, ids: Tensor, state: Tensor, step: Step, *, index: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One pass; returns the state that vLLM recycles, in the model's dtype, and the outputs."""
        self.seen.clear()
        draft_config = self.config.speculative_config.draft_model_config
        metadata, slots = self.caches.metadata(step, self.names, draft_index=index)
        with forward(self.config, metadata, slots, len(ids)), torch.inference_mode():
            arguments = token_arguments(self.draft, draft_config, ids, step, self.caches.device)
            found = self.draft(hidden_states=state, **arguments)
            projected, recycle = found if isinstance(found, tuple) else (found, found)
            logits = self.draft.compute_logits(projected)
            vocab = draft_config.get_vocab_size()
            outputs = {f"{name}.recycle": recycle.float().clone(), f"{name}.logits": logits[:, :vocab].float().clone()}
            return recycle.clone(), outputs | {f"{name}.{stage}": rows for stage, rows in self._stages().items()}

    def _stages(self) -> dict[str, Tensor]:
        """What the hooks of one pass kept.

        Raises:
            RuntimeError: a submodule did not run, or gave different things in one pass. A compiled class is called without
                its hooks. DeepSeek's last norm runs twice on the same state, for the next step and for the logits.
        """
        counts = {stage: len(distinct(self.seen.get(stage, []))) for stage in self.paths}
        if wrong := [f"{self.paths[stage]} ({count})" for stage, count in counts.items() if count != 1]:
            raise RuntimeError(f"submodules that did not give exactly one output in a pass: {', '.join(wrong)}")
        return {stage: rows[0] for stage, rows in self.seen.items()}


def distinct(outputs: list[Tensor]) -> list[Tensor]:
    """The outputs without those that repeat the first."""
    return outputs[:1] + [output for output in outputs[1:] if not torch.equal(output, outputs[0])]
