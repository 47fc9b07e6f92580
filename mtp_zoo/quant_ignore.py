"""Which modules of a head the serving engines leave unquantised, by the list in a checkpoint's quantisation config.

An engine builds a module with or without quantisation by its own name for it, before it looks at a tensor. Its names are not
the checkpoint's: it fuses projections, holds all experts in one module, and SGLang renames a head in the trunk's stack:

    checkpoint                                       vLLM                              SGLang
    model.layers.61.self_attn.q_a_proj               ..fused_qkv_a_proj                model.decoder.self_attn.
      and kv_a_proj_with_mqa                                                             fused_qkv_a_proj_with_mqa
    model.layers.61.mlp.experts.0.up_proj            model.layers.61.mlp.experts       model.decoder.mlp.experts
    mtp.layers.0.self_attn.q_proj, k_proj, v_proj    mtp.layers.0.self_attn.qkv_proj   the same

A float head whose modules are built quantised loads into the wrong slots, and drafts nothing that is accepted.

Sources, vLLM 0.32.0 model_executor/layers/quantization and SGLang 0.5.23 srt/layers/quantization: fp8.py, auto_awq.py and
awq/awq.py, auto_gptq.py and gptq/gptq.py, modelopt.py and modelopt_quant.py, compressed_tensors/utils.py, quark/utils.py; the
draft modules deepseek_mtp.py, glm4_moe_mtp.py, qwen3_5_mtp.py (vLLM), *_nextn.py, qwen3_*_mtp.py (SGLang).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast, get_args

from mtp_zoo.quantization import compressed_group
from mtp_zoo.site import HeadSite
from mtp_zoo.spec import Engine

FUSED: Mapping[Engine, Mapping[str, tuple[str, ...]]] = {
    "vllm": {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
        "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    },
    "sglang": {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
        "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    },
}
"""Modules that an engine makes out of several of the checkpoint's."""

ALWAYS_FLOAT = ("gate", "shared_expert_gate", "weights_proj", "eh_proj", "enorm", "hnorm", "norm")
"""Last names of modules that both engines build without quantisation, listed or not."""

DECODER = "model.decoder."
"""SGLang's prefix of the layer of a head that the checkpoint keeps in the trunk's stack."""

UNDER_TRUNK_NAMES = ("Qwen3NextForCausalLMMTP",)
"""SGLang's draft modules whose layers have names of trunk layers, so that no list can speak of the head alone."""

EXPERT = re.compile(r"(.*\.experts)(?:\..*)?$")


@dataclass(frozen=True)
class Asked:
    """A module, as an engine asks for it.

    Attributes:
        name: the engine's name.
        shards: names, with the engine's prefix, of the checkpoint's modules that it is made of; empty where it is one.
    """

    name: str
    shards: tuple[str, ...] = ()


@dataclass(frozen=True)
class HeadModules:
    """The float modules of a head that an engine might build quantised.

    Attributes:
        site: the head's family and place.
        names: the checkpoint's names of the modules with a matrix, sorted; experts as the whole that engines hold.
        whole: whether no module of the head is stored quantised.
    """

    site: HeadSite
    names: tuple[str, ...]
    whole: bool

    @classmethod
    def of(cls, site: HeadSite, floats: Iterable[tuple[str, Sequence[int]]], *, whole: bool) -> HeadModules:
        """From the name and shape of every tensor of the head that is stored as floats."""
        matrices = (name for name, shape in floats if len(shape) > 1)
        return cls(site, tuple(sorted({_module(name) for name in matrices})), whole)

    @property
    def reachable(self) -> tuple[Engine, ...]:
        """The engines in which the head has names of its own."""
        hidden = self.site.family.engines.get("sglang") in UNDER_TRUNK_NAMES
        return ("vllm",) if hidden else cast("tuple[Engine, ...]", get_args(Engine))

    @property
    def prefixes(self) -> tuple[str, ...]:
        """What the names of the head's modules, and of nothing else, begin with, in the checkpoint or an engine."""
        family = self.site.family
        if not family.in_stack:
            return family.scope
        depths = sorted(self.site.depth_numbers(f"{name}." for name in self.names)) or [0]
        layers = (family.layer.replace("{n}", str(self.site.first_layer + depth)) for depth in depths)
        return (*layers, *((DECODER,) if "sglang" in self.reachable else ()))

    def asked(self, engine: Engine, *, always_float: bool = False) -> tuple[Asked, ...]:
        """The modules as the engine asks for them; `always_float` includes those that no engine quantises."""
        names = set(self.names)
        found: dict[str, Asked] = {}
        for name in self.names:
            parent, _, last = name.rpartition(".")
            if not always_float and last in ALWAYS_FLOAT:
                continue
            fused = next((key for key, parts in FUSED[engine].items() if last in parts), "")
            shards = tuple(f"{parent}.{part}" for part in FUSED[engine].get(fused, ()))
            one = name if not names.issuperset(shards) or not shards else f"{parent}.{fused}"
            said = self._said(one, engine)
            found[said] = Asked(said, tuple(self._said(shard, engine) for shard in shards) if one != name else ())
        return tuple(found.values())

    def _said(self, name: str, engine: Engine) -> str:
        if engine == "vllm" or not self.site.family.in_stack:
            return name
        layer = next((prefix for prefix in self.prefixes if name.startswith(prefix)), None)
        behind = name.removeprefix(layer or "")
        if layer is None:
            return name
        return f"{DECODER}{behind}" if behind.startswith(("self_attn.", "mlp.")) else f"model.{behind}"

    def spelled(self) -> tuple[str, ...]:
        """Every name of every module: the checkpoint's, and each engine's, parts and fused."""
        asked = [one for engine in self.reachable for one in self.asked(engine, always_float=True)]
        return tuple(dict.fromkeys([*self.names, *(name for one in asked for name in (*one.shards, one.name))]))


