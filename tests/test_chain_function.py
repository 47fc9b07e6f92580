"""The chain's softmax against a plain one over the same keys: groups of heads, sinks, dtypes, documents, what it saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mtp_zoo.batch import TokenBatch
from mtp_zoo.chain_attention import ChainState, chain_attention, register_attention
from mtp_zoo.chain_function import ChainFunction
from mtp_zoo.document_groups import Group, Stretch, _by_length, group_documents
from mtp_zoo.errors import UnsupportedAttentionError

CPU = torch.device("cpu")

FP32 = 2e-6
"""Outputs of size 1; sums over up to 1,024 keys in another order (6e-7 seen)."""

STATISTICS = 1e-5
"""The log-sum-exp of a thousand scores in FP32."""

BF16_GRADIENT = 0.006
"""Relative to the norm: inputs and gradient are rounded to 8 bits, sums are not (0.004 seen; 0.04 with sums in BF16)."""

SAVED = 1.3
"""Saved bytes over the least possible: query, output, and each key and value once."""


class Layer:
    """What `chain_attention` needs to know of a layer."""

    layer_idx = 0


def tensors(
    *shape: int, count: int, dtype: torch.dtype = torch.float32, seed: int = 0, grad: bool = False
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]
    return [each.requires_grad_(grad) for each in made]


def documents_of(*lengths: int) -> TokenBatch:
    return TokenBatch.from_rows([[([1] * length, [True] * length) for length in lengths]])


def plain(query: Tensor, sinks: Tensor | None, doc_ids: Tensor, scale: float, pairs: list[Tensor]) -> Tensor:
    """The same softmax with every score in one matrix."""
    groups = query.shape[1] // pairs[0].shape[1]
    key, value, *own = (each.repeat_interleave(groups, dim=1) for each in pairs)
    seen = (doc_ids[:, None, :, None] == doc_ids[:, None, None, :]).tril()
    scores = [(query @ key.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf)]
    scores += [(query * each).sum(-1, keepdim=True) * scale for each in own[::2]]
    if sinks is not None:
        scores.append(sinks[None, :, None, None].expand(*query.shape[:3], 1))
    weights = torch.cat(scores, dim=-1).softmax(-1)
    out = weights[..., : key.shape[2]] @ value
    for place, each in enumerate(own[1::2], start=key.shape[2]):
        out = out + weights[..., place, None] * each
    return out


def run(tokens: TokenBatch, query: Tensor, sinks: Tensor | None, *pairs: Tensor, views: bool = True) -> Tensor:
    documents = group_documents(tokens.segments, tokens.shape, CPU) if views else padded_groups(tokens)
    return ChainFunction.apply(query, sinks, documents, 0.3, None, *pairs)


@pytest.mark.parametrize("views", [False, True], ids=["groups", "views"])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("lengths", [(7,), (3, 2, 1, 1)], ids=["one document", "four"])
def test_gradients_are_those_of_finite_differences(lengths: tuple[int, ...], sinks: bool, views: bool) -> None:
    tokens = documents_of(*lengths)
    (query,) = tensors(1, 4, 7, 3, count=1, dtype=torch.float64, grad=True)
    pairs = tensors(1, 2, 7, 3, count=6, dtype=torch.float64, seed=1, grad=True)
    extra = tensors(4, count=1, dtype=torch.float64, seed=2, grad=True) if sinks else [None]
    assert torch.autograd.gradcheck(lambda q, s, *rest: run(tokens, q, s, *rest, views=views), (query, *extra, *pairs))


@pytest.mark.parametrize("widths", [(8, 8), (12, 8), (8, 12)], ids=["equal", "latent", "wide values"])
@pytest.mark.parametrize("own", [0, 2])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("views", [False, True], ids=["groups", "views"])
def test_the_chain_equals_one_softmax_over_all_keys(
    widths: tuple[int, int], own: int, sinks: bool, views: bool
) -> None:
    tokens = documents_of(40, 31, 17, 17, 9, 1)
    seq, (keys, values) = tokens.shape[1], widths
    (query,) = tensors(1, 6, seq, keys, count=1)
    pairs = [tensors(1, 3, seq, (keys, values)[n % 2], count=1, seed=9 + n)[0] for n in range(2 + 2 * own)]
    extra = tensors(6, count=1, seed=3)[0] if sinks else None
    inputs = [each.requires_grad_() for each in (query, *pairs, *([] if extra is None else [extra]))]
    weight = tensors(1, 6, seq, values, count=1, seed=4)[0]
    found, expected = (
        (way, torch.autograd.grad((way * weight).sum(), inputs))
        for way in (run(tokens, query, extra, *pairs, views=views), plain(query, extra, tokens.doc_ids, 0.3, pairs))
    )
    torch.testing.assert_close(found[0], expected[0], atol=FP32, rtol=0)
    for ours, theirs in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(ours, theirs, atol=FP32 * 10 * float(theirs.abs().max()), rtol=0)


def test_statistics_are_fp32_under_autocast() -> None:
    """Weights, merges and sums of a BF16 autocast context; the inputs alone are BF16."""
    tokens = documents_of(1024)
    query, *pairs = tensors(1, 2, 1024, 64, count=5, dtype=torch.bfloat16, grad=True)
    saved: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        out = run(tokens, query, None, *pairs)
    wide = [each.detach().double() for each in (query, *pairs)]
    scores = (wide[0] @ wide[1].transpose(-1, -2) * 0.3).masked_fill(~torch.ones(1024, 1024).bool().tril(), -torch.inf)
    lse = torch.logsumexp(torch.cat([scores, (wide[0] * wide[3]).sum(-1, keepdim=True) * 0.3], dim=-1), dim=-1)
    (found,) = (each for each in saved if each.dtype == torch.float32)
    torch.testing.assert_close(found.double(), lse, atol=STATISTICS, rtol=0)
    weight = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, [query], weight)
    leaves = [each.requires_grad_() for each in wide]
    reference = plain(leaves[0], None, tokens.doc_ids, 0.3, leaves[1:])
    (exact,) = torch.autograd.grad(reference, [leaves[0]], weight.double())
    assert float((grad.double() - exact).norm() / exact.norm()) < BF16_GRADIENT


@pytest.mark.parametrize("depths", [1, 3, 8])
def test_what_is_saved_grows_with_depths_and_not_with_their_square(depths: int) -> None:
    batch, heads, key_heads, seq, width = 1, 8, 1, 128, 16
    tokens, storages = documents_of(seq), {}
    register_attention()

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    state, outs = ChainState(tokens.segments), []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        for depth in range(1, depths + 1):
            (query,) = tensors(batch, heads, seq, width, count=1, seed=depth, grad=True)
            key, value = tensors(batch, key_heads, seq, width, count=2, seed=depth + 20, grad=True)
            outs.append(chain_attention(Layer(), query, key, value, None, mtp_chain=state.at(depth))[0])
    least = 4 * depths * batch * seq * width * (2 * heads + 2 * key_heads)
    assert sum(storages.values()) <= SAVED * least


def test_a_second_derivative_is_refused() -> None:
    query, *pairs = tensors(1, 2, 4, 3, count=3, grad=True)
    (grad,) = torch.autograd.grad(run(documents_of(4), query, None, *pairs).square().sum(), [query], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def padded_groups(tokens: TokenBatch) -> list[Group]:
    """What an accelerator is given, with its indices on the CPU."""
    spans = [(row, each.start, each.stop) for each in tokens.segments for row in each.rows]
    return [Group(group, tokens.shape[1], CPU) for group in _by_length(spans)]


def test_many_documents_are_few_kernel_calls_on_an_accelerator() -> None:
    tokens = documents_of(*range(1, 60))
    assert len(group_documents(tokens.segments, tokens.shape, torch.device("meta"))) <= 11
    assert len(group_documents(tokens.segments, tokens.shape, CPU)) == len(tokens.segments) == 59
    values = torch.arange(float(tokens.shape[1]))[None, None, :, None]
    out = torch.full((1, tokens.shape[1], 1, 1), -1.0).transpose(1, 2)
    for each in padded_groups(tokens):
        each.put_(out, each.take(values))
    assert torch.equal(out, values)


def test_groups_are_rows_of_one_document_each() -> None:
    """Documents of 2, 3 and 1 tokens in slots 0-1, 2-4, 5."""
    tokens = documents_of(2, 3, 1)
    values = torch.arange(10.0, 16.0)[None, None, :, None]
    taken = [each.take(values)[:, 0, :, 0].tolist() for each in padded_groups(tokens)]
    assert taken == [[[12.0, 13.0, 14.0], [10.0, 11.0, 0.0]], [[15.0]]]
    assert isinstance(group_documents(documents_of(6).segments, (1, 6), CPU)[0], Stretch)
    views = [each.take(values)[:, 0, :, 0].tolist() for each in group_documents(tokens.segments, (1, 6), CPU)]
    assert views == [[[10.0, 11.0]], [[12.0, 13.0, 14.0]], [[15.0]]]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dropout": 0.1}, "dropout=0.1"),
    ({"softcap": 30.0}, "softcap"),
    ({"position_bias": torch.zeros(1)}, "position_bias"),
    ({"is_causal": False}, "is_causal=False"),
    ({"attention_mask": torch.zeros(1, 1, 4, 4)}, "attention_mask [1, 1, 4, 4]"),
    ({"a_new_keyword": 0.5}, "a_new_keyword"),
]


@pytest.mark.parametrize(("options", "name"), REFUSED, ids=[name for _, name in REFUSED])
def test_what_would_change_the_result_and_is_not_computed_is_refused_by_name(
    options: dict[str, Any], name: str
) -> None:
    query, key, value = tensors(1, 2, 4, 8, count=3)
    view = ChainState(documents_of(4).segments).at(1)
    mask = options.pop("attention_mask", None)
    with pytest.raises(UnsupportedAttentionError) as caught:
        chain_attention(Layer(), query, key, value, mask, mtp_chain=view, **options)
    assert caught.value.problems == (name,)
    harmless = {"position_ids": torch.zeros(1, 4), "use_cache": True, "indices": None, "softcap": None}
    chain_attention(Layer(), query, key, value, torch.zeros(1, 1, 1, 1), mtp_chain=view, **harmless)


def test_sinks_are_those_of_transformers_in_training_and_over_a_cache() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    query, key, value = (tensors(1, heads, 5, 8, count=1, seed=heads)[0] for heads in (4, 2, 2))
    layer = torch.nn.Module()
    layer.layer_idx, layer.num_key_value_groups = 0, 2
    layer.sinks = torch.nn.Parameter(torch.randn(4, generator=torch.Generator().manual_seed(5)))
    causal = torch.full((5, 5), -torch.inf).triu(1)[None, None]
    expected = eager_attention_forward(layer, query, key, value, causal, scaling=0.3)[0]
    view = ChainState(documents_of(5).segments).at(1)
    found = chain_attention(layer, query, key, value, None, scaling=0.3, mtp_chain=view, s_aux=layer.sinks)[0]
    torch.testing.assert_close(found, expected, atol=FP32, rtol=0)
    seen = torch.ones(2, 5).bool().tril(3)[None, None]
    last = chain_attention(layer, query[:, :, -2:], key, value, seen, scaling=0.3, s_aux=layer.sinks)[0]
    torch.testing.assert_close(last, expected[:, -2:], atol=FP32, rtol=0)


def test_norms_in_fp32_beside_half_precision_values_are_taken() -> None:
    query, key = tensors(1, 2, 4, 8, count=2)
    (value,) = tensors(1, 2, 4, 8, count=1, dtype=torch.bfloat16, seed=1)
    view = ChainState(documents_of(4).segments).at(1)
    with torch.autocast("cpu", torch.bfloat16):
        assert chain_attention(Layer(), query, key, value, None, mtp_chain=view)[0].dtype == torch.bfloat16
    view = ChainState(documents_of(4).segments).at(1)
    assert chain_attention(Layer(), query, key, value, None, mtp_chain=view)[0].dtype == torch.float32
