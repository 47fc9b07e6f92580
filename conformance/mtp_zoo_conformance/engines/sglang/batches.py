"""Batches for SGLang's model runners, made by hand: fresh requests whose KV rows are known beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.eagle_info import EagleDraftInput
from torch import Tensor

PAGE = 64
"""Requests start at multiples of this: no attention backend of SGLang has larger pages."""


@dataclass(frozen=True)
class Layout:
    """Where requests lie.

    Attributes:
        lengths: tokens of each request.
        room: rows behind them for drafts.
    """

    lengths: tuple[int, ...]
    room: int

    @property
    def first_rows(self) -> list[int]:
        """First KV row of each request; the first page is SGLang's padding."""
        rows, at = [], PAGE
        for length in self.lengths:
            rows.append(at)
            at += -(-(length + self.room) // PAGE) * PAGE
        return rows

    @property
    def kv_rows(self) -> int:
        """Rows that the KV cache must have."""
        last = -(-(self.lengths[-1] + self.room) // PAGE) * PAGE
        return self.first_rows[-1] + last

    @property
    def requests(self) -> Tensor:
        """[B] rows of `req_to_token`; row 0 is SGLang's padding."""
        return torch.arange(1, len(self.lengths) + 1)

    @property
    def last(self) -> list[int]:
        """Index of each request's last token among all tokens."""
        return (torch.tensor(self.lengths).cumsum(0) - 1).tolist()

    def rows(self, *, first: Sequence[int], count: Sequence[int]) -> Tensor:
        """KV rows of `count` positions from `first` on, one request behind the other."""
        spans = zip(self.first_rows, first, count, strict=True)
        return torch.cat([torch.arange(start + f, start + f + n) for start, f, n in spans])

    def enter(self, runner: Any) -> None:
        """Enter the requests in the runner's pools, linear attention's states at zero."""
        pool = runner.req_to_token_pool
        for request, (row, length) in enumerate(zip(self.first_rows, self.lengths, strict=True), start=1):
            rows = torch.arange(row, row + length + self.room)
            pool.req_to_token[request, : len(rows)] = rows.to(pool.req_to_token)
        states = getattr(pool, "req_index_to_mamba_index_mapping", None)
        if states is not None:
            states[1 : len(self.lengths) + 1] = self.requests.to(states)
            cache = pool.mamba_pool.mamba_cache
            for state in (cache.temporal, *cache.conv):
                state.zero_()


def extend_batch(runner: Any, layout: Layout, ids: Tensor, spec_info: Any = None) -> ForwardBatch:
    """All requests from their first token on, in one ragged batch; the states of all tokens are kept.

    Args:
        runner: SGLang's model runner.
        layout: the requests, entered before.
        ids: [N] tokens.
        spec_info: the draft's input.
    """
    lengths = list(layout.lengths)
    device, zeros = runner.device, [0] * len(lengths)
    lens = torch.tensor(lengths, device=device)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(lengths),
        input_ids=ids.to(device),
        req_pool_indices=layout.requests.to(device),
        seq_lens=lens,
        seq_lens_sum=sum(lengths),
        seq_lens_cpu=lens.cpu(),
        orig_seq_lens=lens.int(),
        out_cache_loc=layout.rows(first=zeros, count=lengths).to(device),
        positions=positions,
        extend_num_tokens=sum(lengths),
        extend_seq_lens=lens.int(),
        extend_prefix_lens=torch.zeros_like(lens).int(),
        extend_start_loc=(lens.cumsum(0) - lens).int(),
        extend_prefix_lens_cpu=zeros,
        extend_seq_lens_cpu=lengths,
        extend_logprob_start_lens_cpu=zeros,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        spec_algorithm=runner.spec_algorithm,
        spec_info=spec_info,
        return_logprob=False,
    )
    batch.mrope_positions = positions.expand(
        3, -1
    ).contiguous()  # a text token has the same position in every dimension
    return batch


def chain_batch(runner: Any, layout: Layout, drafts: Tensor, states: Tensor) -> ForwardBatch:
    """The batch that SGLang's draft loop goes on with behind a prefill (`prepare_for_draft`, eagle_worker_common.py).

    Args:
        runner: the draft's model runner.
        layout: the requests; `room` is the number of steps.
        drafts: [B] the first draft of each request.
        states: [B,H] the state that SGLang recycles from the prefill, in its dtype.
    """
    requests, device = len(layout.lengths), runner.device
    lens = torch.tensor(layout.lengths, device=device)
    rows = layout.rows(first=layout.lengths, count=[layout.room] * requests)
    spec_info = EagleDraftInput(
        topk_p=torch.ones(requests, 1, device=device),
        topk_index=drafts[:, None],
        hidden_states=states,
        bonus_tokens=drafts,
        num_tokens_per_req=1,
        num_tokens_for_logprob_per_req=1,
    )
    spec_info.positions = lens.clone()
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=requests,
        input_ids=drafts,
        req_pool_indices=layout.requests.to(device),
        seq_lens=lens,
        seq_lens_sum=sum(layout.lengths),
        seq_lens_cpu=lens.cpu(),
        orig_seq_lens=lens.int(),
        out_cache_loc=rows.to(device),
        positions=lens.clone(),
        capture_hidden_mode=CaptureHiddenMode.LAST,
        spec_algorithm=runner.spec_algorithm,
        spec_info=spec_info,
        return_logprob=False,
    )
    batch.mrope_positions = lens.expand(3, -1).contiguous()
    return batch
