"""Functions of SGLang that are written for triton or for another device, replaced right after their module's import.

`PATCHES` maps the module's name to what changes it. Only what the families need that are judged is here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .ledger import stand_in
from .sparse import SPARSE

Module = Any


def _rope_factory(module: Module) -> None:
    """SGLang's CPU factory knows the yarn of DeepSeek only; the general one builds modules that run on a CPU."""
    own = module.get_rope_wrapper

    @stand_in
    def get_rope(*args: Any, **kwargs: Any) -> Any:
        """SGLang's general RoPE modules on a CPU, where its CPU factory refuses all but DeepSeek's yarn."""
        kwargs.pop("device")
        return module.get_rope(*args, **kwargs)

    def get_rope_wrapper(*args: Any, **kwargs: Any) -> Any:
        scaling = kwargs.get("rope_scaling") or (args[5] if len(args) > 5 else None)
        general = kwargs.get("device") == "cpu" and (scaling or {}).get("rope_type") != "deepseek_yarn"
        return get_rope(*args, **kwargs) if general else own(*args, **kwargs)

    module.get_rope_wrapper = get_rope_wrapper


def _shared_expert(module: Module) -> None:
    @stand_in
    def fused_gate_sigmoid_mul_add(x: Tensor, gate: Tensor, shared: Tensor, out: Tensor) -> None:
        """The gated shared expert added to the routed experts' output.

        Shapes: x [N, H], gate [H], shared and out [N, H]; out is changed in place.
        """
        out += torch.sigmoid((x.float() @ gate.float())[:, None]).to(out.dtype) * shared

    module.fused_gate_sigmoid_mul_add = fused_gate_sigmoid_mul_add


def _latent_attention(module: Module) -> None:
    """`torch_native` has no entry and would take triton's, whose prefill is not absorbed and fills no cache: the
    backend reads keys and values from the cache alone, and would attend to latent rows without a word."""

    @stand_in
    def latent_attention(*_batch: Any) -> Any:
        """Latent attention (MLA) takes its absorbed form with the backend torch_native."""
        return module.AttnForwardMethod.MLA

    module.AttentionBackendRegistry.register("torch_native", latent_attention)


def _gated_norm(module: Module) -> None:
    """Take the branch that calls `fused_rmsnorm_gated_cpu`, which notes itself, instead of triton's."""
    module._use_cpu = True


def _accepted_states(module: Module) -> None:
    @stand_in
    def scatter_accepted_states(
        to: Tensor, steps: Tensor, slots: Tensor, accepted: Tensor, rows: Tensor | None = None
    ) -> None:
        """Linear attention's state after the last accepted draft, copied back to its request.

        Shapes: to [layers, slots, ...], steps [layers, rows, T, ...], slots and accepted [B] (negative: none).
        """
        for i, (slot, step) in enumerate(zip(slots.tolist(), accepted.tolist(), strict=True)):
            if slot >= 0 and step >= 0:
                to[:, slot] = steps[:, i if rows is None else int(rows[i]), step].to(to.dtype)

    module.fused_mamba_state_scatter_with_mask = scatter_accepted_states
    module.fused_conv_window_scatter_with_mask = scatter_accepted_states
    module._conv_multi_eligible = lambda _pairs: False


@stand_in
def keep_intel_amx() -> None:
    """SGLang is told that the CPU has AMX, so that it keeps intel_amx, its only CPU backend that verifies drafts."""
    from sglang.srt.runtime_context import override_platform

    override_platform(has_amx=True).install()


PATCHES: dict[str, Callable[[Module], None]] = {
    "sglang.srt.layers.rotary_embedding.factory": _rope_factory,
    "sglang.srt.models.qwen2_moe": _shared_expert,
    "sglang.srt.models.deepseek_common.attention_backend_handler": _latent_attention,
    "sglang.kernels.ops.attention.fla.layernorm_gated": _gated_norm,
    "sglang.kernels.ops.attention.fla.fused_norm_gate": _gated_norm,
    "sglang.kernels.ops.mamba.mamba_state_scatter_triton": _accepted_states,
    **SPARSE,
}
