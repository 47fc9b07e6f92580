"""The stand-ins of SGLang's kernels, against torch, transformers and naive loops. None of it needs SGLang."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5RMSNorm,
    Qwen3_5RMSNormGated,
    torch_chunk_gated_delta_rule,
)

from tests.conformance.sglang_files import shim

attention, delta_rule, ledger = shim("attention"), shim("delta_rule"), shim("ledger")
norms, speculation, importing, patches = shim("norms"), shim("speculation"), shim("importing"), shim("patches")

EXACT = {"atol": 1e-5, "rtol": 1e-5}
ROOM = 16
"""Positions that a request has in `req_to_token`."""


def rand(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Cache:
    """A KV pool in which requests lie scattered, as SGLang's allocator leaves them."""

    def __init__(self, lengths: tuple[int, ...], *, heads: int = 2, size: int = 8) -> None:
        rows = torch.randperm(len(lengths) * ROOM, generator=torch.Generator().manual_seed(3))
        self.lengths = lengths
        self.req_to_token = rows.view(len(lengths), ROOM).int()
        self.keys, self.values = rand(len(rows), heads, size, seed=4), rand(len(rows), heads, size, seed=5)

    def of(self, request: int, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a request's first tokens."""
        rows = self.req_to_token[request, :count].long()
        return self.keys[rows], self.values[rows]


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """torch's attention: q [Tq, heads, D], k and v [Tk, kv heads, D], mask [Tq, Tk]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def causal(new: int, whole: int, window: int) -> Tensor:
    """What the last `new` of `whole` tokens see."""
    mask = torch.ones(new, whole, dtype=torch.bool).tril(whole - new)
    return mask.triu(whole - new - window + 1) if window else mask


@pytest.mark.parametrize("window", [0, 3])
def test_extend_attention_sees_the_cache_and_itself(window: int) -> None:
    cache, whole, new = Cache((9, 5, 7)), (9, 5, 7), (4, 5, 1)  # behind a prefix; from the first token on; one token
    q, k, v = rand(sum(new), 4, 8), rand(sum(new), 2, 8, seed=1), rand(sum(new), 2, 8, seed=2)
    starts = torch.tensor([0, 4, 9])
    out = torch.full((sum(new), 4, 8), torch.nan)
    attention.extend_attention_cpu(
        q, k, v, out, cache.keys, cache.values, 1.0, 1.0, cache.req_to_token, torch.arange(3), torch.tensor(whole),
        torch.tensor(new), starts, 5, 8**-0.5, 0.0, False, window, None, None, None, True,
    )  # fmt: skip
    for request, start in enumerate(starts.tolist()):
        rows = slice(start, start + new[request])
        past_k, past_v = cache.of(request, whole[request] - new[request])
        keys, values = torch.cat((past_k, k[rows])), torch.cat((past_v, v[rows]))
        want = sdpa(q[rows], keys, values, causal(new[request], whole[request], window))
        torch.testing.assert_close(out[rows], want, **EXACT)


@pytest.mark.parametrize("window", [0, 3])
def test_decode_attention_puts_the_token_into_the_cache_first(window: int) -> None:
    cache, whole = Cache((9, 5)), (9, 5)
    slots = torch.stack([cache.req_to_token[i, n - 1] for i, n in enumerate(whole)])
    q, k, v, out = rand(2, 4, 8), rand(2, 2, 8, seed=1), rand(2, 2, 8, seed=2), torch.full((2, 4, 8), torch.nan)
    attention.decode_attention_cpu(
        q, cache.keys, cache.values, 1.0, 1.0, out, k, v, slots, torch.empty(0), cache.req_to_token, torch.arange(2),
        torch.tensor(whole), 8**-0.5, 0.0, False, window, None, None,
    )  # fmt: skip
    for request, count in enumerate(whole):
        keys, values = cache.of(request, count)
        assert keys[-1].equal(k[request])
        want = sdpa(q[request : request + 1], keys, values, causal(1, count, window))
        torch.testing.assert_close(out[request : request + 1], want, **EXACT)


def test_a_sink_takes_probability_and_gives_nothing() -> None:
    q, k, v, sinks = rand(3, 2, 8), rand(5, 2, 8, seed=1), rand(5, 2, 8, seed=2), rand(2, seed=3)
    seen = torch.ones(3, 5, dtype=torch.bool)
    padded_k, padded_v = torch.cat((torch.zeros(1, 2, 8), k)), torch.cat((torch.zeros(1, 2, 8), v))
    bias = torch.zeros(2, 3, 6)
    bias[:, :, 0] = sinks[:, None]
    want = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, padded_k, padded_v)), attn_mask=bias)
    got = attention.attend(q, k, v, seen, scale=8**-0.5, sinks=sinks)
    torch.testing.assert_close(got, want.transpose(0, 1), **EXACT)


def test_queries_and_keys_are_normed_and_the_gate_is_split_off() -> None:
    heads, kv_heads, size = 4, 2, 8
    q_gate, k = rand(3, heads * 2 * size), rand(3, kv_heads * size, seed=1)
    q_norm, k_norm = Qwen3_5RMSNorm(size), Qwen3_5RMSNorm(size)
    q_norm.weight.data, k_norm.weight.data = rand(size, seed=2), rand(size, seed=3)
    q, gate = q_gate.view(3, heads, 2 * size).chunk(2, -1)
    got = norms.fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_norm.weight, k_norm.weight, 1e-6, size, heads)
    want = (q_norm(q).reshape(-1, size), k_norm(k.view(-1, size)), gate.reshape(-1, size))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


def test_the_gated_norm_is_that_of_transformers() -> None:
    norm = Qwen3_5RMSNormGated(8, eps=1e-6)
    norm.weight.data = rand(8, seed=2)
    x, z = rand(5, 8), rand(5, 8, seed=1)
    torch.testing.assert_close(norms.fused_rmsnorm_gated_cpu(x, norm.weight, z, 1e-6), norm(x, z), **EXACT)


def test_the_output_gate_works_in_place() -> None:
    x, gate = rand(3, 8), rand(6, 4, seed=1)
    want = x * gate.view(3, 8).sigmoid()
    norms.fused_sigmoid_mul_cpu(x, gate)
    torch.testing.assert_close(x, want)


class Linear:
    """Random inputs of two requests' linear attention, and what transformers makes of each from an empty state."""

    lengths, key_heads, value_heads, size = (11, 6), 2, 4, 8

    def __init__(self) -> None:
        tokens = sum(self.lengths)
        self.q, self.k = rand(1, tokens, self.key_heads, self.size), rand(1, tokens, self.key_heads, self.size, seed=1)
        self.v = rand(1, tokens, self.value_heads, self.size, seed=2)
        self.a, self.b = rand(tokens, self.value_heads, seed=3), rand(tokens, self.value_heads, seed=4)
        self.a_log, self.dt_bias = rand(self.value_heads, seed=5), rand(self.value_heads, seed=6)
        self.g, self.beta = delta_rule.fused_gdn_gating_cpu(self.a_log, self.a, self.b, self.dt_bias)
        self.starts = torch.tensor([0, *torch.tensor(self.lengths).cumsum(0).tolist()])
        self.slots = torch.tensor([2, 1])

    def states(self) -> Tensor:
        """An empty pool."""
        return torch.zeros(3, self.value_heads, self.size, self.size)

    def expected(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(tokens, outputs, last state [value heads, V, K]) of each request."""
        repeat = self.value_heads // self.key_heads
        for first, end in zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True):
            rows = slice(first, end)
            q, k = (x[:, rows].repeat_interleave(repeat, 2) for x in (self.q, self.k))
            rest = (self.v[:, rows], self.g[:, rows], self.beta[:, rows])
            out, state = torch_chunk_gated_delta_rule(
                q, k, *rest, initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True
            )
            yield rows, out[0], state[0].transpose(-1, -2)

    def prefill(self, states: Tensor) -> Tensor:
        """Outputs [1, N, value heads, V] of all tokens; the pool gets the last states."""
        rest = (states, self.starts, False, True, self.slots)
        return delta_rule.chunk_gated_delta_rule_cpu(self.q, self.k, self.v, self.g, self.beta, *rest)[0]

    def updated(self, rows: slice, states: Tensor, slot: int, **options: object) -> Tensor:
        """Outputs of some tokens of one request, given to the kernel for decoding and verifying."""
        count = rows.stop - rows.start
        return delta_rule.fused_sigmoid_gating_delta_rule_update_cpu(
            self.a_log, self.dt_bias, self.q[:, rows], self.k[:, rows], self.v[:, rows], self.a[rows], self.b[rows],
            states, torch.tensor([slot]), torch.tensor([0, count]), **options,
        )[0]  # fmt: skip


def test_the_delta_rule_is_that_of_transformers() -> None:
    linear = Linear()
    states = linear.states()
    out = linear.prefill(states)
    for number, (rows, want, state) in enumerate(linear.expected()):
        torch.testing.assert_close(out[0, rows], want, **EXACT)
        torch.testing.assert_close(states[linear.slots[number]], state, **EXACT)


def test_token_by_token_the_delta_rule_is_the_same() -> None:
    linear = Linear()
    want = linear.prefill(linear.states())[0]
    states = linear.states()
    got = [linear.updated(slice(t, t + 1), states, 2) for t in range(linear.lengths[0])]
    torch.testing.assert_close(torch.cat(got), want[: linear.lengths[0]], **EXACT)


def test_a_verify_pass_keeps_every_state_and_leaves_the_pool() -> None:
    linear, drafts = Linear(), slice(4, 8)
    states = linear.states()
    linear.updated(slice(0, 4), states, 2)
    before, steps = states.clone(), torch.full((1, 4, *states.shape[1:]), torch.nan)
    options = {"intermediate_states_buffer": steps, "intermediate_state_indices": torch.tensor([0])}
    linear.updated(drafts, states, 2, disable_state_update=True, **options)
    assert states.equal(before)
    for step, t in enumerate(range(4, 8)):
        linear.updated(slice(t, t + 1), states, 2)
        torch.testing.assert_close(steps[0, step], states[2], **EXACT)


CHANNELS, WIDTH = 6, 4


def convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Causal convolution of one sequence [channels, T], nothing before it."""
    return F.silu(F.conv1d(F.pad(x, (WIDTH - 1, 0))[None], weight[:, None], bias, groups=CHANNELS)[0])


def test_the_convolution_goes_on_from_its_window() -> None:
    weight, bias, x = rand(CHANNELS, WIDTH, seed=1), rand(CHANNELS, seed=2), rand(CHANNELS, 9)
    windows, slots = rand(3, CHANNELS, WIDTH - 1, seed=3), torch.tensor([2])
    want = convolved(x, weight, bias)
    fresh, going_on = torch.tensor([False]), torch.tensor([True])

    def prefill(part: Tensor, has_window: Tensor) -> Tensor:
        starts = torch.tensor([0, part.shape[1]])
        return delta_rule.causal_conv1d_fn_cpu(part, weight, bias, "silu", windows, has_window, slots, starts, None)

    torch.testing.assert_close(prefill(x[:, :5], fresh), want[:, :5], **EXACT)
    torch.testing.assert_close(prefill(x[:, 5:7], going_on), want[:, 5:7], **EXACT)
    one = delta_rule.causal_conv1d_update_cpu(x[:, 7][None], windows, weight, bias, "silu", slots)
    torch.testing.assert_close(one[0], want[:, 7], **EXACT)


def test_a_verify_pass_keeps_every_window() -> None:
    weight, bias, x = rand(CHANNELS, WIDTH, seed=1), rand(CHANNELS, seed=2), rand(CHANNELS, 3)
    windows, steps = torch.zeros(2, CHANNELS, WIDTH - 1), torch.full((1, 3, CHANNELS, WIDTH - 1), torch.nan)
    slots, rows = torch.tensor([1]), torch.tensor([0])
    out = delta_rule.causal_conv1d_update_cpu(x[None], windows, weight, bias, "silu", slots, steps, rows)
    torch.testing.assert_close(out[0], convolved(x, weight, bias), **EXACT)
    assert windows.count_nonzero() == 0
    assert steps[0, 2].equal(x)
    assert steps[0, 0].equal(F.pad(x[:, :1], (WIDTH - 2, 0)))


def test_fused_projections_are_split_as_they_were_joined() -> None:
    parts = [rand(3, n, seed=n) for n in (16, 16, 32, 32)]
    b, a = rand(3, 4, seed=1), rand(3, 4, seed=2)
    split = delta_rule.fused_qkvzba_split_reshape_cat_contiguous_cpu
    qkv, z, got_b, got_a = split(torch.cat(parts, -1), torch.cat((b, a), -1), 2, 4, 8, 8)
    assert qkv.equal(torch.cat(parts[:3], -1))
    assert z.equal(parts[3].view(3, 4, 8))
    assert got_b.equal(b)
    assert got_a.equal(a)


def verified(candidates: list[list[int]], choices: list[list[int]]) -> tuple[list[int], list[list[int]], list[int]]:
    """(accepted drafts, flat indices of what was accepted, tokens gained) of chains that a target judged."""
    requests, drafted = len(candidates), len(candidates[0])
    index, successor = torch.empty(requests, drafted).long(), torch.empty(requests, drafted).long()
    sibling, positions = torch.empty(requests, drafted).long(), torch.empty(requests * drafted).long()
    mask = torch.zeros(requests * drafted * drafted, dtype=torch.bool)
    lens = torch.full((requests,), 7)
    speculation.build_tree_kernel_efficient_cpu(
        None, None, lens, mask, positions, index, successor, sibling, 1, drafted - 1, drafted, speculation.QUERIES_ONLY
    )
    assert positions.view(requests, drafted)[0].tolist() == [7 + i for i in range(drafted)]
    assert mask.view(requests, drafted, drafted)[0].equal(torch.ones(drafted, drafted, dtype=torch.bool).tril())
    gained, accepted = torch.full((requests * drafted,), -1), torch.full((requests, drafted), -1)
    count = torch.full((requests,), -1)
    tokens, target = torch.tensor(candidates), torch.tensor(choices)
    speculation.verify_tree_greedy_cpu(gained, accepted, count, tokens, index, successor, sibling, target)
    return count.tolist(), accepted.tolist(), gained.tolist()


def test_verification_follows_the_drafts_while_they_are_right() -> None:
    candidates = [[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]]
    choices = [[6, 7, 8, 9], [6, 1, 8, 9], [2, 7, 8, 9]]  # all right; the second wrong; the first wrong
    count, accepted, gained = verified(candidates, choices)
    assert count == [3, 1, 0]
    assert accepted == [[0, 1, 2, 3], [4, 5, -1, -1], [8, -1, -1, -1]]
    assert gained == [6, 7, 8, 9, 6, 1, -1, -1, 2, -1, -1, -1]


def test_draft_trees_are_refused() -> None:
    with pytest.raises(AssertionError, match="draft trees"):
        speculation.build_draft_decode_metadata_cpu(torch.zeros(1, 4), torch.tensor([0]), torch.tensor([1]), 2, 3, 4)


def test_rows_of_the_cache_are_those_of_the_positions_asked_for() -> None:
    table, requests = torch.arange(3 * 8).view(3, 8).int(), torch.tensor([2, 1])
    first, end = torch.tensor([1, 4]), torch.tensor([3, 5])
    out = torch.empty(3).long()
    speculation.assign_extend_cache_locs_cpu(requests, table, first, end, out, 8)
    assert out.tolist() == [17, 18, 12]
    drafts = torch.empty(4).long()
    speculation.assign_draft_cache_locs_contiguous_cpu(requests, table, first, drafts, 8, 1, 2)
    assert drafts.tolist() == [17, 18, 12, 13]
    speculation.assign_req_to_token_pool_cpu(requests, table, first, end, torch.tensor([90, 91, 92]), 8)
    assert table[2, 1:3].tolist() == [90, 91]
    assert table[1, 4].item() == 92


def test_moved_cache_rows_are_read_before_any_is_written() -> None:
    buffers = [rand(6, 2, 4, seed=seed) for seed in (1, 2)]
    want = [buffer.clone() for buffer in buffers]
    to, source = torch.tensor([2, 3]), torch.tensor([3, 4])
    for buffer in want:
        buffer[to] = buffer[source].clone()
    pointers = torch.tensor([buffer.data_ptr() for buffer in buffers])
    speculation.copy_all_layer_kv_cache_cpu(pointers, torch.tensor([32, 32]), to, source)
    assert all(one.equal(other) for one, other in zip(buffers, want, strict=True))


def test_the_last_gained_token_is_found_behind_the_accepted_ones() -> None:
    bonus = torch.empty(2).long()
    speculation.fill_bonus_tokens_cpu(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([3, 1]), bonus, 3)
    assert bonus.tolist() == [3, 4]


def test_what_is_called_is_noted_once_in_the_jobs_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "shims.log"
    monkeypatch.setenv(ledger.LOG, str(file))
    for _ in range(2):
        norms.fused_sigmoid_mul_cpu(rand(1, 4), rand(1, 4))
    assert ledger.used(file) == ["fused_sigmoid_mul_cpu: Attention's output gate: x times sigmoid(gate), in place"]
    assert file.read_text(encoding="utf-8").count("\n") == 1
    assert ledger.used(tmp_path / "none.log") == []


def test_every_stand_in_says_what_it_does() -> None:
    for module in (attention, delta_rule, norms, speculation):
        for name, body in ledger.bodies(vars(module)).items():
            assert body.__doc__, name
            assert hasattr(body, "__wrapped__"), f"{name} is not noted when it is called"


def test_a_kernel_without_stand_in_raises_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, importing.KernelPackage()])
    kernels = importlib.import_module("sgl_kernel")
    linear = importlib.import_module("sgl_kernel.mamba")
    try:
        assert kernels.verify_tree_greedy_cpu is speculation.verify_tree_greedy_cpu
        assert linear.causal_conv1d_fn_cpu is delta_rule.causal_conv1d_fn_cpu
        with pytest.raises(NotImplementedError, match=r"sgl_kernel\.gelu_and_mul has no CPU build"):
            kernels.gelu_and_mul(1)
    finally:
        for name in ("sgl_kernel", "sgl_kernel.mamba"):
            del sys.modules[name]


