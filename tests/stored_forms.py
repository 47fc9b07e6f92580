"""Tiny checkpoints of every registered family, in every form in which its head can be stored.

Values come from the family's conformance case. The other forms are made of them with torch's own cat and stack, so that they
are an oracle for the key maps.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from safetensors.torch import load_file
from torch import Tensor

from mtp_zoo.registry import Family, get_family, list_families
from mtp_zoo.rules import Skip
from mtp_zoo.site import HeadSite
from mtp_zoo_conformance.cases import get_case
from mtp_zoo_conformance.tiny import write_checkpoint as write_case
from tests.tiny import write_checkpoint

Tensors: TypeAlias = dict[str, Tensor]
Experts: TypeAlias = Literal["none", "one_by_one", "packed"]

FAMILIES = [family.name for family in list_families()]
IN_STACK = [family.name for family in list_families() if family.in_stack]
WITH_EXPERTS = [family.name for family in list_families() if any("{e}" in template for template in family.templates)]

EXPERT = re.compile(r"(.*\.mlp\.experts\.)([0-9]+)\.(gate|up|down)_proj\.weight")


@dataclasses.dataclass(frozen=True)
class Form:
    """How a checkpoint stores its head."""

    family: str
    experts: Experts = "none"
    copies: bool = False
    tied: bool = False

    def __str__(self) -> str:
        parts = (self.family, self.experts, "copies" if self.copies else "", "tied" if self.tied else "untied")
        return "-".join(part for part in parts if part not in ("", "none"))


def all_forms() -> list[Form]:
    """Every form of every registered family."""
    forms: list[Form] = []
    for name in FAMILIES:
        experts: tuple[Experts, ...] = ("one_by_one", "packed") if name in WITH_EXPERTS else ("none",)
        copies = (False, True) if copy_rules(get_family(name)) else (False,)
        forms += [Form(name, *form) for form in itertools.product(experts, copies, (False, True))]
    return forms


def copy_rules(family: Family) -> list[Skip]:
    """The rules that leave copies of the target's matrices alone."""
    return [rule for rule in family.rules if isinstance(rule, Skip) and rule.copy_of]


def plain_form(family: str) -> Form:
    """A family's experts one by one, without copies, untied."""
    return Form(family, "one_by_one" if family in WITH_EXPERTS else "none")


def config_of(family: str, **fields: Any) -> dict[str, Any]:
    """The flat config.json of a family's first conformance variant, with other values in some fields."""
    config = copy.deepcopy(dict(get_case(family).variants[0].config))
    assert "text_config" not in config
    return {**config, **fields}


def make(form: Form, **fields: Any) -> tuple[dict[str, Any], Tensors]:
    """Config and tensors of a checkpoint, trunk and head."""
    config = config_of(form.family, tie_word_embeddings=form.tied, **fields)
    tensors = dict(_values(form.family))
    if form.tied:
        del tensors["lm_head.weight"]
    if form.experts == "packed":
        tensors = packed(tensors, site_of(form.family))
    if form.copies:
        tensors |= copies_of(form.family, tensors)
    return config, tensors


def write(folder: Path, form: Form, *, shards: int = 1, **fields: Any) -> Path:
    """The checkpoint of a form on disk."""
    config, tensors = make(form, **fields)
    return write_checkpoint(folder, config, tensors, shards=shards)


def site_of(family: str) -> HeadSite:
    """Where the head lies in the checkpoints made here."""
    found = get_family(family)
    return HeadSite(found, config_of(family)["num_hidden_layers"] if found.in_stack else 0)


def head_of(family: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """Names in the head's scope."""
    return [name for name in tensors if site_of(family).in_scope(name)]


def copies_of(family: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """Copies of embedding and lm_head under their names in the head."""
    embedding = tensors["model.embed_tokens.weight"]
    sources = {"embedding": embedding, "lm_head": tensors.get("lm_head.weight", embedding)}
    layer = str(site_of(family).first_layer)
    rules = copy_rules(get_family(family))
    return {rule.native.replace("{n}", layer): sources[str(rule.copy_of)].clone() for rule in rules}


def packed(tensors: Mapping[str, Tensor], site: HeadSite) -> Tensors:
    """The same tensors with the head's experts in two tensors a layer, gate rows first."""
    found = {name: EXPERT.fullmatch(name) for name in tensors if site.in_scope(name)}
    parts = {(m[1], int(m[2]), m[3]): tensors[name] for name, m in found.items() if m}
    out = {name: value for name, value in tensors.items() if not found.get(name)}
    for prefix in {prefix for prefix, _, _ in parts}:
        numbers = range(sum(key[::2] == (prefix, "down") for key in parts))
        pairs = [torch.cat([parts[prefix, e, "gate"], parts[prefix, e, "up"]]) for e in numbers]
        out[f"{prefix}gate_up_proj"] = torch.stack(pairs)
        out[f"{prefix}down_proj"] = torch.stack([parts[prefix, e, "down"] for e in numbers])
    return out


def renumbered(tensors: Mapping[str, Tensor], old: int, new: int) -> Tensors:
    """Copies of the tensors, layer `old` under the number `new`."""
    old_start, new_start = rf"^model\.layers\.{old}\.", f"model.layers.{new}."
    return {re.sub(old_start, new_start, name): value.clone() for name, value in tensors.items()}


@cache
def _values(family: str) -> Mapping[str, Tensor]:
    """Tensors of the family's first conformance variant, untied, its experts one by one."""
    case = get_case(family)
    variant = case.variants[0]
    with tempfile.TemporaryDirectory() as folder:
        write_case(case, variant, Path(folder))
        tensors = load_file(Path(folder) / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    embedding = tensors["model.embed_tokens.weight"]
    tensors.setdefault("lm_head.weight", torch.randn(embedding.shape, generator=generator).to(embedding.dtype))
    return tensors
