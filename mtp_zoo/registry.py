"""The table of families, and the decision which family a checkpoint's head belongs to.

A family is one frozen record in one file of `mtp_zoo/families/`; registering it is all that the rest of the library, its
tests and its conformance cases need.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtp_zoo.errors import (
    DuplicateFamilyError,
    HeadCountError,
    HeadNotFoundError,
    UnknownFamilyError,
    UnresolvedFamilyError,
)
from mtp_zoo.modelconfig import ModelConfig
from mtp_zoo.rules import Rule, Skip, Stack, claims
from mtp_zoo.spec import HeadSpec

if TYPE_CHECKING:
    from mtp_zoo.blocks import BlockSource


@dataclass(frozen=True, kw_only=True)
class TargetNames:
    """How checkpoints name the tensors that a head borrows from its target.

    Attributes:
        prefixes: prefixes of the language model seen in published checkpoints; the first that fits is used.
        embedding, final_norm: names behind the prefix.
        lm_head: full names, the first present is used.
    """

    prefixes: tuple[str, ...]
    embedding: str
    final_norm: str
    lm_head: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of draft heads.

    Attributes:
        name: the family's name in this library.
        model_types: values of `model_type` (of the language model or of the whole) that the family covers.
        count_field: config field that declares the number of depths, or None where the family has no such field.
        scope: native name prefixes that belong to the head and to nothing else.
        layer: native prefix of one depth's block, with `{d}`; depths are counted by it.
        shared_parts: canonical parts of depth 0 that every depth uses (an MTP stack with a single fusion).
        spec: the conventions that shapes cannot show.
        rules: the key map.
        block: where the trainable block comes from.
        target: names of the tensors that the head borrows.
    """

    name: str
    model_types: tuple[str, ...]
    count_field: str | None
    scope: tuple[str, ...]
    layer: str
    shared_parts: tuple[str, ...]
    spec: HeadSpec
    rules: tuple[Rule, ...]
    block: BlockSource
    target: TargetNames

    def in_scope(self, name: str) -> bool:
        """Whether a checkpoint tensor of that name belongs to the head."""
        return name.startswith(self.scope)

    def claims(self, name: str) -> bool:
        """Whether some rule, at some depth and expert, names this tensor."""
        return any(claims(rule, name) for rule in self.rules)

    def depth_numbers(self, names: Iterable[str]) -> frozenset[int]:
        """0-based depths whose block tensors are among `names`; of a whole head 0, 1, .. without a gap."""
        # No head has a billion depths, and a longer number may be more than int() takes.
        pattern = re.compile(re.escape(self.layer).replace(r"\{d\}", "([0-9]{1,9})"))
        return frozenset(int(match.group(1)) for name in names if (match := pattern.match(name)))

    def depths_on_disk(self, names: Iterable[str]) -> int:
        """Number of depths that have a block tensor among `names`."""
        return len(self.depth_numbers(names))


@dataclass(frozen=True)
class Resolution:
    """Which head a checkpoint holds.

    Attributes:
        family: the family.
        depths: number of depths on disk.
        names: native names in the head's scope, sorted.
        notices: contradictions that do not stop a load, in words.
    """

    family: Family
    depths: int
    names: tuple[str, ...]
    notices: tuple[str, ...] = ()