def _module(name: str) -> str:
    """The module that holds a tensor; of an expert, what holds all of them."""
    expert = EXPERT.match(name)
    return expert[1] if expert else name.rpartition(".")[0]


Matches = Callable[[Sequence[str], str, Engine], bool]


@dataclass(frozen=True)
class Method:
    """How one quantisation method lists what it leaves alone.

    Attributes:
        keys: where the list may stand in the config; the first that holds something is what engines read. In a config.json,
            vLLM reads modelopt's list under the first of its keys only.
        matches: whether an engine finds a module of that name in the list.
        entries: what to add for these modules.
        first: whether an added entry has to stand in front, because the first that matches decides.
        inferred: engines that, where there is no list, find out from the tensors what is float.
    """

    keys: tuple[str, ...]
    matches: Matches
    entries: Callable[[HeadModules], Iterable[str]]
    first: bool = False
    inferred: tuple[Engine, ...] = ()

    def listed(self, settings: Mapping[str, Any], engine: Engine | None = None) -> tuple[str, ...]:
        """The list that an engine reads, or, for None, the list that there is."""
        alone = engine == "vllm" and self.matches is _modelopt and "quant_method" in settings
        for key in self.keys[:1] if alone else self.keys:
            if found := settings.get(key):
                return tuple(str(entry) for entry in found)
        return ()

    def leaves_float(self, entries: Sequence[str], asked: Asked, engine: Engine, *, by_any_name: bool) -> bool:
        """Whether the engine builds the module without quantisation.

        Args:
            entries: the list.
            asked: the module.
            engine: which engine.
            by_any_name: a fused module counts when the list names it or all its parts, as in an engine that knows what
                it has fused; else only when the list names both.
        """
        shards = [self.matches(entries, shard, engine) for shard in asked.shards]
        itself = self.matches(entries, asked.name, engine)
        if not shards:
            return itself
        return (itself or all(shards)) if by_any_name else (itself and all(shards))


def _fp8(entries: Sequence[str], name: str, engine: Engine) -> bool:
    experts = "experts" in name and any(name in entry for entry in entries if "experts" in entry)
    return experts or (
        name in entries if engine == "vllm" else _on_path([*entries, *map(_other_prefix, entries)], name)
    )


def _other_prefix(entry: str) -> str:
    """SGLang takes names with and without `model.` for the same."""
    return entry.removeprefix("model.") if entry.startswith("model.") else f"model.{entry}"


def _on_path(entries: Iterable[str], name: str) -> bool:
    return any(f".{entry.rstrip('.')}." in f".{name}." for entry in entries)


def _awq(entries: Sequence[str], name: str, _: Engine) -> bool:
    return any(entry in name for entry in entries)


def _gptq(entries: Sequence[str], name: str, engine: Engine) -> bool:
    if engine == "sglang" and EXPERT.match(name):
        return False  # experts are built quantised there, whatever is listed
    for entry in entries:
        if re.match(entry.removeprefix("-:").removeprefix("+:"), name):
            return entry.startswith("-:")
    return False


