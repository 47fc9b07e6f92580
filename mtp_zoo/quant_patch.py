"""The quantisation config of a checkpoint whose head is written as floats: completed, so that engines leave the head alone.

Changed are config.json and the side files in which tools describe what is quantised: `hf_quant_config.json` (modelopt),
`quantize_config.json` (AutoGPTQ, GPTQModel), `quant_config.json` (AutoAWQ) and `quant_model_description.json` (Ascend). Other
JSON files that name modules of the head are reported, and copied as they are.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from mtp_zoo.checkpoint import CheckpointIndex
from mtp_zoo.json_text import parse_object, read_bounded
from mtp_zoo.keymap import FLOAT_DTYPES
from mtp_zoo.modelconfig import NESTED_KEY
from mtp_zoo.quant_ignore import METHODS, HeadModules, Method, method_of, quantized_by
from mtp_zoo.quantization import CONFIG_KEYS, quantization_settings, scheme_name
from mtp_zoo.spec import Engine

MODELOPT_FILE = "hf_quant_config.json"
ASCEND_FILE = "quant_model_description.json"
METHOD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""What tools write beside config.json, and engines read where that describes nothing; and the method of one that names none."""
ORDINARY = ("config.json", "generation_config.json", "tokenizer", "vocab", "model.safetensors.index", "mtp_zoo.json")
"""Beginnings of the names of JSON files that describe no quantisation."""

READ_LIMIT = 1 << 26
"""Bytes of a JSON file up to which it is searched for names: no description of a model is larger."""


@dataclass(frozen=True)
class QuantPatch:
    """What changes so that a float head is served as one.

    Attributes:
        config: content of the new config.json; None where the old one will do.
        files: content of every side file that changes.
        unheard: modules that an engine quantises although everything is listed.
        notices: what no file can say, and what was left to the reader, in words.
    """

    config: Mapping[str, Any] | None = None
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unheard: Mapping[Engine, list[str]] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


def plan_patch(index: CheckpointIndex, head: HeadModules, floats: Mapping[str, Sequence[int]]) -> QuantPatch:
    """Decide what has to change.

    Args:
        index: of the base.
        head: the float modules of the new head.
        floats: name and shape of every tensor of the new head that is stored as floats.
    """
    if not head.names:
        return QuantPatch()
    trunk = _float_modules(index, head)
    config = _patched_config(index.config.raw, head, trunk)
    settings = quantization_settings(index.config) if config is None else _first(config)
    unheard = quantized_by(settings, head, strict=True)
    files, notices = _side_files(index.root, head, floats, trunk)
    remarks = _remarks(settings, head, unheard, scheme_name(index.config))
    return QuantPatch(config, files, unheard, (*remarks, *notices))


