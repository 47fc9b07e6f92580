"""Builds SGLang's target and draft in one process, by the steps of its scheduler.

Source: sglang/srt/managers/scheduler.py, 0.5.23.
"""

from __future__ import annotations

import socket
from typing import Any

from settings import on_cpu
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import bootstrap
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
from sglang.srt.layers.quantization.unquant import initialize_bf16_gemm_config
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from shim.ledger import stand_in


def boot(arguments: dict[str, Any]) -> tuple[TpModelWorker, EagleDraftWorker]:
    """The target's and the draft's workers, weights loaded, memory pools and attention backends ready."""
    server = ServerArgs(**arguments)
    publish(server, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    port = free_port()
    bootstrap.init_parallel_runtime(server_args=server, device=server.device, dist_port=port)
    bootstrap.init_layer_runtime(model_config=ModelConfig.from_server_args(server))
    initialize_moe_config()
    initialize_fp8_gemm_config()
    initialize_fp4_gemm_config()
    initialize_bf16_gemm_config()
    target = TpModelWorker(server_args=server, gpu_id=0, nccl_port=port)
    draft = EagleDraftWorker(server, 0, port, target)
    target.model_runner.account_preloaded_weights(0)
    target.alloc_memory_pool(draft_parallel_layout=draft.parallel_layout)
    draft.alloc_memory_pool(target.model_runner.memory_pool_config, *target.get_memory_pool())
    target.init_attention_backends()
    target.init_cuda_graphs()
    if on_cpu():
        _native_draft_backends(draft)
    else:
        draft.init_attention_backends()
        draft.init_cuda_graphs()
    return target, draft


def free_port() -> int:
    """A port of 127.0.0.1 that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _native_draft_backends(draft: EagleDraftWorker) -> None:
    """SGLang's attention in plain torch (`torch_native`), which its draft loop has no multi-step form of."""
    draft.draft_worker.init_attention_backends()
    draft.draft_worker.init_cuda_graphs(capture_decode_cuda_graph=False)
    draft.draft_attn_backend = StepBackends(draft.draft_runner.attn_backend, draft.speculative_num_steps)
    draft.draft_runner.draft_attn_backend = draft.draft_attn_backend


class StepBackends:
    """One attention backend for each step of a chain, as SGLang's own multi-step backends have (`attn_backends`)."""

    def __init__(self, backend: Any, steps: int) -> None:
        self.attn_backends = [AheadBackend(backend, step + 1) for step in range(steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """The backend plans nothing before a pass."""


class AheadBackend:
    """A backend for which every request is some tokens longer than its batch says.

    SGLang's draft loop leaves `seq_lens` at the confirmed length, and a multi-step backend adds the drafts before it.
    """

    def __init__(self, backend: Any, ahead: int) -> None:
        self._backend, self._ahead = backend, ahead

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Attention of the backend, over the drafts before this one too."""
        return chained_attention(self._backend, self._ahead, forward_batch, (q, k, v, layer), *args, **kwargs)


@stand_in
def chained_attention(
    backend: Any, ahead: int, batch: Any, attended: tuple[Any, ...], *args: Any, **kwargs: Any
) -> Any:
    """Chained steps with the backend torch_native: its own attention, told each step's sequence lengths."""
    confirmed = batch.seq_lens
    batch.seq_lens = confirmed + ahead
    try:
        return backend.forward(*attended, batch, *args, **kwargs)
    finally:
        batch.seq_lens = confirmed
