"""Key maps: one table of records between a checkpoint's tensor names and the head's, read in both directions.

A record never computes. It expands, for a concrete head, into moves: "this slice of that native tensor is this slice of
that head tensor". Loading copies native -> head along the moves, exporting copies head -> native along the same moves, so
there is no second table that could disagree, and load -> export is bit-exact by construction.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from mtp_zoo.errors import FamilyDefinitionError, HeadMismatchError

if TYPE_CHECKING:
    import torch

Shape: TypeAlias = tuple[int, ...]
Index: TypeAlias = tuple[int | slice, ...]

FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")
"""Stored dtypes a trainable head can have, in safetensors' spelling; anything else is a quantised form."""


@dataclass(frozen=True)
class Rename:
    """One native tensor is one head tensor."""

    native: str
    head: str


@dataclass(frozen=True)
class Stack:
    """Several native tensors are one head tensor.

    The natives are equal parts along `axis`, in order. Where the templates hold `{e}`, the parts of every expert are joined
    like that and the experts are stacked on a new leading axis, whose length the head's own shape gives.
    """

    native: tuple[str, ...]
    head: str
    axis: int = 0


@dataclass(frozen=True)
class Split:
    """One native tensor is several head tensors, laid end to end along `axis` in order."""

    native: str
    head: tuple[str, ...]
    axis: int = 0


@dataclass(frozen=True)
class Skip:
    """A native name that is known and deliberately not loaded; `*` in the template matches anything."""

    native: str
    because: str


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


class TensorInfo(Protocol):
    """What a plan needs to know of a stored tensor."""

    @property
    def name(self) -> str:
        """Name in the checkpoint."""
        ...

    @property
    def dtype(self) -> str:
        """Stored dtype, in safetensors' spelling."""
        ...

    @property
    def shape(self) -> Shape:
        """Stored shape."""
        ...


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a head's tensors."""

    kind: Literal["missing", "unexpected", "shape", "dtype", "ambiguous"]
    name: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}: {self.detail}"


@dataclass(frozen=True)
class LoadPlan:
    """What will be read, in which order, and where it goes.

    Attributes:
        bindings: the concrete rules that the checkpoint's layout selects.
        natives: native names to read, sorted.
        skipped: native names in scope that are left alone, with the reason.
        dtypes: stored dtype (safetensors' spelling) of every native tensor that is read.
    """

    bindings: tuple[Binding, ...]
    natives: tuple[str, ...]
    skipped: Mapping[str, str]
    dtypes: Mapping[str, str]