def _first(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(iter(_descriptions(raw)), {})


def _descriptions(raw: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every description of quantisation in a config.json, to be read or changed in place."""
    for place in (raw, raw.get(NESTED_KEY)):
        for key in CONFIG_KEYS:
            found = cast("dict[str, Any]", place).get(key) if isinstance(place, dict) else None
            if isinstance(found, dict) and found:
                yield cast("dict[str, Any]", found)


def _float_modules(index: CheckpointIndex, head: HeadModules) -> list[str]:
    """The base's modules with a matrix, outside the head, all of whose tensors are floats."""
    kinds: dict[str, set[bool]] = {}
    matrices: set[str] = set()
    for name, entry in index.entries.items():
        module = name.rpartition(".")[0]
        if head.site.in_scope(name) or not module:
            continue
        kinds.setdefault(module, set()).add(entry.dtype in FLOAT_DTYPES)
        if len(entry.shape) > 1:
            matrices.add(module)
    return sorted(module for module, found in kinds.items() if found == {True} and module in matrices)


def _patched_config(raw: Mapping[str, Any], head: HeadModules, trunk: Sequence[str]) -> dict[str, Any] | None:
    patched = copy.deepcopy(dict(raw))
    changed = [complete(settings, head, trunk) for settings in _descriptions(patched)]
    return patched if any(changed) else None


def complete(settings: dict[str, Any], head: HeadModules, trunk: Sequence[str] = (), *, nested: bool = False) -> bool:
    """Complete the list of one description, in place; returns whether that took a change.

    Args:
        settings: the description.
        head: the float modules of the head.
        trunk: float modules outside the head, for a method whose engines infer them where there is no list.
        nested: whether this is the older form of modelopt, with a list of another name.
    """
    method = method_of(settings)
    if method is None or not any(quantized_by(settings, head, strict=True).values()):
        return False
    before = json.dumps(settings)  # in which the order of entries shows, where the first that matches decides
    listed = method.listed(settings)
    entries = [*method.entries(head), *(trunk if method.inferred and not listed else ())]
    usual = "ignore" if "ignore" in method.keys and not nested else method.keys[-1]
    present = [key for key in method.keys if key in settings]
    for key in dict.fromkeys([*present, usual]) if usual == "ignore" else present or [usual]:
        settings[key] = _extended(settings.get(key), listed, entries, method)
    layers = settings.get("quantized_layers")
    if isinstance(layers, dict):
        kept = cast("dict[str, Any]", layers)
        settings["quantized_layers"] = {k: v for k, v in kept.items() if not f"{k}.".startswith(head.prefixes)}
    return json.dumps(settings) != before


def _extended(old: Any, listed: Sequence[str], entries: Sequence[str], method: Method) -> Any:
    """The list with `entries`; a key that engines would read before the one that held the list gets that list too."""
    if method.first:
        return {**{entry: {} for entry in entries}, **(cast("dict[str, Any]", old) if isinstance(old, dict) else {})}
    own = [str(entry) for entry in cast("list[Any]", old)] if isinstance(old, list) else []
    return list(dict.fromkeys([*own, *listed, *entries]))


def _remarks(
    settings: Mapping[str, Any], head: HeadModules, unheard: Mapping[Engine, list[str]], scheme: str
) -> Iterator[str]:
    """What no list can say."""
    if not settings:
        return
    if method_of(settings) is None:
        yield f"the head is stored as floats, and where {scheme} lists what it leaves alone is not known: check its config"
    for engine, names in unheard.items():
        if names:
            yield f"{engine} builds {', '.join(names)} quantised, whatever the config lists"
    if "sglang" not in head.reachable:
        yield (
            "sglang builds this head under names of the trunk's layers, of which the config can't speak apart: serve it "
            "with --speculative-draft-model-quantization unquant"
        )


def _side_files(
    root: Path, head: HeadModules, floats: Mapping[str, Sequence[int]], trunk: Sequence[str]
) -> tuple[dict[str, Mapping[str, Any]], list[str]]:
    known: Mapping[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
        MODELOPT_FILE: lambda content: _modelopt(content, head),
        ASCEND_FILE: lambda content: _ascend(content, head, floats),
        **{name: partial(_own_file, head=head, trunk=trunk, usual=usual) for name, usual in METHOD_FILES.items()},
    }
    files: dict[str, Mapping[str, Any]] = {}
    notices: list[str] = []
    for path in sorted(root.glob("*.json")):
        if path.name.startswith(ORDINARY) or (text := _text(path)) is None:
            continue
        content = _parsed(text)
        if path.name in known and content is not None:
            changed = known[path.name](content)
            files |= {path.name: changed} if changed else {}
        elif named := next((name for name in head.names if name in text), None):
            notices.append(
                f"{path.name} names modules of the head, '{named}' for one, and is copied as it is: check it"
            )
    return files, notices


def _text(path: Path) -> str | None:
    try:
        return read_bounded(path, READ_LIMIT).decode("utf-8", errors="replace")
    except (OSError, ValueError):
        return None


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        return parse_object(text.encode())
    except (ValueError, RecursionError):
        return None


def _modelopt(content: dict[str, Any], head: HeadModules) -> dict[str, Any] | None:
    patched = copy.deepcopy(content)
    nested = isinstance(patched.get("quantization"), dict)
    settings = cast("dict[str, Any]", patched["quantization"]) if nested else patched
    if method_of(settings) is not METHODS["modelopt"]:
        return None
    return patched if complete(settings, head, nested=nested) else None


def _own_file(content: dict[str, Any], head: HeadModules, trunk: Sequence[str], usual: str) -> dict[str, Any] | None:
    """A method's settings in a file of their own; older tools leave out which method it is."""
    patched = copy.deepcopy(content)
    patched.setdefault("quant_method", usual)
    if not complete(patched, head, trunk):
        return None
    return {key: value for key, value in patched.items() if key in content or key != "quant_method"}


def _ascend(content: dict[str, Any], head: HeadModules, floats: Mapping[str, Sequence[int]]) -> dict[str, Any] | None:
    """The description says of every tensor how it is stored; engines ask for experts one by one, however they are stored."""
    stale = {name for name in content if head.site.in_scope(name) and name not in floats} if head.whole else set[str]()
    wanted = {name: "FLOAT" for tensor, shape in floats.items() for name in (tensor, *_experts(tensor, shape))}
    patched = {name: value for name, value in content.items() if name not in stale} | wanted
    return patched if patched != content else None


def _experts(tensor: str, shape: Sequence[int]) -> Iterable[str]:
    stem, _, last = tensor.rpartition(".experts.")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last, ())
    return (f"{stem}.experts.{e}.{part}.weight" for e in range(shape[0]) for part in parts)
