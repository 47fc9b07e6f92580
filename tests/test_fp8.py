"""FP8 tensors against literal tables and an element-by-element reference: every scheme, scale dtype and awkward shape."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from mtp_zoo import fp8
from mtp_zoo.errors import ExportError, ScaleMismatchError
from mtp_zoo.fp8 import Scheme, decode, encode
from tests.allocations import PeakBytes

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
CHANNEL, TENSOR = Scheme("channel"), Scheme("tensor")
TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E8M0": E8M0}
SHAPES = [(96, 80), (587, 130), (1, 1), (64, 64), (3, 72, 40), (63, 65)]


def block(rows: int, columns: int) -> Scheme:
    return Scheme("block", (rows, columns))


def numbers(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Random magnitudes over many powers of two, so that blocks differ and some numbers fall below the normal range."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(shape, generator=generator).mul(4).exp2()
    return torch.randn(shape, generator=generator) * spread


def random_parts(shape: tuple[int, ...], scheme: Scheme, dtype: str) -> tuple[Tensor, Tensor]:
    scales = numbers(scheme.grid(shape), seed=1).abs() + 0.01
    if dtype == "F8_E8M0":
        scales = scales.log2().round().exp2()
    return numbers(shape).clamp(-448, 448).to(E4M3), scales.to(TORCH[dtype])


def reference(weight: Tensor, scale: Tensor, height: int, width: int) -> Tensor:
    """One element after the other."""
    out = torch.empty(weight.shape, dtype=torch.float32)
    for at in product(*map(range, weight.shape)):
        *lead, row, column = at
        out[at] = weight[at].float() * scale[(*lead, row // height, column // width)].float()
    return out


@pytest.mark.parametrize("dtype", fp8.SCALE_DTYPES)
@pytest.mark.parametrize("shape", [(5, 7), (4, 6), (3, 5, 4), (1, 9)])
def test_blocks_decode_to_the_element_wise_product(shape: tuple[int, ...], dtype: str) -> None:
    weight, scale = random_parts(shape, block(2, 3), dtype)
    assert torch.equal(decode(weight, scale, block(2, 3)), reference(weight, scale, 2, 3))


def test_a_block_that_does_not_divide_the_matrix_has_smaller_blocks_at_its_ends() -> None:
    """https://github.com/axolotl-ai-cloud/axolotl/pull/3486: hidden 96, 80 rows, blocks of 64."""
    weight, scale = random_parts((80, 96), block(64, 64), "F32")
    assert scale.shape == (2, 2)
    assert torch.equal(decode(weight, scale, block(64, 64)), reference(weight, scale, 64, 64))


def test_stacked_experts_decode_as_their_matrices_do() -> None:
    """https://github.com/intel/auto-round/pull/747"""
    weight, scale = random_parts((3, 72, 40), block(16, 16), "F32")
    assert scale.shape == (3, 5, 3)
    matrices = [decode(one, its, block(16, 16)) for one, its in zip(weight, scale, strict=True)]
    assert torch.equal(decode(weight, scale, block(16, 16)), torch.stack(matrices))


def test_a_matrix_of_587_rows_decodes_in_blocks_of_128() -> None:
    """https://github.com/intel/auto-round/pull/747"""
    weight, scale = random_parts((587, 40), block(128, 128), "F32")
    assert scale.shape == (5, 1)
    rows = torch.arange(587) // 128
    assert torch.equal(decode(weight, scale, block(128, 128)), weight.float() * scale[rows])


@pytest.mark.parametrize(
    ("scheme", "shape", "accepted"),
    [
        (TENSOR, (), True),
        (TENSOR, (1,), True),
        (TENSOR, (1, 1), True),
        (TENSOR, (2, 3), False),
        (block(2, 2), (2, 3), True),
        (block(2, 2), (3, 2), False),
        (block(2, 2), (1, 1), False),
        (block(2, 2), (), False),
        (CHANNEL, (4, 1), True),
        (CHANNEL, (4,), True),
        (CHANNEL, (6,), False),
        (CHANNEL, (1, 4), False),
    ],
)
def test_a_scale_means_what_the_scheme_says_and_a_shape_that_contradicts_it_is_refused(
    scheme: Scheme, shape: tuple[int, ...], accepted: bool
) -> None:
    """https://github.com/unslothai/unsloth/pull/8953: one scale as (1, 1) is no grid, a transposed grid is no grid."""
    weight = torch.ones(4, 6).to(E4M3)
    scale = torch.full(shape, 0.5)
    if accepted:
        assert torch.equal(decode(weight, scale, scheme), torch.full((4, 6), 0.5))
        return
    with pytest.raises(ScaleMismatchError) as caught:
        decode(weight, scale, scheme)
    assert "[4, 6]" in caught.value.message
    assert str(list(shape)) in caught.value.message


