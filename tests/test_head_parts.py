"""What a process reads to fill the rows that it holds: literal tables, and the law that the ranks' shares are the whole."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from mtp_zoo.head_parts import Read, plan_reads, stored_rows
from mtp_zoo.keymap import to_head
from mtp_zoo.quantization import QuantizedTensor
from mtp_zoo.rules import Binding, Rename, Split, Stack, expand
from mtp_zoo.safetensors_header import TensorEntry
from mtp_zoo.scaling import Scheme

HEADS = {"whole": (6, 4), "qkv": (6, 4), "gate": (4, 4), "up": (2, 4), "side": (6, 4), "experts": (3, 4, 2), "bias": ()}
RULES = {
    "rename": Rename("w", "whole"),
    "stack": Stack(("q", "kv"), "qkv"),
    "stack of columns": Stack(("left", "right"), "side", axis=1),
    "split": Split("gate_up", ("gate", "up")),
    "experts": Stack(("e.{e}.gate", "e.{e}.up"), "experts"),
}


def bound(rule: Any) -> Binding:
    binding = expand(rule, {}, HEADS)
    assert binding is not None
    return binding


def entries(binding: Binding) -> dict[str, TensorEntry]:
    """BF16 tensors of one file, each with a hundred bytes in front of it."""
    found: dict[str, TensorEntry] = {}
    at = 0
    for name, shape in binding.natives.items():
        end = at + 100 + 2 * torch.Size(shape).numel()
        found[name] = TensorEntry(name, "BF16", shape, "model.safetensors", at + 100, end)
        at = end
    return found


def reads(rule: str, **held: tuple[int, int]) -> list[Read]:
    binding = bound(RULES[rule])
    return plan_reads(binding, dict(entries(binding)), {name: range(*rows) for name, rows in held.items()})


def shown(rule: str, **held: tuple[int, int]) -> list[Any]:
    """Of every read: the tensor, its first byte behind the tensor's own, its bytes, and the moves."""
    first = entries(bound(RULES[rule]))
    return [
        (
            r.stored.name,
            e.start - first[e.name].start,
            e.nbytes,
            [(m.native_index, m.head, m.head_index) for m in r.moves],
        )
        for r in reads(rule, **held)
        for e in r.entries
    ]


def rows(start: int, stop: int) -> slice:
    return slice(start, stop)


ALL = slice(None)


@pytest.mark.parametrize(
    ("rule", "held", "expected"),
    [
        ("rename", {"whole": (0, 6)}, [("w", 0, 48, [((), "whole", (rows(0, 6),))])]),
        ("rename", {"whole": (2, 5)}, [("w", 16, 24, [((), "whole", (rows(0, 3),))])]),
        ("rename", {"whole": (6, 6)}, []),
        (
            "stack",
            {"qkv": (2, 5)},
            [("q", 16, 8, [((), "qkv", (rows(0, 1),))]), ("kv", 0, 16, [((), "qkv", (rows(1, 3),))])],
        ),
        (
            "stack of columns",
            {"side": (1, 3)},
            [
                ("left", 4, 8, [((), "side", (rows(0, 2), rows(0, 2)))]),
                ("right", 4, 8, [((), "side", (rows(0, 2), rows(2, 4)))]),
            ],
        ),
        (
            "split",
            {"gate": (0, 4), "up": (0, 2)},
            [("gate_up", 0, 48, [((rows(0, 4),), "gate", (rows(0, 4),)), ((rows(4, 6),), "up", (rows(0, 2),))])],
        ),
        (
            "split",
            {"gate": (0, 2), "up": (0, 1)},
            [("gate_up", 0, 16, [((), "gate", (rows(0, 2),))]), ("gate_up", 32, 8, [((), "up", (rows(0, 1),))])],
        ),
        (
            "experts",
            {"experts": (2, 3)},
            [
                ("e.2.gate", 0, 8, [((), "experts", (0, rows(0, 2)))]),
                ("e.2.up", 0, 8, [((), "experts", (0, rows(2, 4)))]),
            ],
        ),
    ],
)
def test_what_is_read_for_some_rows(rule: str, held: dict[str, tuple[int, int]], expected: list[Any]) -> None:
    assert shown(rule, **held) == expected


def test_a_tensor_without_axes_is_read_whole() -> None:
    binding = bound(Rename("b", "bias"))
    (read,) = plan_reads(binding, dict(entries(binding)), {"bias": range(1)})
    assert read.entries == tuple(entries(binding).values())
    assert (read.moves[0].native_index, read.moves[0].head_index) == ((), ())