_FAMILIES: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Add a family to the table and return it.

    Raises:
        DuplicateFamilyError: the name or one of the model_types is taken.
    """
    for other in _FAMILIES.values():
        taken = {other.name, *other.model_types} & {family.name, *family.model_types}
        if taken:
            raise DuplicateFamilyError(
                f"Registering family '{family.name}': {sorted(taken)} already belong to family '{other.name}'.",
                remedy="Give the new family another name, or extend the registered one.",
            )
    _FAMILIES[family.name] = family
    return family


def list_families() -> tuple[Family, ...]:
    """Every registered family, by name."""
    importlib.import_module("mtp_zoo.families")  # registers the built-in families
    return tuple(_FAMILIES[name] for name in sorted(_FAMILIES))


def get_family(name: str) -> Family:
    """The family called `name`.

    Raises:
        UnknownFamilyError: with the closest names and the whole list.
    """
    families = {family.name: family for family in list_families()}
    if name in families:
        return families[name]
    close = difflib.get_close_matches(name, families, n=3)
    hint = f" Did you mean {' or '.join(repr(match) for match in close)}?" if close else ""
    raise UnknownFamilyError(
        f"No family is called '{name}'.{hint}", remedy=f"Use one of: {', '.join(families)} (`mtp-zoo list` shows them)."
    )


def resolve(names: Iterable[str], config: ModelConfig, *, family: Family | None = None) -> Resolution:
    """Decide whose head a checkpoint holds: from tensor names first, the config second, model_type last.

    Args:
        names: every tensor name in the checkpoint.
        config: its configuration.
        family: skip the decision and only count, for callers who know.

    Raises:
        UnresolvedFamilyError: no family fits, several do, or tensors and model_type point to different families.
        HeadNotFoundError: the family is known and the checkpoint holds no head.
        HeadCountError: config and tensors disagree on the number of depths.
    """
    names = tuple(names)
    family = family or resolve_family(names, config)
    scoped = tuple(sorted(name for name in names if family.in_scope(name)))
    if not scoped:
        raise _no_head(family, names, config)
    depths, notices = _count(family, scoped, config)
    return Resolution(family, depths, scoped, notices)


def resolve_family(names: Iterable[str], config: ModelConfig) -> Family:
    """The family alone, also for a checkpoint whose head is damaged or gone.

    Raises:
        UnresolvedFamilyError: no family fits, several do, or tensors and model_type point to different families.
    """
    names = tuple(names)
    families = list_families()
    by_type = [family for name in config.model_types for family in families if name in family.model_types]
    fits = [family for family in families if _fits(family, names)]
    agreed = [family for family in fits if family in by_type]
    if len(agreed) == 1:
        return agreed[0]
    if by_type and not fits:
        # Either no head at all, or a damaged one: the family's plan will say precisely what is wrong.
        return by_type[0]
    known = ", ".join(family.name for family in families)
    if len(fits) == 1 and not config.model_types:
        return fits[0]
    raise UnresolvedFamilyError(
        f"Deciding the family of {config.path.parent}: its tensors fit {[family.name for family in fits] or 'no family'}, "
        f"its config says model_type {list(config.model_types)}.",
        remedy=f"Call load_head(..., family=...) with one of {known}, or register a family for this model_type.",
    )


def _fits(family: Family, names: tuple[str, ...]) -> bool:
    scoped = [name for name in names if family.in_scope(name)]
    return bool(scoped) and all(family.claims(name) for name in scoped)


def _count(family: Family, scoped: tuple[str, ...], config: ModelConfig) -> tuple[int, tuple[str, ...]]:
    """Depths on disk, checked against the declaration. Tensors outside any block count as one damaged depth."""
    numbers = sorted(family.depth_numbers(scoped)) or [0]
    found = len(numbers)
    if numbers[-1] != found - 1:
        raise HeadCountError(
            f"Counting the depths of {config.path.parent}: expected '{family.layer}' numbered from 0 without a gap, "
            f"found {numbers}.",
            remedy="Restore the missing depths from the original checkpoint.",
        )
    if family.count_field is None:
        return found, ()
    declared = config.count(family.count_field)
    if declared is None:
        return found, (f"config.json does not declare '{family.count_field}' although {found} depth(s) are on disk.",)
    if declared != found:
        raise HeadCountError(
            f"Counting the depths of {config.path.parent}: '{family.count_field}' says {declared}, "
            f"the tensors hold {found}.",
            remedy=f"Set '{family.count_field}' to {found}, or restore the missing tensors.",
        )
    return found, ()


def _no_head(family: Family, names: tuple[str, ...], config: ModelConfig) -> HeadNotFoundError:
    declared = config.count(family.count_field) if family.count_field else None
    says = f"'{family.count_field}' declares {declared}" if declared else "its config declares none"
    lost = [name for name in names if any(map(family.claims, _behind_prefixes(name, family)))]
    where = f" {len(lost)} tensors look like a head under another prefix, for example '{min(lost)}'." if lost else ""
    return HeadNotFoundError(
        f"Looking for the {family.name} head of {config.path.parent}: {says}, and none of its "
        f"{_expected(family, declared or 1)} tensors ({', '.join(family.scope)}*) is on disk.{where}",
        remedy="Take the head from the original checkpoint (training tools drop it on save), "
        'or ask for a new one with init="random".',
    )


def _behind_prefixes(name: str, family: Family) -> list[str]:
    """What `name` would be in the family's scope if something were cut off its front."""
    return [name[at + 1 :] for prefix in family.scope if (at := name.find(f".{prefix}")) >= 0]


def _expected(family: Family, depths: int) -> int:
    """Number of native tensors of a head, experts not counted apart."""
    templates = [
        template
        for rule in family.rules
        if not isinstance(rule, Skip)
        for template in (rule.native if isinstance(rule, Stack) else (rule.native,))
    ]
    return sum(depths if "{d}" in template else 1 for template in templates)
