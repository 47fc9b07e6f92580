"""The prefix kernels against a plain softmax in FP64, what they hold at their worst moment, and the calls made on CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mtp_zoo import prefix_attention
from mtp_zoo.batch import TokenBatch
from mtp_zoo.prefix_attention import choose_kernel, prefix_backward, prefix_forward
from tests.allocations import PeakBytes
from tests.drafting import stacked
from tests.heads import HIDDEN, tiny_head
from tests.test_chain_window import windowed_head

FP32_SOFTMAX = 5e-6
"""Outputs and gradients are of size 3; FP32 against FP64 (1e-6 seen)."""

BF16_FLASH = 2e-2
"""Relative, in norm: BF16 keeps 8 bits, and flash kernels round the weights to it once more."""

LINEAR = 4.4
"""Four times the length may take this much more memory: 4 and what does not grow evenly; a square mask would take 16."""

REACHES = (None, 100, 12, 11, 5, 2, 1, 0, -3)


def inputs(length: int = 12, width: int = 8, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value, and a gradient of the output."""
    generator = torch.Generator().manual_seed(2)
    query, key, value, grad = (torch.randn(2, 3, length, width, generator=generator) for _ in range(4))
    return query.to(**kwargs), key.to(**kwargs), value.to(**kwargs), grad.to(**kwargs)


def plain(
    query: Tensor, key: Tensor, value: Tensor, scale: float, reach: int | None, extra: Tensor | None = None
) -> Any:
    """(output, log-sum-exp) over all pairs; `extra` is the log-sum-exp of other keys, of value 0."""
    slots = torch.arange(query.shape[2], device=query.device)
    distance = slots[:, None] - slots
    seen = (distance >= 0) & (distance < (reach if reach is not None else len(slots)))
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf)
    if extra is not None:
        scores = torch.cat([scores, extra[..., None]], dim=-1)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    return weights[..., : len(slots)] @ value, lse


@pytest.mark.parametrize("block", [1, 5, 256])
@pytest.mark.parametrize("reach", REACHES)
def test_forward_and_backward_equal_a_plain_softmax(
    reach: int | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_attention, "QUERY_BLOCK", block)
    query, key, value, grad = inputs()
    exact = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    out, lse = prefix_forward(query, key, value, 0.3, reach)
    expected, expected_lse = plain(*exact, 0.3, reach)
    torch.testing.assert_close(out.double(), expected, atol=FP32_SOFTMAX, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse, atol=FP32_SOFTMAX, rtol=0)
    assert lse.dtype == torch.float32
    # further keys of value 0 take part in the softmax: the merged output shrinks, the merged log-sum-exp grows
    further = torch.randn(query.shape[:3], generator=torch.Generator().manual_seed(4))
    merged, merged_lse = plain(*exact, 0.3, reach, further.double())
    wanted = torch.autograd.grad((merged * grad).sum(), exact)
    found = prefix_backward(grad, query, key, value, merged.detach().float(), merged_lse.detach().float(), 0.3, reach)
    for name, ours, theirs in zip(("query", "key", "value"), found, wanted, strict=True):
        torch.testing.assert_close(
            ours.double(), theirs, atol=FP32_SOFTMAX, rtol=0, msg=lambda m, n=name: f"gradient of {n}: {m}"
        )


def test_which_keys_a_stretch_of_queries_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_attention, "QUERY_BLOCK", 4)
    table = {
        None: [(0, 4, 0), (4, 8, 0), (8, 10, 0)],
        2: [(0, 4, 0), (4, 8, 3), (8, 10, 7)],
        1: [(0, 4, 0), (4, 8, 4), (8, 10, 8)],
    }
    for reach, expected in table.items():
        blocks = list(prefix_attention._blocks(10, reach))
        assert [(rows.start, rows.stop, columns.start) for rows, columns in blocks] == expected
        assert all(rows.stop == columns.stop for rows, columns in blocks)