def _compressed(entries: Sequence[str], name: str, engine: Engine) -> bool:
    if name.endswith(".experts"):
        return all(_compressed(entries, f"{name}.0.{part}_proj", engine) for part in ("gate", "up", "down"))
    suffix = engine == "sglang" and any(name.endswith(f".{entry}") for entry in entries)
    return suffix or _equal_or_pattern(entries, name)


def _quark(entries: Sequence[str], name: str, _: Engine) -> bool:
    experts = name.endswith(".experts") and any(entry.startswith(f"{name}.") for entry in entries)
    return experts or _equal_or_pattern(entries, name)


def _equal_or_pattern(entries: Iterable[str], name: str) -> bool:
    return any(re.match(entry[3:], name) if entry.startswith("re:") else entry == name for entry in entries)


def _modelopt(entries: Sequence[str], name: str, engine: Engine) -> bool:
    if engine == "vllm":
        return any(entry in name or fnmatchcase(name, entry) for entry in entries)
    pieces = (name, *name.split("."))
    wildcards = (re.compile(entry.replace(".", r"\.").replace("*", ".*")) for entry in entries)
    return _on_path(entries, name) or any(wildcard.fullmatch(piece) for wildcard in wildcards for piece in pieces)


def _names(head: HeadModules) -> Iterable[str]:
    return head.spelled()


def _wildcards(head: HeadModules) -> Iterable[str]:
    if head.whole:
        return [f"{prefix}*" for prefix in head.prefixes]
    experts = [f"{name}.*" for name in head.spelled() if EXPERT.match(name)]
    return [*head.spelled(), *experts]


def _patterns(head: HeadModules) -> Iterable[str]:
    if head.whole:
        # Without a dot at its end the pattern matches the layer itself, by which SGLang asks whether a head is quantised.
        return [rf"^{re.escape(prefix.rstrip('.'))}(\.|$)" for prefix in head.prefixes]
    return [rf"^{re.escape(name)}(\.|$)" for name in head.spelled()]


METHODS: Mapping[str, Method] = {
    "fp8": Method(("ignored_layers", "modules_to_not_convert"), _fp8, _names),
    "awq": Method(("modules_to_not_convert",), _awq, _names, inferred=("vllm",)),
    "gptq": Method(("dynamic",), _gptq, lambda head: [f"-:{pattern}" for pattern in _patterns(head)], first=True),
    "compressed-tensors": Method(
        ("ignore",), _compressed, lambda head: [f"re:{pattern}" for pattern in _patterns(head)]
    ),
    "modelopt": Method(("ignore", "exclude_modules"), _modelopt, _wildcards),
    "quark": Method(("exclude",), _quark, lambda head: [f"re:{pattern}" for pattern in _patterns(head)]),
}
"""By `quant_method`; engine-side spellings such as `awq_marlin` begin with one of these."""


def method_of(settings: Mapping[str, Any]) -> Method | None:
    """The method of a quantisation config; None where its list is not known."""
    name = str(settings.get("quant_method") or ("modelopt" if settings.get("quant_algo") else "")).lower()
    return METHODS.get(name) or next(
        (method for known, method in METHODS.items() if name.startswith(f"{known}_")), None
    )


def quantized_by(settings: Mapping[str, Any], head: HeadModules, *, strict: bool = False) -> dict[Engine, list[str]]:
    """The modules of a float head that an engine would build quantised, under its names.

    Args:
        settings: the quantisation config; empty where the checkpoint has none.
        head: the head's float modules.
        strict: demand an entry for each under every name; else leave out what an engine finds out by itself.
    """
    method = method_of(settings)
    if method is None:
        return {}
    return {
        engine: [
            one.name
            for one in head.asked(engine)
            if any(_aimed_at(settings, name) for name in (one.name, *one.shards))
            and not method.leaves_float(entries, one, engine, by_any_name=not strict)
        ]
        for engine in head.reachable
        if (entries := method.listed(settings, engine)) or strict or engine not in method.inferred
    }


def _aimed_at(settings: Mapping[str, Any], name: str) -> bool:
    """Whether the config quantises modules of that name at all, before its list of exceptions is looked at."""
    if isinstance(layers := settings.get("quantized_layers"), dict):
        return any(str(layer) == name or str(layer).startswith(f"{name}.") for layer in layers)
    if isinstance(groups := settings.get("config_groups"), dict):
        one = f"{name}.0.gate_proj" if name.endswith(".experts") else name
        return bool(compressed_group(one, groups))
    return True
