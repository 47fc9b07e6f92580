"""The rules of a key map, and what they mean for one head: moves between slices of native and of head tensors.

Templates hold placeholders: `{d}` is the depth (0-based), `{n}` the layer number that a depth has inside the trunk's stack
(first layer of the head + d), `{e}` the index of an expert.

Worked example, two experts whose gate and up rows are packed into one head tensor of shape [2, 2 * I, H]:

    Stack(("mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight"), "mlp.experts.gate_up_proj")

    experts.0.gate_proj.weight [I, H]  <->  gate_up_proj[0, 0:I]
    experts.0.up_proj.weight   [I, H]  <->  gate_up_proj[0, I:2I]
    experts.1.gate_proj.weight [I, H]  <->  gate_up_proj[1, 0:I]
    experts.1.up_proj.weight   [I, H]  <->  gate_up_proj[1, I:2I]
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

from mtp_zoo.arguments import INTEGER, NAMES, TEXT, check_fields, one_of, optional
from mtp_zoo.errors import FamilyDefinitionError

Shape: TypeAlias = tuple[int, ...]
Index: TypeAlias = tuple[int | slice, ...]


@dataclass(frozen=True)
class Rename:
    """One native tensor is one head tensor."""

    native: str
    head: str

    def __post_init__(self) -> None:
        check_fields(self, FamilyDefinitionError, native=TEXT, head=TEXT)


@dataclass(frozen=True)
class Stack:
    """Several native tensors are one head tensor.

    The natives are equal parts along `axis`, in order. Where the templates hold `{e}`, the parts of every expert are joined
    like that and the experts are stacked on a new leading axis, whose length the head's own shape gives.
    """

    native: tuple[str, ...]
    head: str
    axis: int = 0

    def __post_init__(self) -> None:
        check_fields(self, FamilyDefinitionError, native=NAMES, head=TEXT, axis=INTEGER)


@dataclass(frozen=True)
class Split:
    """One native tensor is several head tensors, laid end to end along `axis` in order."""

    native: str
    head: tuple[str, ...]
    axis: int = 0

    def __post_init__(self) -> None:
        check_fields(self, FamilyDefinitionError, native=TEXT, head=NAMES, axis=INTEGER)


@dataclass(frozen=True)
class Skip:
    """A native name that is known and deliberately not loaded; `*` in the template matches anything.

    Attributes:
        native: the template.
        because: why it is left alone.
        copy_of: the target's tensor that it repeats, where it is a copy.
    """

    native: str
    because: str
    copy_of: Literal["embedding", "lm_head"] | None = None

    def __post_init__(self) -> None:
        copied = optional(one_of("embedding", "lm_head"))
        check_fields(self, FamilyDefinitionError, native=TEXT, because=TEXT, copy_of=copied)


Rule: TypeAlias = Rename | Stack | Split | Skip


@dataclass(frozen=True)
class Move:
    """`head[head_index]` and `native[native_index]` are the same numbers; an empty index means the whole tensor."""

    native: str
    native_index: Index
    head: str
    head_index: Index


@dataclass(frozen=True)
class Binding:
    """One rule, made concrete: its moves, and the shapes of the native and head tensors between which they run."""

    rule: Rule
    moves: tuple[Move, ...]
    natives: Mapping[str, Shape]
    heads: Mapping[str, Shape]


def pattern(template: str, fill: Mapping[str, str]) -> re.Pattern[str]:
    """The template as a regular expression; placeholders not in `fill` match any number, `*` any text."""
    parts = re.split(r"(\{\w\}|\*)", template)
    out = [
        fill.get(part[1], "[0-9]+") if part.startswith("{") else (".*" if part == "*" else re.escape(part))
        for part in parts
    ]
    return re.compile("".join(out))


def claims(rule: Rule, name: str) -> bool:
    """Whether `name` could be one of the rule's native names at some depth and expert."""
    return any(any_pattern(template).fullmatch(name) for template in templates_of(rule))


def templates_of(rule: Rule) -> tuple[str, ...]:
    """The native names that a rule speaks of."""
    return rule.native if isinstance(rule, Stack) else (rule.native,)