def test_an_operator_without_stand_in_is_missing() -> None:
    operators = importing.Operators()
    assert operators.extend_attention_cpu is attention.extend_attention_cpu
    assert not hasattr(operators, "fused_experts_cpu")


def test_a_module_is_patched_right_after_its_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "patched_sample.py").write_text("value = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))

    def patch(module: object) -> None:
        vars(module)["value"] += 1

    monkeypatch.setattr(sys, "meta_path", [importing.AfterImport({"patched_sample": patch}), *sys.meta_path])
    assert importlib.import_module("patched_sample").value == 2


def test_accepted_states_go_back_to_their_requests() -> None:
    class Module:
        pass

    module = Module()
    patches.PATCHES["sglang.kernels.ops.mamba.mamba_state_scatter_triton"](module)
    to, steps = torch.zeros(2, 4, 3), rand(2, 3, 5, 3)  # layers, slots, ..; layers, requests, steps, ..
    vars(module)["fused_mamba_state_scatter_with_mask"](to, steps, torch.tensor([3, 1, 0]), torch.tensor([2, 4, -1]))
    assert to[:, 3].equal(steps[:, 0, 2])
    assert to[:, 1].equal(steps[:, 1, 4])
    assert to[:, 0].count_nonzero() == 0


class Indexer:
    """What the stand-in reads of SGLang's indexer; SGLang calls it with names, some models with positional states."""

    index_topk = 8

    def forward(self) -> None:
        """SGLang's own, which needs a GPU."""
        raise AssertionError


def patched_indexer() -> Indexer:
    """An indexer of a module that was patched as SGLang's is."""
    module = SimpleNamespace(Indexer=type("Indexer", (Indexer,), {}))
    patches.PATCHES["sglang.srt.layers.attention.dsa.dsa_indexer"](module)
    return module.Indexer()


def select(indexer: Any, positions: list[int]) -> object:
    """A call as SGLang makes it."""
    x = rand(len(positions), 4)
    return indexer.forward(x, x, positions=torch.tensor(positions).long(), forward_batch=None, layer_id=0)


def test_the_indexer_selects_a_context_of_index_topk_whole() -> None:
    assert select(patched_indexer(), [0, 1, 2, 3, 0, 7]) is None
    assert select(patched_indexer(), []) is None


def test_the_indexer_refuses_a_longer_context() -> None:
    with pytest.raises(NotImplementedError, match=r"a context of 9 tokens is longer than index_topk 8"):
        select(patched_indexer(), [3, 8, 0])


def test_sparse_attention_sets_up_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", torch.cuda.get_device_capability)
    patches.PATCHES["sglang.srt.arg_groups.model_hook"](SimpleNamespace())
    assert torch.cuda.get_device_capability() == (0, 0)
    overrides = SimpleNamespace()
    patches.PATCHES["sglang.srt.arg_groups.overrides"](overrides)
    assert overrides._dsa_kv_cache_dtype_default(SimpleNamespace(kv_cache_dtype="auto")) == {}


def test_the_last_row_is_found_by_sglangs_own_torch_form() -> None:
    def get_last_loc_torch(*rows: Tensor) -> Tensor:
        return torch.stack(rows)

    module = SimpleNamespace(get_last_loc_torch=get_last_loc_torch)
    patches.PATCHES["sglang.srt.mem_cache.allocation"](module)
    table, requests, prefix = rand(2, 3), rand(2, 3, seed=1), rand(2, 3, seed=2)
    assert module.get_last_loc_triton(table, requests, prefix).equal(torch.stack((table, requests, prefix)))
