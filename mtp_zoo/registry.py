"""The table of families, and the decision which family a checkpoint's head belongs to.

A family is one frozen record in one file of `mtp_zoo/families/`; registering it is all that the rest of the library, its
tests and its conformance cases need.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from mtp_zoo.arguments import MAPPING, NAMES, SEVERAL, TEXT, check_fields, checked, having, instance, optional, tuple_of
from mtp_zoo.errors import (
    DuplicateFamilyError,
    FamilyDefinitionError,
    HeadCountError,
    HeadNotFoundError,
    RegistryError,
    UnknownFamilyError,
    UnresolvedFamilyError,
)
from mtp_zoo.modelconfig import ModelConfig
from mtp_zoo.rules import Rule, Skip, claims, heads_of, templates_of
from mtp_zoo.scaling import scaled_name
from mtp_zoo.site import HeadSite, behind_prefix, find_site, fused_layers, likely_site
from mtp_zoo.spec import Engine, HeadSpec

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

    @property
    def names(self) -> frozenset[str]:
        """Every name that one of them may have."""
        behind = (prefix + name for prefix in self.prefixes for name in (self.embedding, self.final_norm))
        return frozenset((*behind, *self.lm_head))


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of draft heads.

    Attributes:
        name: the family's name in this library.
        model_types: values of `model_type` (of the language model or of the whole) that the family covers.
        count_field: config field that declares the number of depths, or None where the family has no such field.
        scope: native name prefixes that belong to the head and to nothing else; with `{n}` where the head's depths are
            further layers of the trunk's stack.
        layer: native prefix of one depth's block, with `{d}` (the depth) or `{n}` (its number in the trunk's stack); depths
            are counted by it.
        shared_parts: canonical parts of depth 0 that every depth uses (an MTP stack with a single fusion).
        spec: the conventions that shapes cannot show.
        rules: the key map.
        block: where the trainable block comes from.
        target: names of the tensors that the head borrows.
        engines: class name of the draft module in each engine that serves the family.
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
    engines: Mapping[Engine, str]

    def __post_init__(self) -> None:
        check_fields(
            self,
            FamilyDefinitionError,
            name=TEXT,
            model_types=NAMES,
            count_field=optional(TEXT),
            scope=NAMES,
            layer=TEXT,
            shared_parts=tuple_of(TEXT),
            spec=instance("a HeadSpec", HeadSpec),
            rules=tuple_of(instance("a Rename, Stack, Split or Skip", *get_args(Rule))),
            block=having("a BlockSource", "build"),
            target=instance("a TargetNames", TargetNames),
            engines=MAPPING,
        )

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def in_stack(self) -> bool:
        """Whether the head's depths are further layers of the trunk's stack."""
        return "{n}" in self.layer

    @property
    def templates(self) -> tuple[str, ...]:
        """Every native name that a rule speaks of."""
        return tuple(template for rule in self.rules for template in templates_of(rule))

    def claims(self, name: str) -> bool:
        """Whether some rule, at some depth and expert, names this tensor, or the one that it is the scale of."""
        named = {name, scaled_name(name) or name}
        return any(claims(rule, one) for one in named for rule in self.rules)


@dataclass(frozen=True)
class Resolution:
    """Which head a checkpoint holds.

    Attributes:
        site: the family, and where its head lies.
        depths: number of depths on disk.
        names: native names in the head's scope, sorted.
        notices: contradictions that do not stop a load, in words.
    """

    site: HeadSite
    depths: int
    names: tuple[str, ...]
    notices: tuple[str, ...] = ()

    @property
    def family(self) -> Family:
        """The family."""
        return self.site.family


_FAMILIES: dict[str, Family] = {}


@checked("Registering a family", family=instance("a Family", Family))
def register(family: Family) -> Family:
    """Add a family to the table and return it.

    Raises:
        DuplicateFamilyError: the name or one of the model_types is taken.
        FamilyDefinitionError: its rules and its spec disagree on the copies that a head may hold, or it keeps an embedding of
            its own, which no head here has.
    """
    _check_copies(family)
    for other in _FAMILIES.values():
        taken = {other.name, *other.model_types} & {family.name, *family.model_types}
        if taken:
            raise DuplicateFamilyError(
                f"Registering family '{family.name}': {sorted(taken)} already belong to family '{other.name}'.",
                remedy="Give the new family another name, or extend the registered one.",
            )
    _FAMILIES[family.name] = family
    return family


def _check_copies(family: Family) -> None:
    """What engines ignore is a copy that a rule skips, an lm_head that they keep is filled by a rule, and what is absent has
    no rule."""
    copied = {rule.copy_of for rule in family.rules if isinstance(rule, Skip)}
    stated = {"embedding": family.spec.private_embedding, "lm_head": family.spec.private_head}
    wrong = [
        f"{role}: the spec says '{value}', {'a' if role in copied else 'no'} rule skips a copy of it"
        for role, value in stated.items()
        if (value == "ignored") is not (role in copied)
    ]
    fills = any(name.endswith(".lm_head.weight") for rule in family.rules for name in heads_of(rule))
    if (family.spec.private_head == "kept") is not fills:
        wrong.append(
            f"lm_head: the spec says '{stated['lm_head']}', {'a' if fills else 'no'} rule fills the head's own"
        )
    if family.spec.private_embedding == "kept":
        wrong.append("embedding: the spec says 'kept'; heads here embed with their target's embedding only")
    if wrong:
        raise FamilyDefinitionError(
            f"Registering family '{family.name}': its spec and its rules disagree on private tensors.",
            remedy="Skip(..., copy_of=...) where engines ignore the copy, Rename(..., 'depths.{d}.lm_head.weight') where they "
            "keep it, and say 'absent' where there is none.",
            problems=wrong,
        )


def list_families() -> tuple[Family, ...]:
    """Every registered family, by name."""
    importlib.import_module("mtp_zoo.families")  # registers the built-in families
    return tuple(_FAMILIES[name] for name in sorted(_FAMILIES))


@checked("Looking up a family", name=TEXT)
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


@checked(
    "Resolving a checkpoint's family",
    names=SEVERAL,
    config=instance("a ModelConfig", ModelConfig),
    family=optional(instance("a Family", Family)),
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
        HeadLayerError: config and tensors disagree on the layer where the head begins.
        HeadCountError: config and tensors disagree on the number of depths.
    """
    names = tuple(names)
    family = family or resolve_family(names, config)
    site = likely_site(family, names, config)
    scoped = tuple(sorted(site.inside(names)))
    if not scoped or (family.in_stack and not fused_layers(family, scoped)):
        raise _no_head(family, names, config)
    site = find_site(family, names, config)
    depths, notices = _count(site, scoped, config)
    return Resolution(site, depths, scoped, notices)


