"""Published inventories: what real checkpoints list of their heads, and how much of that a family's key map claims.

An inventory is a folder with the tensors that a released checkpoint holds (names, dtypes, shapes) and, mostly, an excerpt of
its config. Nothing is computed: the head is made on the meta device.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtp_zoo.head import DraftHead
from mtp_zoo.keymap import LoadPlan
from mtp_zoo.loader import key_map
from mtp_zoo.modelconfig import NESTED_KEY, ModelConfig
from mtp_zoo.quantization import Paired, pair
from mtp_zoo.registry import Resolution, get_family, resolve
from mtp_zoo.safetensors_header import TensorEntry

CONFIGS = ("config.excerpt.json", "config.json")
LISTS = ("mtp_inventory.excerpt.json", "model.safetensors.index.json", "model.safetensors.index.mtp_excerpt.json")

NAMES_ONLY = "(float)"
"""Dtype of a list that gives names and no shapes."""

PACKED_DTYPES = {"weight_packed": "I32", "weight_shape": "I64", "weight_zero_point": "I32", "weight_scale": "BF16"}
"""An index gives no dtypes; these are what compressed-tensors stores packed integers in."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """How one inventory is read.

    Attributes:
        family: the registered family whose head it lists.
        config_of: the inventory whose config is used where this one has none.
        facts: fields of the language model that the config, or the excerpt of it, leaves out.
        partial: why the list is not whole, where it is not: what it leaves out is then not missing.
        because: where `config_of` and `facts` come from.
    """

    family: str
    config_of: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    partial: str = ""
    because: str = ""


QWEN3_5_ROPE = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}

SOURCES: Mapping[str, Source] = {
    "deepseek_r1": Source(family="deepseek_v3"),
    "deepseek_v3_awq": Source(
        family="deepseek_v3",
        config_of="deepseek_r1",
        partial="names of fusion, copies and experts only",
        because="DeepSeek-V3 and R1 have one architecture and one config",
    ),
    "glm_4_7_flash": Source(family="glm4_moe_lite"),
    "glm_5_1": Source(family="glm_moe_dsa"),
    "qwen3_5_0_8b_base": Source(
        family="qwen3_5",
        facts={
            "model_type": "qwen3_5_text",
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "num_hidden_layers": 24,
            "mtp_num_hidden_layers": 1,
            "rms_norm_eps": 1e-6,
            "rope_parameters": QWEN3_5_ROPE,
            "tie_word_embeddings": True,
            "vocab_size": 248320,
        },
        because="the release's config.json, by hand: the inventory has none",
    ),
    "qwen3_6_27b": Source(family="qwen3_5"),
    "qwen3_6_27b_nvfp4": Source(
        family="qwen3_5", config_of="qwen3_6_27b", because="the same model, its trunk quantised and its head not"
    ),
    "qwen3_6_27b_w4a16_mtp": Source(family="qwen3_5"),
    "qwen3_6_35b_a3b_nvfp4": Source(
        family="qwen3_5_moe",
        facts={
            "model_type": "qwen3_5_moe_text",
            "head_dim": 256,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-6,
            "rope_parameters": QWEN3_5_ROPE,
        },
        because="the excerpt leaves these out; they are those of the BF16 release's config.json",
    ),
    "qwen3_8_27b_fp8": Source(family="qwen3_5"),
    "qwen3_next_80b": Source(family="qwen3_next"),
}


@dataclass(frozen=True)
class Inventory:
    """One published list of tensors, with its config."""

    folder: Path
    source: Source
    config: ModelConfig
    entries: tuple[TensorEntry, ...]

    @property
    def names(self) -> list[str]:
        """Every name that is listed."""
        return [entry.name for entry in self.entries]


@dataclass(frozen=True)
class Claim:
    """What a family's key map makes of an inventory.

    Attributes:
        resolution: whose head it is, and where it lies.
        head: on the meta device.
        paired: the head's tensors, FP8 ones with their scales.
        plan: what would be read.
        published: names in the head's scope that are listed.
        claimed: of these, the ones that are read, scales among them, or left alone for a written reason.
        added: names that the list leaves out although the head has them, where it says that it is not whole.
    """

    resolution: Resolution
    head: DraftHead
    paired: Paired
    plan: LoadPlan
    published: frozenset[str]
    claimed: frozenset[str]
    added: frozenset[str]


def read_inventory(folder: Path, source: Source) -> Inventory:
    """The inventory in `folder`.

    Raises:
        FileNotFoundError: the folder, or the one whose config is used, lacks its file.
    """
    return Inventory(folder, source, read_config(folder, source), tuple(_entries(folder)))


def read_config(folder: Path, source: Source) -> ModelConfig:
    """The config under which the inventory in `folder` is read.

    Raises:
        FileNotFoundError: there is none, and no facts stand in for it.
    """
    home = folder if source.config_of is None else folder.parent / source.config_of
    raw = {} if source.facts and not _first(home, CONFIGS).exists() else _json(_first(home, CONFIGS))
    place = raw.setdefault(NESTED_KEY, {}) if NESTED_KEY in raw else raw
    place.update(source.facts)
    return ModelConfig(raw, folder / "config.json")


def _first(folder: Path, names: tuple[str, ...]) -> Path:
    """The first of the files that exists, or the first by name."""
    return next((folder / name for name in names if (folder / name).exists()), folder / names[0])


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _entries(folder: Path) -> Iterator[TensorEntry]:
    """The listed tensors; of an index only the names are known. What experts have in common is listed once."""
    listed = _json(_first(folder, LISTS))
    for name, file in listed.get("weight_map", {}).items():
        yield TensorEntry(name, PACKED_DTYPES.get(name.rpartition(".")[2], "BF16"), (), file, 0, 0)
    for name, (count, dtype, shape, file) in listed.get("tensors", {}).items():
        for number in range(count if "{E}" in name else 1):
            yield TensorEntry(name.replace("{E}", str(number)), dtype, tuple(shape), str(file), 0, 0)


def claim(inventory: Inventory) -> Claim:
    """Plan the inventory's head by the key map of its family, without a byte of weights.

    Raises:
        HeadNotFoundError, HeadCountError, HeadLayerError: the listed names and the config do not make a head.
        UnsupportedQuantizationError: the head is stored in a form that can't be trained.
        HeadMismatchError, ScaleMismatchError: names, shapes or dtypes that the key map does not have.
    """
    config = inventory.config
    resolution = resolve(inventory.names, config, family=get_family(inventory.source.family))
    site = resolution.site
    head = DraftHead(site.family, config, depths=resolution.depths, first_layer=site.first_layer, device="meta")
    listed = [entry for entry in inventory.entries if site.in_scope(entry.name)]
    whole = _completed(head, listed) if inventory.source.partial else listed
    paired = pair(whole, config, f"{site.family.name} head")
    plan = key_map(head).plan(paired.logical)
    scales = {tensor.scale.name for tensor in paired.quantized.values()}
    published = frozenset(entry.name for entry in listed)
    claimed = published & {*plan.natives, *plan.skipped, *scales}
    added = frozenset(entry.name for entry in whole) - published
    return Claim(resolution, head, paired, plan, published, claimed, added)


def _completed(head: DraftHead, listed: list[TensorEntry]) -> list[TensorEntry]:
    """A list of some names, with the shapes and the other names that the head has."""
    layout = key_map(head).layout([entry.name for entry in listed])
    shapes = {name: shape for binding in layout for name, shape in binding.natives.items()}
    names = dict.fromkeys([entry.name for entry in listed]) | dict.fromkeys(shapes)
    return [TensorEntry(name, "BF16", shapes.get(name, ()), "not listed", 0, 0) for name in names]
