"""KV caches and attention metadata of a built model, made by the functions that vLLM's own model runner uses.

vLLM 0.32.0: `get_kv_cache_spec`, `init_attn_backend`, `init_kv_cache` (vllm/v1/worker/gpu/attn_utils.py), layout and groups as
the engine core resolves them (vllm/v1/engine/core.py, vllm/v1/core/kv_cache_utils.py). None of it knows the device.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec, init_attn_backend, init_kv_cache

MEMORY_BYTES = 1 << 30


@dataclass(frozen=True)
class Step:
    """What one pass adds: `lengths` new tokens behind `cached` ones, for every request. Both [B], int."""

    lengths: tuple[int, ...]
    cached: tuple[int, ...]

    @property
    def positions(self) -> Tensor:
        """position_ids [N] of the new tokens, requests one behind the other."""
        spans = [torch.arange(old, old + new) for new, old in zip(self.lengths, self.cached, strict=True)]
        return torch.cat(spans)

    @property
    def rows(self) -> Tensor:
        """Request of each new token, [N]."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))

    @property
    def last(self) -> Tensor:
        """Index of each request's last new token, [B]."""
        return torch.tensor(self.lengths).cumsum(0) - 1


class Caches:
    """The caches of every attention layer that has been built, for a fixed number of requests.

    Args:
        config: the config that the models were built with; its layers are found through it.
        requests: number of requests.
        max_len: longest sequence.
        device: where the models are.
    """

    def __init__(self, config: VllmConfig, *, requests: int, max_len: int, device: torch.device) -> None:
        self.device = device
        current_platform.update_block_size_for_backend(config)
        specs = get_kv_cache_spec(config)
        layouts = get_supported_kv_cache_layouts(get_current_attn_backends(config))
        resolve_kv_cache_layout(config, [[layout.name for layout in layouts]], specs.values())
        self.config = get_kv_cache_configs(config, [specs], [MEMORY_BYTES])[0]
        with set_current_vllm_config(config):
            self.groups, _, kernel_blocks = init_attn_backend(self.config, config, device)
            layers = config.compilation_config.static_forward_context
            every = [group for groups in self.groups for group in groups]
            init_kv_cache(layers, self.config, device, kernel_blocks, config, attn_groups=every)
        self.tables = self._block_tables(requests, max_len)

    def _block_tables(self, requests: int, max_len: int) -> list[Tensor]:
        """Blocks [B, *] of every cache group. Groups lie over the same bytes, so no two share a block; vLLM keeps block 0."""
        tables: list[Tensor] = []
        first = 1
        for group in self.config.kv_cache_groups:
            spec = group.kv_cache_spec
            columns = -(-max_len // spec.block_size) + getattr(spec, "num_speculative_blocks", 0)
            blocks = torch.arange(first, first + requests * columns, dtype=torch.int32, device=self.device)
            tables.append(blocks.view(requests, columns))
            first += requests * columns
        if first > self.config.num_blocks:
            raise RuntimeError(
                f"{first} cache blocks are needed, {self.config.num_blocks} fit into {MEMORY_BYTES} bytes"
            )
        return tables

    def metadata(
        self, step: Step, names: Collection[str], *, draft_index: int | None
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Attention metadata and slots of the named layers for one pass.

        Args:
            step: the new tokens.
            names: layers that run.
            draft_index: the drafter's pass (0 for its first), None for the target.
        """
        metadata: dict[str, Any] = {}
        slots: dict[str, Tensor] = {}
        for gid, groups in enumerate(self.groups):
            common = self._common(step, gid)
            for group in groups:
                layers = [name for name in group.layer_names if name in names]
                if not layers:
                    continue
                built = (
                    group.build_metadata(common)
                    if draft_index is None
                    else group.build_metadata_for_drafting(common, draft_index)
                )
                metadata |= dict.fromkeys(layers, built)
                slots |= dict.fromkeys(layers, common.slot_mapping)
        return metadata, slots

    def _common(self, step: Step, gid: int) -> CommonAttentionMetadata:
        lengths = torch.tensor(step.lengths, dtype=torch.int32)
        totals = lengths + torch.tensor(step.cached, dtype=torch.int32)
        starts = torch.zeros(len(step.lengths) + 1, dtype=torch.int32)
        starts[1:] = lengths.cumsum(0)
        positions = step.positions
        block_size = self.config.kv_cache_groups[gid].kv_cache_spec.block_size
        table = self.tables[gid]
        blocks = table.cpu()[step.rows, positions // block_size].long()
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=totals.to(self.device),
            seq_lens_cpu_upper_bound=totals,
            num_reqs=len(step.lengths),
            num_actual_tokens=int(lengths.sum()),
            max_query_len=int(lengths.max()),
            max_seq_len=int(totals.max()),
            block_table_tensor=table,
            slot_mapping=(blocks * block_size + positions % block_size).to(self.device),
            causal=True,
            positions=positions.to(self.device),
            is_prefilling=torch.tensor([old == 0 for old in step.cached]),
        )