def resolve_family(names: Iterable[str], config: ModelConfig) -> Family:
    """The family alone, also for a checkpoint whose head is damaged or gone.

    Raises:
        UnresolvedFamilyError: no family fits, several do, or tensors and model_type point to different families.
    """
    names = tuple(names)
    families = list_families()
    by_type = [family for name in config.model_types for family in families if name in family.model_types]
    agreed = [family for family in dict.fromkeys(by_type) if _fits(family, names, config)]
    if len(agreed) == 1:
        return agreed[0]
    fits = [family for family in families if _fits(family, names, config)]
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


def needed_by_head(
    names: frozenset[str], config: ModelConfig, *, family: Family | None = None
) -> Callable[[str], bool]:
    """Which tensors a reader of the head may ask for: the head's own, and those that it borrows from its target.

    Where the family can't be told, all of them, so that an error can say what there is.
    """
    try:
        chosen = family or resolve_family(names, config)
    except RegistryError:
        return lambda _: True
    site, borrowed = likely_site(chosen, names, config), chosen.target.names
    return lambda name: name in borrowed or site.in_scope(name)


def _fits(family: Family, names: tuple[str, ...], config: ModelConfig) -> bool:
    site = likely_site(family, names, config)
    scoped = site.inside(names)
    return bool(scoped) and all(family.claims(name) for name in scoped)


def _count(site: HeadSite, scoped: tuple[str, ...], config: ModelConfig) -> tuple[int, tuple[str, ...]]:
    """Depths on disk, checked against the declaration. Tensors outside any block count as one damaged depth."""
    family, numbers = site.family, sorted(site.depth_numbers(scoped)) or [0]
    found = len(numbers)
    if numbers[-1] != found - 1:
        raise HeadCountError(
            f"Counting the depths of {config.path.parent}: expected '{family.layer}' numbered from {site.first_layer} "
            f"without a gap, found {[site.first_layer + number for number in numbers]}.",
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
    lost = [name for name in names if behind_prefix(family, name)]
    where = f" {len(lost)} tensors look like a head under another prefix, for example '{min(lost)}'." if lost else ""
    return HeadNotFoundError(
        f"Looking for the {family.name} head of {config.path.parent}: {says}, and {_none_of(family, config, declared or 1)} "
        f"is on disk.{where}",
        remedy="Take the head from the original checkpoint (training tools drop it on save), "
        'or ask for a new one with init="random".',
    )


def _none_of(family: Family, config: ModelConfig, depths: int) -> str:
    """What is not there, in words: the number of tensors, experts not counted apart, or the layer."""
    if family.in_stack:
        layer = family.layer.replace("{n}", str(likely_site(family, (), config).first_layer))
        return f"no '{layer}*' with a head's fusion"
    templates = [template for rule in family.rules if not isinstance(rule, Skip) for template in templates_of(rule)]
    count = sum(depths if "{d}" in template else 1 for template in templates)
    return f"none of its {count} tensors ({', '.join(family.scope)}*)"