def test_which_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value, _ = inputs()
    assert choose_kernel(query, key, value) == "cpu_flash"
    assert choose_kernel(query, key, value, reach=12) == "cpu_flash", "a reach over all of 12 slots is no band"
    assert choose_kernel(query, key, value, reach=11) == "blocks"
    assert choose_kernel(query, key, value[..., :4]) == "cpu_flash", "narrow values of latent attention are padded"
    asked: list[Any] = []
    monkeypatch.setattr(prefix_attention, "can_use_flash_attention", lambda params: asked.append(params) or True)
    with FakeTensorMode():
        for width, expected in ((64, "cuda_flash"), (256, "cuda_flash"), (36, "cuda_flash")):
            tensors = [torch.empty(2, 3, 12, width, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
            assert choose_kernel(*tensors) == expected
        assert choose_kernel(*tensors, reach=3) == "blocks"
    assert len(asked) == 3, "torch says which dtypes, widths and devices its flash kernel takes"
    assert asked[0].is_causal
    assert asked[0].dropout == 0.0
    assert asked[0].attn_mask is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_calls_of_the_cuda_kernel_fit_their_schemas(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes and dtypes only: fake tensors run torch's own shape functions of the CUDA kernels, without a device."""
    monkeypatch.setattr(prefix_attention, "choose_kernel", lambda *_: "cuda_flash")
    with FakeTensorMode():
        query, key, value, grad = (torch.empty(2, 3, 12, 64, dtype=dtype, device="cuda") for _ in range(4))
        out, lse = prefix_forward(query, key, value, 0.3)
        assert (out.shape, out.dtype) == (query.shape, dtype)
        assert (lse.shape, lse.dtype) == (query.shape[:3], torch.float32)
        for found in prefix_backward(grad, query, key, value, out, lse, 0.3):
            assert (found.shape, found.dtype, found.device.type) == (query.shape, dtype, "cuda")
        *_, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)
        handed: list[Any] = []
        monkeypatch.setattr(
            torch.ops.aten,
            "_scaled_dot_product_flash_attention_backward",
            lambda *a, **k: handed.extend(a) or (grad, grad, grad),
            raising=True,
        )
        prefix_backward(grad, query, key, value, out, lse, 0.3)
        for ours, theirs in zip(handed[-2:], (seed, offset), strict=True):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("reach", [None, 40])
def test_the_kernels_of_a_device_equal_the_blocks_in_fp32(dtype: torch.dtype, width: int, reach: int | None) -> None:
    query, key, value, grad = inputs(300, width, dtype=dtype, device="cuda")
    assert choose_kernel(query, key, value, reach) == ("cuda_flash" if reach is None else "blocks")
    exact = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    out, lse = prefix_forward(query, key, value, width**-0.5, reach)
    expected, expected_lse = plain(*exact, width**-0.5, reach)
    assert relative(out, expected) < BF16_FLASH
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=0)
    further = torch.randn(query.shape[:3], device="cuda", dtype=torch.float64)
    merged, merged_lse = plain(*exact, width**-0.5, reach, further)
    wanted = torch.autograd.grad((merged * grad).sum(), exact)
    found = prefix_backward(
        grad, query, key, value, merged.detach().to(dtype), merged_lse.detach().float(), width**-0.5, reach
    )
    for ours, theirs in zip(found, wanted, strict=True):
        assert relative(ours, theirs) < BF16_FLASH


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("kernel", ["flash", "blocks", "window"])
def test_memory_of_the_chain_is_linear_in_the_length(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel == "blocks":  # their scores are linear too: QUERY_BLOCK * length
        monkeypatch.setattr(prefix_attention, "choose_kernel", lambda *_: "blocks")
        monkeypatch.setattr(prefix_attention, "QUERY_BLOCK", 64)
    head = windowed_head(128) if kernel == "window" else tiny_head()
    short, long = (chain_peak(head, length) for length in (512, 2048))
    assert long < LINEAR * short


@pytest.mark.slow
def test_a_row_of_16k_tokens_is_chained_four_deep() -> None:
    head = tiny_head()
    length = 16_384
    one_mask = length * 4 * length  # of bool, by depth 4
    assert chain_peak(head, length) < one_mask


def chain_peak(head: Any, length: int) -> int:
    """Bytes held at the worst moment of a forward and backward pass over four depths."""
    tokens = TokenBatch.all_tokens(torch.randint(0, 100, (1, length)))
    hidden = torch.randn(1, length, HIDDEN)
    with PeakBytes() as counted:
        stacked(head(tokens, hidden, depths=4)).sin().sum().backward()
    head.zero_grad()
    return counted.peak