@dataclass(frozen=True)
class KeyMap:
    """A family's rules, bound to one head.

    Args:
        rules: the family's table.
        head_shapes: name and shape of every parameter and persistent buffer of the head.
        depths: number of depths that the head holds.
        first_layer: the trunk layer number of depth 0, for families whose head sits in the trunk's stack.
        family: the family's name, for messages.

    Raises:
        FamilyDefinitionError: a head tensor that no rule fills, or a rule that can't be expanded for these shapes.
    """

    rules: Sequence[Rule]
    head_shapes: Mapping[str, Shape]
    depths: int = 1
    first_layer: int = 0
    family: str = "?"
    _choices: Mapping[str, tuple[Binding, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        bindings = [
            binding
            for depth in range(self.depths)
            for rule in self.rules
            if not isinstance(rule, Skip)
            for binding in [_expand(rule, self._fill(depth), self.head_shapes)]
            if binding is not None
        ]
        choices: dict[str, tuple[Binding, ...]] = dict.fromkeys(self.head_shapes, ())
        for binding in bindings:
            for name in binding.heads:
                choices[name] = (*choices[name], binding)
        uncovered = sorted(name for name, found in choices.items() if not found)
        if uncovered:
            raise FamilyDefinitionError(
                f"Family '{self.family}': the key map fills no head tensor named as below.",
                remedy="Add a Rename, Stack or Split rule for each.",
                problems=uncovered,
            )
        object.__setattr__(self, "_choices", choices)

    def _fill(self, depth: int) -> dict[str, str]:
        return {"d": str(depth), "n": str(self.first_layer + depth)}

    def plan(self, stored: Iterable[TensorInfo]) -> LoadPlan:
        """Match the tensors in the head's scope against the table.

        Args:
            stored: every tensor of the checkpoint that lies in the family's scope, in any order.

        Raises:
            HeadMismatchError: with every missing, unexpected, misshapen and mistyped tensor at once.
        """
        entries = {entry.name: entry for entry in stored}
        bindings, problems = self._select(entries)
        expected = {name: shape for binding in bindings for name, shape in binding.natives.items()}
        skipped = self._skipped(entries.keys() - expected.keys())
        problems += _compare(entries, expected, skipped)
        problems += _mixed_dtypes(entries, bindings)
        if problems:
            raise HeadMismatchError(
                f"Family '{self.family}': the head's tensors do not match its key map "
                f"({len(expected)} expected, {len(entries)} found in scope, {len(problems)} problems).",
                remedy="Repair the checkpoint, or take the head from the original one; nothing was loaded.",
                problems=sorted(problems, key=str),
            )
        dtypes = {name: entries[name].dtype for name in expected}
        return LoadPlan(tuple(bindings), tuple(sorted(expected)), skipped, dtypes)

    def default_bindings(self) -> tuple[Binding, ...]:
        """The first layout that the table lists for each head tensor; for heads that come from no checkpoint."""
        bindings, _ = self._select({})
        return tuple(bindings)

    def _select(self, entries: Mapping[str, TensorInfo]) -> tuple[list[Binding], list[Problem]]:
        """The layout in use: where a head tensor has several stored forms, the one whose names are present."""
        chosen: list[Binding] = []
        problems: list[Problem] = []
        for name, choices in self._choices.items():
            present = [binding for binding in choices if binding.natives.keys() & entries.keys()]
            if len(present) > 1:
                forms = " and ".join(next(iter(binding.natives)) for binding in present)
                problems.append(Problem("ambiguous", name, f"stored in more than one form: {forms}"))
            binding = (present or list(choices))[0]
            if binding not in chosen:
                chosen.append(binding)
        return chosen, problems

    def _skipped(self, names: Iterable[str]) -> dict[str, str]:
        patterns = [
            (_pattern(rule.native, self._fill(depth)), rule.because)
            for depth in range(self.depths)
            for rule in self.rules
            if isinstance(rule, Skip)
        ]
        return {name: because for name in sorted(names) for pattern, because in patterns if pattern.fullmatch(name)}


def _compare(
    entries: Mapping[str, TensorInfo], expected: Mapping[str, Shape], skipped: Mapping[str, str]
) -> list[Problem]:
    problems: list[Problem] = []
    for name, shape in expected.items():
        entry = entries.get(name)
        if entry is None:
            problems.append(Problem("missing", name, f"expected shape {list(shape)}, found nothing"))
        elif entry.shape != shape:
            problems.append(Problem("shape", name, f"expected {list(shape)}, found {list(entry.shape)}"))
        elif entry.dtype not in FLOAT_DTYPES:
            problems.append(Problem("dtype", name, f"expected one of {FLOAT_DTYPES}, found {entry.dtype}"))
    for name in entries.keys() - expected.keys() - skipped.keys():
        shape = list(entries[name].shape)
        problems.append(Problem("unexpected", name, f"no rule claims it (shape {shape}, dtype {entries[name].dtype})"))
    return problems


def _mixed_dtypes(entries: Mapping[str, TensorInfo], bindings: Sequence[Binding]) -> list[Problem]:
    problems: list[Problem] = []
    for binding in bindings:
        dtypes = {entries[name].dtype for name in binding.natives if name in entries}
        if len(dtypes) > 1:
            problems.append(Problem("dtype", next(iter(binding.heads)), f"its parts are stored as {sorted(dtypes)}"))
    return problems


def _pattern(template: str, fill: Mapping[str, str]) -> re.Pattern[str]:
    """The template as a regular expression; placeholders not in `fill` match any number, `*` any text."""
    parts = re.split(r"(\{\w\}|\*)", template)
    out = [
        fill.get(part[1], r"\d+") if part.startswith("{") else (".*" if part == "*" else re.escape(part))
        for part in parts
    ]
    return re.compile("".join(out))


def claims(rule: Rule, name: str) -> bool:
    """Whether `name` could be one of the rule's native names at some depth and expert."""
    templates = rule.native if isinstance(rule, Stack) else (rule.native,)
    return any(_pattern(template, {}).fullmatch(name) for template in templates)


def _put(template: str, fill: Mapping[str, str]) -> str:
    for key, value in fill.items():
        template = template.replace("{" + key + "}", value)
    return template


def _expand(rule: Rename | Stack | Split, fill: Mapping[str, str], shapes: Mapping[str, Shape]) -> Binding | None:
    """The rule for one depth, or None where this head has no such tensor (an optional norm, another expert layout)."""
    heads = tuple(_put(name, fill) for name in (rule.head if isinstance(rule, Split) else (rule.head,)))
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
    moves: list[Move] = []
    start = 0
    for name in heads:
        stop = start + shapes[name][rule.axis]
        moves.append(Move(native, _along(rule.axis, start, stop), name, ()))
        start = stop
    shape = list(shapes[heads[0]])
    shape[rule.axis] = start
    return Binding(rule, tuple(moves), {native: tuple(shape)}, {name: shapes[name] for name in heads})


def _expand_stack(rule: Stack, natives: tuple[str, ...], head: str, shape: Shape) -> Binding:
    by_expert = "{e}" in natives[0]
    joined = list(shape[1:] if by_expert else shape)
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


def _along(axis: int, start: int, stop: int) -> Index:
    return (*(slice(None) for _ in range(axis)), slice(start, stop))


def to_native(bindings: Iterable[Binding], head: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The native tensors of a head, in its own dtypes.

    Whole and sliced tensors come back as contiguous copies, so they can be written without aliasing the head.
    """
    import torch

    out: dict[str, torch.Tensor] = {}
    for binding in bindings:
        for move in binding.moves:
            source = head[move.head].detach()[move.head_index]
            if not move.native_index:
                out[move.native] = source.clone(memory_format=torch.contiguous_format)
                continue
            if move.native not in out:
                out[move.native] = source.new_empty(binding.natives[move.native])
            out[move.native][move.native_index] = source
    return out


def to_head(bindings: Iterable[Binding], native: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The head tensors of a set of native tensors; the inverse of `to_native`, bit for bit."""
    out: dict[str, torch.Tensor] = {}
    for binding in bindings:
        for move in binding.moves:
            source = native[move.native][move.native_index]
            if move.head not in out:
                out[move.head] = source.new_empty(binding.heads[move.head])
            out[move.head][move.head_index] = source
    return out
