"""What the checks look at: one opened checkpoint, its family, and where its head lies and what it should hold."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from mtp_zoo.checkpoint import CheckpointIndex, TensorEntry
from mtp_zoo.errors import (
    HeadMismatchError,
    ModelConfigError,
    MTPZooError,
    ScaleMismatchError,
    UnsupportedQuantizationError,
)
from mtp_zoo.keymap import FLOAT_DTYPES, Binding, Problem
from mtp_zoo.quant_ignore import HeadModules
from mtp_zoo.quantization import FP8, pair
from mtp_zoo.registry import Family, resolve_family
from mtp_zoo.rules import Skip, claims
from mtp_zoo.scaling import SCALE_SUFFIXES, scaled_name
from mtp_zoo.site import HeadSite, fused_layers, likely_site

if TYPE_CHECKING:
    from mtp_zoo.head import DraftHead


class Logical(NamedTuple):
    """A tensor as a key map sees it: a quantised one counts as BF16, its scale does not count."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Planned(NamedTuple):
    """The head on the meta device, its stored layout, and what does not fit."""

    head: DraftHead
    bindings: tuple[Binding, ...]
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class Subject:
    """One checkpoint under examination.

    Attributes:
        index: its headers, all of them.
        deep: whether tensors may be read whole.
    """

    index: CheckpointIndex
    deep: bool = False

    @property
    def place(self) -> str:
        """The checkpoint, as a command line names it."""
        return shlex.quote(self.index.source)

    @property
    def graft(self) -> str:
        """The command that puts the publisher's head in."""
        return f"mtp-zoo graft ORIGINAL {self.place} --in-place"

    @property
    def mend(self) -> str:
        """The command that mends what needs no choice."""
        return f"mtp-zoo doctor {self.place} --fix"

    @cached_property
    def lost(self) -> frozenset[str]:
        """Names that files hold which are not there or can't be read: findings of their own, and not missing as well."""
        faults = [f for f in self.index.faults if f.kind in ("missing_file", "corrupt_file")]
        return frozenset(name for fault in faults for name in fault.tensors) - self.index.entries.keys()

    @cached_property
    def meant(self) -> Collection[str]:
        """Names that files hold, or would hold if they could be read."""
        return {*self.index.entries, *self.lost} if self.lost else self.index.entries.keys()

    @cached_property
    def inside(self) -> tuple[str, ...]:
        """Of these, the names in the head's scope, sorted."""
        return tuple(sorted(self.site.inside(self.meant))) if self.site else ()

    @cached_property
    def by_last_name(self) -> Mapping[str, Mapping[str, TensorEntry]]:
        """All tensors, by what their names have behind the last dot, then by what they have before it, the dot included.

        Sixty thousand tensors have about twenty last names, so what tensors of one name lack is a difference of two sets.
        """
        found: defaultdict[str, dict[str, TensorEntry]] = defaultdict(dict)
        for name, entry in self.index.entries.items():
            cut = name.rfind(".") + 1
            found[name[cut:]][name[:cut]] = entry
        return dict(found)

    @cached_property
    def family(self) -> Family | MTPZooError:
        """The family, or why it can't be told."""
        try:
            return resolve_family(self.index.names, self.index.config)
        except MTPZooError as error:
            return error

    @cached_property
    def site(self) -> HeadSite | None:
        """Where the head lies, or should; None where the family can't be told."""
        if isinstance(self.family, MTPZooError):
            return None
        return likely_site(self.family, self.meant, self.index.config)

    @cached_property
    def head(self) -> tuple[TensorEntry, ...]:
        """The head's tensors on disk, by name; a layer behind the trunk is no head unless it has a head's fusion."""
        site = self.site
        if site is None or not self.has_head:
            return ()
        entries = self.index.entries
        return tuple(entries[name] for name in self.inside if name in entries)

    @cached_property
    def has_head(self) -> bool:
        """Whether some file holds a tensor of a head, or can't be read and should."""
        site = self.site
        if site is None:
            return False
        if site.family.in_stack:
            return bool(fused_layers(site.family, self.inside))
        return bool(self.inside)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """0-based numbers of the depths that have a block tensor on disk or in a file that can't be read."""
        return () if self.site is None else tuple(sorted(self.site.depth_numbers(self.inside)))

    @cached_property
    def holders(self) -> Mapping[str, tuple[TensorEntry, ...]]:
        """All copies of every tensor that more than one file holds."""
        twice = {name for fault in self.index.faults if fault.kind == "duplicate" for name in fault.tensors}
        found: dict[str, tuple[TensorEntry, ...]] = {}
        for header in self.index.storage.headers(self.index.files if twice else ()).read.values():
            for entry in header.entries:
                if entry.name in twice:
                    found[entry.name] = (*found.get(entry.name, ()), entry)
        return found

    @cached_property
    def copies(self) -> tuple[TensorEntry, ...]:
        """The head's copies of the model's embedding and lm_head."""
        assert self.site is not None
        rules = [rule for rule in self.site.family.rules if isinstance(rule, Skip) and rule.copy_of]
        return tuple(entry for entry in self.head if any(claims(rule, entry.name) for rule in rules))

    @cached_property
    def untrainable(self) -> UnsupportedQuantizationError | None:
        """Names the head's quantised form where it can't be read."""
        try:
            pair(self.head, self.index.config, "head")
        except UnsupportedQuantizationError as error:
            return error
        except (ModelConfigError, ScaleMismatchError):
            return None  # findings of their own
        return None

    @cached_property
    def undeclared(self) -> int | None:
        """How many depths config.json should declare, where it declares fewer and they follow each other without a gap.

        Raises:
            ModelConfigError: the declaration is no count.
        """
        field = self.site.family.count_field if self.site else None
        if field is None or not self.has_head:
            return None
        found = len(self.depths or (0,))
        follow = (self.depths or (0,))[-1] == found - 1
        return found if follow and (self.index.config.count(field) or 0) < found else None

    @cached_property
    def codes(self) -> tuple[TensorEntry, ...]:
        """The head's tensors that are stored as FP8, no scales among them."""
        return tuple(e for e in self.head if e.dtype == FP8 and scaled_name(e.name) not in self.index.entries)

    @cached_property
    def float_modules(self) -> tuple[HeadModules, dict[str, tuple[int, ...]]]:
        """The head's modules that are stored as floats, and name and shape of every such tensor."""
        assert self.site is not None
        scales = {f"{entry.name}{suffix}" for entry in self.codes for suffix in SCALE_SUFFIXES}
        plain = [e for e in self.head if is_float(e) and e.name not in scales and not self.left_alone(e.name)]
        floats = {entry.name: entry.shape for entry in plain}
        return HeadModules.of(self.site, floats.items(), whole=not self.codes), floats

    def left_alone(self, name: str) -> bool:
        """Whether the family leaves this tensor of the head where it is."""
        assert self.site is not None
        skips = [rule for rule in self.site.family.rules if isinstance(rule, Skip)]
        return any(claims(rule, one) for one in {name, scaled_name(name) or name} for rule in skips)

    @cached_property
    def planned(self) -> Planned | None:
        """The head that the tensors on disk should make up; None where there is none.

        Raises:
            MTPZooError: config.json describes no block that can be built.
        """
        if not self.head or self.site is None:
            return None
        from mtp_zoo.head import DraftHead
        from mtp_zoo.loader import key_map

        site, depths = self.site, max(self.depths, default=0) + 1
        head = DraftHead(site.family, self.index.config, depths=depths, first_layer=site.first_layer, device="meta")
        mapped, stored = key_map(head), logical(self.head)
        problems: Sequence[object] = ()
        try:
            mapped.plan(stored)
        except HeadMismatchError as error:
            problems = error.problems
        bindings = mapped.layout(tensor.name for tensor in stored)
        return Planned(head, bindings, tuple(one for one in problems if isinstance(one, Problem)))


def logical(entries: Sequence[TensorEntry]) -> list[Logical]:
    """The tensors without scales, those in a quantised form as the BF16 ones that they stand for."""
    names = {entry.name for entry in entries}
    kept = [entry for entry in entries if not is_scale(entry.name, names)]
    return [Logical(e.name, "BF16" if e.dtype == FP8 else e.dtype, e.shape) for e in kept]


def is_scale(name: str, names: set[str] | frozenset[str]) -> bool:
    """Whether a tensor is the scale of another one, present or lost."""
    base = scaled_name(name)
    return base is not None and (base in names or base.endswith(".weight"))


def is_float(entry: TensorEntry) -> bool:
    """Whether it is stored as floats."""
    return entry.dtype in FLOAT_DTYPES
