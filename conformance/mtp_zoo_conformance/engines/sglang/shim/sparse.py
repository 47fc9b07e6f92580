"""Sparse attention by an index (DSA: DeepSeek-V3.2, GLM-5.x) on a CPU, for contexts that the index selects whole.

The indexer scores the context in FP8 on a GPU and keeps the `index_topk` best positions. A context of at most that many is
selected whole: attention is dense, whatever the scores are. Only such contexts run; a longer one raises. So the indexer is
built and its weights are loaded, but what it computes is not judged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .ledger import stand_in

Module = Any


def _indexer(module: Module) -> None:
    @stand_in
    def select_all(indexer: Any, *_states: Any, positions: Tensor, **_others: Any) -> None:
        """Sparse attention's indexer selects the whole context, and raises where that is longer than index_topk.

        Args:
            indexer: SGLang's module.
            positions: [N] of the queries; each sees what is before it, and itself.

        Returns:
            None: SGLang's attention takes it for "no selection".

        Raises:
            NotImplementedError: a context is longer than `index_topk`.
        """
        context = int(positions.max()) + 1 if positions.numel() else 0
        if context > indexer.index_topk:
            raise NotImplementedError(
                f"a context of {context} tokens is longer than index_topk {indexer.index_topk}: no stand-in selects from it"
            )

    module.Indexer.forward = select_all


def _capability(_module: Module) -> None:
    @stand_in
    def get_device_capability(*_device: Any) -> tuple[int, int]:
        """A CUDA capability of 0.0: SGLang asks for one when it sets up sparse attention, on a CPU too."""
        return 0, 0

    torch.cuda.get_device_capability = get_device_capability


def _cache_dtype(module: Module) -> None:
    @stand_in
    def cache_in_model_dtype(_arguments: Any) -> dict[str, Any]:
        """Sparse attention's KV cache has the model's dtype, where SGLang would choose BF16 or FP8."""
        return {}

    module._dsa_kv_cache_dtype_default = cache_in_model_dtype


def _last_rows(module: Module) -> None:
    @stand_in
    def get_last_loc_triton(*rows: Tensor) -> Tensor:
        """SGLang's own torch form of the lookup of each request's last KV row, instead of triton's."""
        return module.get_last_loc_torch(*rows)

    module.get_last_loc_triton = get_last_loc_triton


SPARSE: dict[str, Callable[[Module], None]] = {
    "sglang.srt.layers.attention.dsa.dsa_indexer": _indexer,
    "sglang.srt.arg_groups.model_hook": _capability,
    "sglang.srt.arg_groups.overrides": _cache_dtype,
    "sglang.srt.mem_cache.allocation": _last_rows,
}
"""As `patches.PATCHES`. The last is there because sparse attention sets pages of 64 rows, and what is allocated by pages
needs to know where the last one ends."""