def test_a_row_has_its_own_scale() -> None:
    weight = torch.tensor([[1.0, 2.0, -3.0], [4.0, 0.0, 448.0]]).to(E4M3)
    expected = torch.tensor([[0.5, 1.0, -1.5], [8.0, 0.0, 896.0]])
    assert torch.equal(decode(weight, torch.tensor([[0.5], [2.0]]), CHANNEL), expected)
    assert torch.equal(decode(weight, torch.tensor([0.5, 2.0]), CHANNEL), expected)


def test_stacked_experts_may_have_one_scale_each_or_one_for_all() -> None:
    weight = torch.ones(2, 2, 3).to(E4M3)
    each = torch.tensor([2.0, 4.0])
    expected = each[:, None, None].expand(2, 2, 3)
    assert torch.equal(decode(weight, each, TENSOR), expected)
    assert torch.equal(decode(weight, each[:, None, None], TENSOR), expected)
    assert torch.equal(decode(weight, torch.tensor(4.0), TENSOR), torch.full((2, 2, 3), 4.0))


@pytest.mark.parametrize(("bits", "scale"), [(127, 1.0), (120, 2.0**-7), (254, 2.0**127), (1, 2.0**-126)])
def test_an_e8m0_scale_is_the_power_of_two_of_its_bits(bits: int, scale: float) -> None:
    stored = torch.tensor([[bits]], dtype=torch.uint8).view(E8M0)
    assert decode(torch.ones(1, 1).to(E4M3), stored, block(128, 128)).item() == scale


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_a_scale_that_is_no_scale_is_refused(bad: float) -> None:
    scale = torch.tensor([[1.0, bad]])
    with pytest.raises(ScaleMismatchError, match="finite and not negative"):
        decode(torch.ones(2, 4).to(E4M3), scale, block(2, 2))


def test_decoding_rounds_once_to_the_dtype_asked_for() -> None:
    weight, scale = random_parts((9, 7), block(4, 4), "F32")
    assert torch.equal(
        decode(weight, scale, block(4, 4), dtype=torch.bfloat16), reference(weight, scale, 4, 4).bfloat16()
    )


@pytest.mark.parametrize("at", [(1, slice(0, 4)), (0, slice(4, 8))])
def test_decoding_writes_into_a_slice_of_a_packed_tensor_and_nowhere_else(at: tuple[int, slice]) -> None:
    weight, scale = random_parts((4, 6), block(2, 3), "BF16")
    packed = torch.full((2, 8, 6), 7.0, dtype=torch.bfloat16)
    decode(weight, scale, block(2, 3), out=packed[at])
    assert torch.equal(packed[at], reference(weight, scale, 2, 3).bfloat16())
    packed[at] = 7.0
    assert torch.equal(packed, torch.full_like(packed, 7.0))


