"""Key maps: one table of records between a checkpoint's tensor names and the head's, read in both directions.

A record never computes. It expands, for a concrete head, into moves: "this slice of that native tensor is this slice of
that head tensor". Loading copies native -> head along the moves, exporting copies head -> native along the same moves, so
there is no second table that could disagree, and load -> export is bit-exact by construction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from mtp_zoo.arguments import DEPTHS, LIST, MAPPING, TEXT, check_fields, whole
from mtp_zoo.arguments import Rule as ArgumentRule
from mtp_zoo.errors import FamilyDefinitionError, HeadMismatchError
from mtp_zoo.rules import Binding, Move, Rename, Rule, Shape, Skip, Split, Stack, claims, expand, pattern

if TYPE_CHECKING:
    import torch

__all__ = [
    "FLOAT_DTYPES",
    "Binding",
    "KeyMap",
    "LoadPlan",
    "Move",
    "Problem",
    "Rename",
    "Rule",
    "Shape",
    "Skip",
    "Split",
    "Stack",
    "TensorInfo",
    "claims",
    "native_tensors",
    "to_head",
    "to_native",
]

FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")
"""Stored dtypes a trainable head can have, in safetensors' spelling; anything else is a quantised form."""


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


RULES = ArgumentRule(
    "a list or tuple of rules (Rename, Stack, Split, Skip)",
    lambda value: LIST.accepts(value) and all(isinstance(each, get_args(Rule)) for each in value),
)


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
        FamilyDefinitionError: a head tensor that no rule fills, a native tensor that two rules claim, first-listed
            forms that fill a head tensor twice, or a rule that can't be expanded for these shapes.
    """

    rules: Sequence[Rule]
    head_shapes: Mapping[str, Shape]
    depths: int = 1
    first_layer: int = 0
    family: str = "?"
    _choices: Mapping[str, tuple[Binding, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(
            self,
            FamilyDefinitionError,
            rules=RULES,
            head_shapes=MAPPING,
            depths=DEPTHS,
            first_layer=whole(least=0),
            family=TEXT,
        )
        bindings: list[Binding] = []
        for depth in range(self.depths):
            for rule in self.rules:
                binding = None if isinstance(rule, Skip) else expand(rule, self._fill(depth), self.head_shapes)
                # A rule without placeholders is the same at every depth: depths share that tensor.
                if binding is not None and binding not in bindings:
                    bindings.append(binding)
        choices: dict[str, tuple[Binding, ...]] = dict.fromkeys(self.head_shapes, ())
        for binding in bindings:
            for name in binding.heads:
                choices[name] = (*choices[name], binding)
        object.__setattr__(self, "_choices", choices)
        self._check(bindings)

    def _check(self, bindings: Sequence[Binding]) -> None:
        """Each head tensor is filled, from native tensors that nothing else claims, and once in the default layout."""
        problems = [f"no rule fills '{name}'" for name, found in self._choices.items() if not found]
        claimed = Counter(name for binding in bindings for name in _claimed(binding))
        problems += [f"two rules claim '{name}'" for name, count in claimed.items() if count > 1]
        if not problems:
            filled = Counter(name for binding in self.layout() for name in binding.heads)
            problems += [f"the first forms of the table fill '{name}' twice" for name, n in filled.items() if n > 1]
        if problems:
            raise FamilyDefinitionError(
                f"Family '{self.family}': its key map and its head do not add up.",
                remedy="Let one Rename, Stack or Split rule fill each head tensor; list alternative forms behind it.",
                problems=sorted(problems),
            )

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
        bindings, problems = self._select(frozenset(entries))
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

    def layout(self, names: Iterable[str] = (), *, like: Iterable[Binding] = ()) -> tuple[Binding, ...]:
        """The stored form of each head tensor: the one whose names are present, else the one that `like` uses, else the
        first that the table lists.

        Args:
            names: native names of the checkpoint that is written to.
            like: the layout that the head came in; its layer numbers need not be this map's.
        """
        bindings, _ = self._select(frozenset(names), [binding.rule for binding in like])
        return tuple(bindings)

    def _select(self, names: frozenset[str], preferred: Sequence[Rule] = ()) -> tuple[list[Binding], list[Problem]]:
        """The layout in use: where a head tensor has several stored forms, the one whose names are present."""
        chosen: list[Binding] = []
        problems: list[Problem] = []
        for name, choices in self._choices.items():
            present = [binding for binding in choices if not names.isdisjoint(binding.natives)]
            if len(present) > 1:
                forms = " and ".join(next(iter(binding.natives)) for binding in present)
                problems.append(Problem("ambiguous", name, f"stored in more than one form: {forms}"))
            usual = [binding for binding in choices if binding.rule in preferred]
            binding = (present or usual or list(choices))[0]
            if binding not in chosen:
                chosen.append(binding)
        return chosen, problems

    def _skipped(self, names: Iterable[str]) -> dict[str, str]:
        patterns = [
            (pattern(rule.native, self._fill(depth)), rule.because)
            for depth in range(self.depths)
            for rule in self.rules
            if isinstance(rule, Skip)
        ]
        return {name: because for name in sorted(names) for pattern, because in patterns if pattern.fullmatch(name)}


def _claimed(binding: Binding) -> Iterable[str]:
    """Native names, each as often as it is taken as a whole."""
    return binding.natives if isinstance(binding.rule, Split) else (move.native for move in binding.moves)


def _compare(
    entries: Mapping[str, TensorInfo], expected: Mapping[str, Shape], skipped: Mapping[str, str]
) -> list[Problem]:
    problems: list[Problem] = []
    for name, shape in expected.items():
        entry = entries.get(name)
        if entry is None:
            problems.append(Problem("missing", name, f"expected shape {list(shape)}, found nothing"))
            continue
        if entry.shape != shape:
            problems.append(Problem("shape", name, f"expected {list(shape)}, found {list(entry.shape)}"))
        if entry.dtype not in FLOAT_DTYPES:
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


def to_native(bindings: Iterable[Binding], head: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The native tensors of a head, in its own dtypes; copies, so that none aliases the head."""
    return {name: value.clone() for name, value in native_tensors(bindings, head)}


def native_tensors(bindings: Iterable[Binding], head: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The native tensors of a head one by one, contiguous, without a graph, in its own dtypes.

    One that lies in a head tensor as it is stored comes as a view of it. None is held here while the next one is made, however
    large the tensor is in which a head holds its experts.
    """
    for binding in bindings:
        parts: dict[str, list[Move]] = {}
        for move in binding.moves:
            parts.setdefault(move.native, []).append(move)
        for native, moves in parts.items():
            yield native, _native(binding.natives[native], moves, head)


def _native(shape: Shape, moves: Sequence[Move], head: Mapping[str, torch.Tensor]) -> torch.Tensor:
    sources = [head[move.head].detach()[move.head_index] for move in moves]
    if not moves[0].native_index:
        return sources[0].contiguous()
    whole = sources[0].new_empty(shape)
    for move, source in zip(moves, sources, strict=True):
        whole[move.native_index] = source
    return whole


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