@pytest.mark.parametrize("size", [1, 2, 4, 7])
@pytest.mark.parametrize("rule", RULES)
def test_the_shares_of_all_ranks_are_the_head(rule: str, size: int) -> None:
    """And no byte is read by two of them, or twice by one."""
    binding = bound(RULES[rule])
    generator = torch.Generator().manual_seed(0)
    natives = {name: torch.randn(shape, generator=generator) for name, shape in binding.natives.items()}
    whole = {name: torch.zeros(shape) for name, shape in binding.heads.items()}
    seen: list[tuple[int, int]] = []
    for rank in range(size):
        held = {name: range(shape[0])[_share(shape[0], rank, size)] for name, shape in binding.heads.items()}
        values = {name: whole[name][own.start : own.stop] for name, own in held.items()}
        for read in plan_reads(binding, dict(entries(binding)), held):
            _run(read, natives, entries(binding), values)
            seen += [(entry.start, entry.end) for entry in read.entries]
    assert all(torch.equal(whole[name], value) for name, value in to_head([binding], natives).items())
    spans = sorted(seen)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert sum(end - start for start, end in spans) == sum(entry.nbytes for entry in entries(binding).values())


def _share(length: int, rank: int, size: int) -> slice:
    each = -(-length // size)
    return slice(rank * each, (rank + 1) * each)


def _run(read: Read, natives: dict[str, Tensor], whole: dict[str, TensorEntry], values: dict[str, Tensor]) -> None:
    """What reading does, out of tensors in memory."""
    (entry,) = read.entries
    width = 2 * torch.Size(entry.shape[1:]).numel()
    start = (entry.start - whole[entry.name].start) // width
    stored = natives[entry.name][start : start + entry.shape[0]]
    for move in read.moves:
        values[move.head][move.head_index] = stored[move.native_index]


def fp8(shape: tuple[int, ...], scale: tuple[int, ...], scheme: Scheme) -> QuantizedTensor:
    weight = TensorEntry("w", "F8_E4M3", shape, "a.safetensors", 1000, 1000 + torch.Size(shape).numel())
    return QuantizedTensor(
        weight, TensorEntry("w_scale", "F32", scale, "a.safetensors", 0, 4 * torch.Size(scale).numel()), scheme
    )


@pytest.mark.parametrize(
    ("shape", "scale", "scheme", "held", "weight_rows", "scale_rows", "index"),
    [
        ((10, 3), (3, 1), Scheme("block", (4, 4)), (0, 5), (0, 8), (0, 2), (rows(0, 5),)),
        ((10, 3), (3, 1), Scheme("block", (4, 4)), (5, 10), (4, 10), (1, 3), (rows(1, 6),)),
        ((10, 3), (3, 1), Scheme("block", (4, 4)), (4, 8), (4, 8), (1, 2), ()),
        ((10, 3), (10, 1), Scheme("channel"), (5, 10), (5, 10), (5, 10), ()),
        ((10, 3), (10,), Scheme("channel"), (5, 10), (5, 10), (5, 10), ()),
        ((10, 3), (), Scheme("tensor"), (5, 10), (5, 10), None, ()),
        ((10, 3), (1, 1), Scheme("tensor"), (5, 10), (5, 10), None, ()),
        ((6, 8, 8), (6, 2, 2), Scheme("block", (4, 4)), (3, 6), (3, 6), (3, 6), ()),
        ((6, 8, 8), (6,), Scheme("tensor"), (3, 6), (3, 6), (3, 6), ()),
        ((6, 8, 8), (1,), Scheme("tensor"), (3, 6), (3, 6), None, ()),
    ],
)
def test_fp8_rows_come_with_the_scales_of_their_blocks(
    shape: tuple[int, ...],
    scale: tuple[int, ...],
    scheme: Scheme,
    held: Any,
    weight_rows: Any,
    scale_rows: Any,
    index: Any,
) -> None:
    binding = expand(Rename("w", "h"), {}, {"h": shape})
    assert binding is not None
    stored = fp8(shape, scale, scheme)
    (read,) = plan_reads(binding, {"w": stored}, {"h": range(*held)})
    weight, factors = read.entries
    assert (weight.shape[0], weight.start) == (
        weight_rows[1] - weight_rows[0],
        1000 + weight_rows[0] * torch.Size(shape[1:]).numel(),
    )
    assert read.moves[0].native_index == index
    if scale_rows is None:
        assert factors == stored.scale
    else:
        assert factors.shape == (scale_rows[1] - scale_rows[0], *scale[1:])
        assert factors.start == 4 * scale_rows[0] * torch.Size(scale[1:]).numel()
    assert scheme.misfit(weight.shape, factors.shape) is None


def test_rows_that_share_a_block_are_read_once() -> None:
    """Two head tensors out of one stored one, whose rows on this rank lie in neighbouring blocks."""
    binding = bound(Split("gate_up", ("gate", "up")))
    stored = dataclasses.replace(fp8((6, 4), (2, 1), Scheme("block", (4, 4))))
    stored = dataclasses.replace(stored, weight=stored.weight._replace(name="gate_up"))
    (read,) = plan_reads(binding, {"gate_up": stored}, {"gate": range(2, 4), "up": range(1, 2)})
    assert read.stored == stored
    assert [(m.native_index, m.head, m.head_index) for m in read.moves] == [
        ((rows(2, 4),), "gate", (rows(0, 2),)),
        ((rows(5, 6),), "up", (rows(0, 1),)),
    ]


def test_all_rows_are_the_tensor_itself() -> None:
    stored = fp8((10, 3), (3, 1), Scheme("block", (4, 4)))
    assert stored_rows(stored, 0, 10) == stored