def heads_of(rule: Rule) -> tuple[str, ...]:
    """The head names that a rule fills."""
    if isinstance(rule, Skip):
        return ()
    return rule.head if isinstance(rule, Split) else (rule.head,)


@cache
def any_pattern(template: str) -> re.Pattern[str]:
    """The template at any depth, layer and expert."""
    return pattern(template, {})


def expand(rule: Rename | Stack | Split, fill: Mapping[str, str], shapes: Mapping[str, Shape]) -> Binding | None:
    """The rule for one depth, or None where this head has no such tensor (an optional norm, another expert layout)."""
    heads = tuple(_put(name, fill) for name in heads_of(rule))
    known = [name in shapes for name in heads]
    if not any(known):
        return None
    if not all(known):
        raise FamilyDefinitionError(
            f"Rule {rule} fills {heads}, of which this head has only some.", remedy="Split the rule in two."
        )
    if isinstance(rule, Split):
        return _expand_split(rule, _put(rule.native, fill), heads, shapes)
    if isinstance(rule, Stack):
        return _expand_stack(rule, tuple(_put(name, fill) for name in rule.native), heads[0], shapes[heads[0]])
    native = _put(rule.native, fill)
    shape = shapes[heads[0]]
    return Binding(rule, (Move(native, (), heads[0], ()),), {native: shape}, {heads[0]: shape})


def _expand_split(rule: Split, native: str, heads: tuple[str, ...], shapes: Mapping[str, Shape]) -> Binding:
    parts = [list(shapes[name]) for name in heads]
    for part in parts:
        _check_axis(rule, part)
        part[rule.axis] = 0
    if any(part != parts[0] for part in parts):
        raise FamilyDefinitionError(
            f"Rule {rule}: {[list(shapes[name]) for name in heads]} do not lie end to end along axis {rule.axis}.",
            remedy="Name head tensors that agree in every other axis.",
        )
    moves: list[Move] = []
    start = 0
    for name in heads:
        stop = start + shapes[name][rule.axis]
        moves.append(Move(native, _along(rule.axis, start, stop), name, ()))
        start = stop
    shape = parts[0]
    shape[rule.axis] = start
    return Binding(rule, tuple(moves), {native: tuple(shape)}, {name: shapes[name] for name in heads})


def _expand_stack(rule: Stack, natives: tuple[str, ...], head: str, shape: Shape) -> Binding:
    by_expert = "{e}" in natives[0]
    if any(("{e}" in name) is not by_expert for name in natives):
        raise FamilyDefinitionError(
            f"Rule {rule}: some of its templates hold {{e}}, some do not.", remedy="Split the rule in two."
        )
    joined = list(shape[1:] if by_expert else shape)
    _check_axis(rule, joined)
    if joined[rule.axis] % len(natives):
        raise FamilyDefinitionError(
            f"Rule {rule}: axis {rule.axis} of '{head}' has {joined[rule.axis]} rows, not a multiple of {len(natives)}.",
            remedy="Give as many native templates as the head tensor has equal parts.",
        )
    part = joined[rule.axis] // len(natives)
    joined[rule.axis] = part
    moves: list[Move] = []
    for expert in range(shape[0]) if by_expert else (None,):
        lead: Index = () if expert is None else (expert,)
        for position, template in enumerate(natives):
            inside = _along(rule.axis, position * part, (position + 1) * part) if len(natives) > 1 else ()
            moves.append(Move(_put(template, {"e": str(expert)}), (), head, lead + inside))
    return Binding(rule, tuple(moves), {move.native: tuple(joined) for move in moves}, {head: shape})


def _check_axis(rule: Stack | Split, joined: Sequence[int]) -> None:
    """The axis along which parts lie, counted in one expert's tensor and from the front."""
    if not 0 <= rule.axis < len(joined):
        raise FamilyDefinitionError(
            f"Rule {rule}: expected an axis from 0 to {len(joined) - 1}, got {rule.axis}.",
            remedy="Count the axis from the front, without the axis of experts.",
        )


def _along(axis: int, start: int, stop: int) -> Index:
    return (*(slice(None) for _ in range(axis)), slice(start, stop))


def _put(template: str, fill: Mapping[str, str]) -> str:
    for key, value in fill.items():
        template = template.replace("{" + key + "}", value)
    return template