@pytest.mark.parametrize("dtype", fp8.SCALE_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheme", [block(64, 64), block(16, 32), CHANNEL, TENSOR])
def test_encoding_loses_no_more_than_e4m3_must(scheme: Scheme, shape: tuple[int, ...], dtype: str) -> None:
    weight = numbers(shape)
    quantized, scale = encode(weight, scheme, scale_dtype=dtype)
    assert (quantized.dtype, scale.dtype) == (E4M3, TORCH[dtype])
    assert quantized.shape == weight.shape
    assert scale.shape == scheme.grid(shape)
    back = decode(quantized, scale, scheme)
    each = decode(torch.ones_like(weight).to(E4M3), scale, scheme)
    assert bool(((back - weight).abs() <= torch.maximum(weight.abs() * fp8.STEP, each * fp8.SMALLEST_STEP)).all())


@pytest.mark.parametrize("dtype", fp8.SCALE_DTYPES)
def test_no_number_leaves_the_range_however_its_scale_is_rounded(dtype: str) -> None:
    """A scale that is rounded down would make the largest number of its block saturate."""
    weight = torch.linspace(1, 2, 4096).reshape(4096, 1)
    quantized, scale = encode(weight, block(1, 1), scale_dtype=dtype)
    largest = weight / scale.float()
    assert float(largest.max()) <= fp8.LARGEST * (1 + 2**-23)
    assert float(largest.min()) >= fp8.LARGEST / 2 * (1 - 2**-8)
    assert float(quantized.float().abs().max()) == fp8.LARGEST


@pytest.mark.parametrize(
    ("largest", "dtype", "scale"),
    [
        (448.0, "F32", 1.0),
        (224.0, "F32", 0.5),
        (448.0, "F8_E8M0", 1.0),
        (449.0, "F8_E8M0", 2.0),
        (896.0, "F8_E8M0", 2.0),
        (448.0, "BF16", 1.0),
        (448.0 * (1 + 2**-10), "BF16", 1.0 + 2**-7),
        (0.0, "F32", 1.0),
        (0.0, "BF16", 1.0),
        (0.0, "F8_E8M0", 1.0),
    ],
)
def test_the_scale_is_the_largest_number_over_448_rounded_up(largest: float, dtype: str, scale: float) -> None:
    weight = torch.tensor([[largest, -largest / 2]])
    quantized, stored = encode(weight, TENSOR, scale_dtype=dtype)
    assert stored.float().item() == scale
    assert torch.equal(decode(quantized, stored, TENSOR), quantized.float() * scale)


@pytest.mark.parametrize("dtype", fp8.SCALE_DTYPES)
@pytest.mark.parametrize("size", [1e-45, 1e-38, 3e38])
def test_the_smallest_and_the_largest_numbers_keep_scales_that_are_numbers(size: float, dtype: str) -> None:
    quantized, scale = encode(torch.full((2, 2), size), TENSOR, scale_dtype=dtype)
    assert 0 < scale.float().item() < math.inf
    assert bool(torch.isfinite(quantized.float()).all())


@pytest.mark.parametrize("dtype", fp8.SCALE_DTYPES)
@pytest.mark.parametrize("scheme", [block(32, 32), CHANNEL, TENSOR])
def test_encoding_what_was_decoded_gives_the_same_numbers_again(scheme: Scheme, dtype: str) -> None:
    quantized, scale = encode(numbers((65, 47)), scheme, scale_dtype=dtype)
    once = decode(quantized, scale, scheme)
    again = decode(*encode(once, scheme, scale_dtype=dtype), scheme)
    assert bool(((again - once).abs() <= once.abs() * 2**-22).all())


@pytest.mark.parametrize(
    ("scheme", "shape", "stored"),
    [
        (CHANNEL, (4, 6), (4,)),
        (CHANNEL, (4, 6), (4, 1)),
        (TENSOR, (4, 6), ()),
        (TENSOR, (4, 6), (1,)),
        (TENSOR, (2, 4, 6), ()),
        (TENSOR, (2, 4, 6), (2,)),
        (block(2, 4), (2, 4, 6), (2, 2, 2)),
    ],
)
def test_scales_are_stored_in_the_shape_that_the_base_has(
    scheme: Scheme, shape: tuple[int, ...], stored: tuple[int, ...]
) -> None:
    weight = numbers(shape)
    quantized, scale = encode(weight, scheme, scale_shape=stored)
    assert scale.shape == stored
    error = (decode(quantized, scale, scheme) - weight).abs()
    assert float(error.max()) <= float(weight.abs().max()) * fp8.STEP


def test_a_scale_shape_that_the_scheme_does_not_have_is_refused_before_anything_is_made() -> None:
    with pytest.raises(ScaleMismatchError, match=r"needs a scale of \[2, 3\], found \[3, 2\]"):
        encode(torch.ones(4, 6), block(2, 2), scale_shape=(3, 2))
    with pytest.raises(ScaleMismatchError, match="got F16"):
        encode(torch.ones(4, 6), block(2, 2), scale_dtype="F16")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scheme", [block(2, 2), CHANNEL, TENSOR])
def test_numbers_that_are_not_finite_are_not_encoded(scheme: Scheme, bad: float) -> None:
    weight = torch.ones(4, 6)
    weight[3, 5] = bad
    with pytest.raises(ExportError, match="found NaN or infinity"):
        encode(weight, scheme)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_encoding_leaves_the_weight_as_it_was(dtype: torch.dtype) -> None:
    weight = numbers((40, 24)).to(dtype).requires_grad_()
    before = weight.detach().clone()
    encode(weight, block(16, 16))
    assert torch.equal(weight, before)


def test_parts_of_any_size_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = numbers((3, 37, 50))
    whole = encode(weight, block(16, 16), scale_dtype="BF16")
    monkeypatch.setattr(fp8, "CHUNK", 170)
    parts = encode(weight, block(16, 16), scale_dtype="BF16")
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(whole, parts, strict=True))
    assert torch.equal(decode(*parts, block(16, 16)), decode(*whole, block(16, 16)))


def test_a_large_tensor_is_converted_without_a_second_copy_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most the input, the result, the scales and a few parts of CHUNK elements are alive at one moment."""
    monkeypatch.setattr(fp8, "CHUNK", 1 << 12)
    weight = numbers((2048, 256)).to(torch.bfloat16)
    narrow, wide = weight.numel(), weight.nbytes
    parts, scales = 6 * 4 * fp8.CHUNK, 3 * 4 * weight.numel() // 64 + 2 * 8 * 2048
    with PeakBytes() as peak:
        quantized, scale = encode(weight, block(64, 64))
    assert peak.peak <= narrow + wide + parts + scales
    with PeakBytes() as peak:
        decode(quantized, scale, block(64, 64), dtype=torch.bfloat16)
    assert peak.peak <= narrow + wide + parts + scales
