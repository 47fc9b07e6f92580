"""Where a head lies in one checkpoint.

Most families keep their head under names of its own (`mtp.`). Others append it to the trunk's stack, as further layers: there
only the layer's number tells the head from the trunk.

Worked example, a family with `layer="model.layers.{n}."` in a model of 61 trunk layers: the head's depth 0 is layer 61, so
`model.layers.61.eh_proj.weight` is in scope and `model.layers.60.mlp.gate.weight` is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from mtp_zoo.errors import HeadLayerError
from mtp_zoo.modelconfig import ModelConfig
from mtp_zoo.rules import Rename, any_pattern

if TYPE_CHECKING:
    from mtp_zoo.registry import Family

TRUNK_LAYERS = "num_hidden_layers"
"""Config field that counts the trunk's layers; both engines look for an in-stack head behind them."""


@dataclass(frozen=True)
class HeadSite:
    """A family, placed in one checkpoint.

    Attributes:
        family: the family.
        first_layer: number of the layer that is depth 0; 0 for families that do not count in the trunk's stack.
    """

    family: Family
    first_layer: int = 0

    def in_scope(self, name: str) -> bool:
        """Whether a tensor of that name belongs to the head."""
        return bool(self.inside((name,)))

    def inside(self, names: Iterable[str]) -> list[str]:
        """Of these, the names that belong to the head, in their order; most of a large model's fall at their first letters."""
        start, scope = _literal_starts(self.family.scope), _numbered(self.family.scope)
        found = [match for name in names if name.startswith(start) and (match := scope.match(name))]
        return [one.string for one in found if one.lastindex is None or int(one[one.lastindex]) >= self.first_layer]

    def depth_numbers(self, names: Iterable[str]) -> frozenset[int]:
        """0-based depths whose block tensors are among `names`; of a whole head 0, 1, .. without a gap."""
        layer = _numbered((self.family.layer,))
        numbers = (int(found[1]) for name in names if (found := layer.match(name)))
        return frozenset(number - self.first_layer for number in numbers if number >= self.first_layer)

    def depths_on_disk(self, names: Iterable[str]) -> int:
        """Number of depths that have a block tensor among `names`."""
        return len(self.depth_numbers(names))


def likely_site(family: Family, names: Iterable[str], config: ModelConfig) -> HeadSite:
    """Where the head lies by its tensors, or, where there are none, by the config; never an error."""
    if not family.in_stack:
        return HeadSite(family)
    layers = fused_layers(family, names)
    return HeadSite(family, min(layers) if layers else config.count(TRUNK_LAYERS) or 0)


def find_site(family: Family, names: Iterable[str], config: ModelConfig) -> HeadSite:
    """Where the head lies, on which tensors and config must agree.

    Raises:
        HeadLayerError: `num_hidden_layers` is not the number of the first layer that holds a fusion.
    """
    site = likely_site(family, names, config)
    declared = config.count(TRUNK_LAYERS)
    if not family.in_stack or declared == site.first_layer:
        return site
    says = "is missing" if declared is None else f"is {declared}"
    held = (
        "no layer holds one" if declared is None and not site.first_layer else f"the first is layer {site.first_layer}"
    )
    raise HeadLayerError(
        f"Looking for the {family.name} head of {config.path.parent}: '{TRUNK_LAYERS}' {says}, so a head is expected to begin "
        f"at '{family.layer.replace('{n}', str(declared))}'; of the layers that hold a head's fusion, {held}.",
        remedy=f"Engines look where '{TRUNK_LAYERS}' points: set it to the number of the trunk's layers, and give the head's "
        "layers the numbers behind them.",
    )


def fused_layers(family: Family, names: Iterable[str]) -> frozenset[int]:
    """Numbers of the layers that hold what only a head has: fusion and output norm, beside any block."""
    pattern, ends = _fusion(family), _fusion_ends(family)
    return frozenset(int(found[1]) for name in names if name.endswith(ends) and (found := pattern.match(name)))


@cache
def _fusion_ends(family: Family) -> tuple[str, ...]:
    """What the names of an in-stack head's own tensors have behind the layer's number."""
    outer = [rule.native for rule in family.rules if isinstance(rule, Rename) and ".block." not in rule.head]
    return tuple(name.removeprefix(family.layer) for name in outer)


@cache
def _fusion(family: Family) -> re.Pattern[str]:
    """Matches an in-stack head's own tensors; group 1 is the layer's number."""
    ends = "|".join(map(re.escape, _fusion_ends(family)))
    return re.compile(f"{_numbered((family.layer,)).pattern}(?:{ends})$")


@cache
def _numbered(templates: tuple[str, ...]) -> re.Pattern[str]:
    """The templates as alternatives; groups are the numbers. No head has a billion layers, int() has a longest number."""
    parts = (re.sub(r"\\\{[dn]\\\}", "([0-9]{1,9})", re.escape(template)) for template in templates)
    return re.compile("|".join(parts))


@cache
def _literal_starts(templates: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(template.partition("{")[0] for template in templates)


def behind_prefix(family: Family, name: str) -> bool:
    """Whether `name` would be a head's if something were cut off its front."""
    if family.in_stack:
        return re.search(rf"\.(?:{_fusion(family).pattern})", name) is not None
    cut = [name[at + 1 :] for prefix in family.scope if (at := name.find(f".{prefix}")) >= 0]
    return any(any_pattern(template).fullmatch(rest) for rest in cut for template in family.templates)
