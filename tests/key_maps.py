"""Random key maps with an oracle: what lies where is said by torch's own cat, stack and split."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from hypothesis import strategies as st
from torch import Tensor

from mtp_zoo.keymap import KeyMap, Rename, Rule, Split, Stack

Shapes: TypeAlias = dict[str, tuple[int, ...]]
Tensors: TypeAlias = Mapping[str, Tensor]

STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
FIRST_LAYER = 5


@dataclasses.dataclass(frozen=True)
class Info:
    """A stored tensor, as a plan sees it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Group:
    """A few rules that belong together, and what they must do at one depth; `{d}` and `{n}` are still in the names.

    Attributes:
        rules: as a family lists them.
        heads, natives: shapes of what they fill, and of what is on disk.
        fill: the oracle: head tensors from native ones.
    """

    rules: tuple[Rule, ...]
    heads: Shapes
    natives: Shapes
    fill: Callable[[Tensors], dict[str, Tensor]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A whole table for a head of some depths."""

    key_map: KeyMap
    groups: tuple[Group, ...]
    depths: int

    @property
    def natives(self) -> Shapes:
        """Every native tensor that such a head has on disk."""
        return {
            put(name, d): shape for d in range(self.depths) for g in self.groups for name, shape in g.natives.items()
        }

    @property
    def heads(self) -> Shapes:
        """Every head tensor."""
        return {put(name, d): shape for d in range(self.depths) for g in self.groups for name, shape in g.heads.items()}

    def fill(self, native: Tensors) -> dict[str, Tensor]:
        """The head tensors of `native`, by the oracles."""
        out: dict[str, Tensor] = {}
        for depth in range(self.depths):
            for group in self.groups:
                here = {name: native[put(name, depth)] for name in group.natives}
                out |= {put(name, depth): value for name, value in group.fill(here).items()}
        return out

    def stored(self, dtype: str = "BF16") -> list[Info]:
        """What a plan is given."""
        return [Info(name, dtype, shape) for name, shape in self.natives.items()]


def put(template: str, depth: int) -> str:
    return template.replace("{d}", str(depth)).replace("{n}", str(FIRST_LAYER + depth))


sizes = st.integers(1, 3)


def insert(shape: list[int], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis:])


@st.composite
def renamed(draw: st.DrawFn, native: str, head: str) -> Group:
    shape = tuple(draw(st.lists(sizes, max_size=3)))
    return Group((Rename(native, head),), {head: shape}, {native: shape}, lambda x: {head: x[native]})


@st.composite
def stacked(draw: st.DrawFn, native: str, head: str) -> Group:
    """Equal parts along an axis, no experts."""
    other = draw(st.lists(sizes, max_size=2))
    axis, count, part = draw(st.integers(0, len(other))), draw(sizes), draw(sizes)
    names = [f"{native}.part{k}" for k in range(count)]
    return Group(
        (Stack(tuple(names), head, axis),),
        {head: insert(other, axis, count * part)},
        dict.fromkeys(names, insert(other, axis, part)),
        lambda x: {head: torch.cat([x[name] for name in names], dim=axis)},
    )


@st.composite
def experts(draw: st.DrawFn, native: str, head: str) -> Group:
    """Parts of every expert, packed on a leading axis; or the packed form of the same tensor."""
    other = draw(st.lists(sizes, max_size=1))
    axis, count, part, number = draw(st.integers(0, len(other))), draw(sizes), draw(sizes), draw(st.integers(1, 12))
    templates = [f"{native}.{{e}}.part{k}" for k in range(count)]
    names = [[t.replace("{e}", str(e)) for t in templates] for e in range(number)]
    packed = (number, *insert(other, axis, count * part))
    rules = (Stack(tuple(templates), head, axis), Rename(f"{native}.packed", head))
    if draw(st.booleans()):
        return Group(rules, {head: packed}, {f"{native}.packed": packed}, lambda x: {head: x[f"{native}.packed"]})
    return Group(
        rules,
        {head: packed},
        {name: insert(other, axis, part) for row in names for name in row},
        lambda x: {head: torch.stack([torch.cat([x[name] for name in row], dim=axis) for row in names])},
    )


@st.composite
def fused(draw: st.DrawFn, native: str, head: str) -> Group:
    """One native tensor with several head tensors in it, of different sizes."""
    other, parts = draw(st.lists(sizes, max_size=2)), draw(st.lists(sizes, min_size=1, max_size=3))
    axis = draw(st.integers(0, len(other)))
    heads = [f"{head}.part{k}" for k in range(len(parts))]
    return Group(
        (Split(native, tuple(heads), axis),),
        {name: insert(other, axis, part) for name, part in zip(heads, parts, strict=True)},
        {native: insert(other, axis, sum(parts))},
        lambda x: dict(zip(heads, x[native].split(parts, dim=axis), strict=True)),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Tables of up to four groups, some shared by all depths, for heads of up to three."""
    depths = draw(st.integers(1, 3))
    groups: list[Group] = []
    for number in range(draw(st.integers(1, 4))):
        numbered = draw(st.sampled_from(["", ".{d}", ".{n}"]))
        depth = ".{d}" if numbered else ""
        kind = draw(st.sampled_from([renamed, stacked, experts, fused]))
        groups.append(draw(kind(f"mtp{numbered}.native{number}", f"depths{depth}.head{number}")))
    rules = [rule for group in groups for rule in group.rules]
    case = Case(KeyMap((), {}), tuple(groups), depths)
    key_map = KeyMap(draw(st.permutations(rules)), case.heads, depths=depths, first_layer=FIRST_LAYER, family="toy")
    return dataclasses.replace(case, key_map=key_map)


def bits(tensor: Tensor) -> Tensor:
    """The raw bits: equal where the numbers are, and also for NaNs."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def same_bits(left: Tensors, right: Tensors) -> bool:
    """Same names, shapes, dtypes and bits."""
    return left.keys() == right.keys() and all(
        x.dtype == right[name].dtype and torch.equal(bits(x), bits(right[name])) for name, x in left.items()
    )


def random_bits(shapes: Shapes, dtype: str, seed: int) -> dict[str, Tensor]:
    """Tensors of random bits, NaNs and infinities of every payload among them."""
    generator = torch.Generator().manual_seed(seed)
    width = STORED[dtype].itemsize
    return {
        name: torch.randint(0, 256, (*shape, width), dtype=torch.uint8, generator=generator)
        .view(STORED[dtype])
        .reshape(shape)
        for name, shape in shapes.items()
    }
