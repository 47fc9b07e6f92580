# ruff: noqa: ARG001 - the signatures are those of SGLang's kernels
"""The bookkeeping kernels of SGLang's speculative decoding on a CPU, in plain torch, for draft chains (topk 1)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .ledger import stand_in

CHAIN_ONLY = "draft trees (topk > 1) are not covered by the stand-ins"
QUERIES_ONLY = 1  # TreeMaskMode.QLEN_ONLY, SGLang's mode on a CPU


@stand_in
def copy_all_layer_kv_cache_cpu(pointers: Tensor, row_bytes: Tensor, to: Tensor, source: Tensor) -> None:
    """Rows of every layer's KV buffer moved to where the accepted tokens belong.

    Args:
        pointers: [buffers] address of each buffer.
        row_bytes: [buffers] bytes of one row.
        to, source: [rows] row numbers.
    """
    targets, sources = to.tolist(), source.tolist()
    for pointer, size in zip(pointers.tolist(), row_bytes.tolist(), strict=True):
        rows = [ctypes.string_at(pointer + row * size, size) for row in sources]  # read all, then write
        for row, content in zip(targets, rows, strict=True):
            ctypes.memmove(pointer + row * size, content, size)


@stand_in
def assign_draft_cache_locs_contiguous_cpu(
    requests: Tensor, req_to_token: Tensor, seq_lens: Tensor, out: Tensor, pool_len: int, topk: int, steps: int
) -> None:
    """KV rows of the tokens to be drafted: those behind each request's tokens."""
    width = topk * steps
    for i, (request, length) in enumerate(zip(requests.tolist(), seq_lens.tolist(), strict=True)):
        out[i * width : (i + 1) * width] = req_to_token[request, length : length + width].to(out.dtype)


@stand_in
def assign_extend_cache_locs_cpu(
    requests: Tensor, req_to_token: Tensor, first: Tensor, end: Tensor, out: Tensor, pool_len: int
) -> None:
    """KV rows of positions first..end-1 of each request, one request behind the other."""
    at = 0
    for request, s, e in zip(requests.tolist(), first.tolist(), end.tolist(), strict=True):
        out[at : at + e - s] = req_to_token[request, s:e].to(out.dtype)
        at += e - s


@stand_in
def assign_req_to_token_pool_cpu(
    requests: Tensor, req_to_token: Tensor, first: Tensor, end: Tensor, rows: Tensor, pool_len: int
) -> None:
    """Newly allocated KV rows entered for positions first..end-1 of each request."""
    at = 0
    for request, s, e in zip(requests.tolist(), first.tolist(), end.tolist(), strict=True):
        req_to_token[request, s:e] = rows[at : at + e - s].to(req_to_token.dtype)
        at += e - s


@stand_in
def fill_bonus_tokens_cpu(accepted: Tensor, lens: Tensor, bonus: Tensor, stride: int) -> None:
    """The last token that each request gained in a verify step."""
    tokens = accepted.reshape(-1)
    for i, length in enumerate(lens.tolist()):
        bonus[i] = tokens[i * stride + length - 1]


@stand_in
def build_tree_kernel_efficient_cpu(
    parents: Tensor,
    selected: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next: Tensor,
    retrieve_sibling: Tensor,
    topk: int,
    depth: int,
    drafted: int,
    mode: int,
) -> None:
    """The tree to verify, for a chain: positions, successors, and a causal mask.

    Args:
        drafted: tokens to verify a request, the last confirmed one included. All outputs are written in place.
    """
    assert topk == 1, CHAIN_ONLY
    assert int(mode) == QUERIES_ONLY
    requests, steps = seq_lens.numel(), torch.arange(drafted)
    positions.view(requests, drafted).copy_(seq_lens.view(requests, 1) + steps)
    retrieve_index.copy_(torch.arange(requests * drafted).view(requests, drafted))
    retrieve_next.copy_(torch.where(steps + 1 < drafted, steps + 1, -1).expand(requests, drafted))
    retrieve_sibling.fill_(-1)
    causal = torch.ones(drafted, drafted, dtype=torch.bool).tril()
    tree_mask.view(requests, drafted, drafted).copy_(causal.expand(requests, drafted, drafted))


@stand_in
def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Greedy verification: follow the drafts for as long as each is the target's own choice.

    Args:
        predicts: [B * drafted] tokens gained, written where a token was accepted, and the target's own one behind them.
        accept_index: [B, depth + 1] flat index of each accepted token, in place.
        accept_token_num: [B] number of accepted drafts, in place.
        candidates: [B, drafted] the drafts, the last confirmed token first.
        target_predict: [B, drafted] the target's choice behind each of them.
    """
    choice = target_predict.reshape(-1)
    for b in range(candidates.shape[0]):
        node, count = 0, 0
        last = int(retrive_index[b, 0])
        accept_index[b, 0] = last
        while count + 1 < accept_index.shape[1]:
            child = int(retrive_next_token[b, node])
            while child != -1 and int(candidates[b, child]) != int(choice[last]):
                child = int(retrive_next_sibling[b, child])
            if child == -1:
                break
            predicts[last] = choice[last].to(predicts.dtype)
            node, count = child, count + 1
            last = int(retrive_index[b, child])
            accept_index[b, count] = last
        accept_token_num[b] = count
        predicts[last] = choice[last].to(predicts.dtype)


@stand_in
def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, requests: Tensor, seq_lens: Tensor, topk: int, steps: int, pool_len: int
) -> Tensor:
    """The KV rows that each drafted chain sees: its request's, its own drafts' behind them.

    Returns:
        [B * topk, pool_len].
    """
    assert topk == 1, CHAIN_ONLY
    return req_to_token[requests.long()].clone()
