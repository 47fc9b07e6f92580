"""What a checkpoint's config says of quantisation, and the FP8 tensors of a head, each joined with its scale.

    stored tensors -> pair() -> float tensors as they are
                             -> FP8 weight + scale + scheme, which a plan sees as one BF16 tensor of the weight's shape

Read are FP8 heads in the `fp8` form (DeepSeek, Qwen: blocks, size by the config) and in compressed-tensors' (scales a row, a
block or a tensor). A head in any other form is refused by the name of its scheme; a float head inside a quantised checkpoint
is not quantised, whatever the config says of the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from mtp_zoo.errors import ModelConfigError, ScaleMismatchError, UnsupportedQuantizationError
from mtp_zoo.keymap import FLOAT_DTYPES, TensorInfo
from mtp_zoo.modelconfig import ModelConfig
from mtp_zoo.safetensors_header import TensorEntry
from mtp_zoo.scaling import SCALE_DTYPES, SCALE_SUFFIXES, Scheme, scaled_name

FP8 = "F8_E4M3"
"""Stored dtype of the quantised tensors that can be read."""

CONFIG_KEYS = ("quantization_config", "compression_config")
"""Where config.json may describe quantisation, at its top or under `text_config`; the second is an older spelling."""


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """An FP8 tensor and its scale: to a plan, one BF16 tensor.

    Attributes:
        weight, scale: the two stored tensors.
        scheme: what one scale covers.
    """

    weight: TensorEntry
    scale: TensorEntry
    scheme: Scheme

    @property
    def name(self) -> str:
        """Name of the weight."""
        return self.weight.name

    @property
    def dtype(self) -> str:
        """What it is decoded to where nothing else is asked for."""
        return "BF16"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.weight.shape


@dataclass(frozen=True)
class Paired:
    """The stored tensors of a head.

    Attributes:
        plain: those stored as floats.
        quantized: those stored as FP8, by the name of the weight.
    """

    plain: tuple[TensorEntry, ...]
    quantized: Mapping[str, QuantizedTensor]

    @property
    def logical(self) -> tuple[TensorInfo, ...]:
        """What a key map plans with."""
        return (*self.plain, *self.quantized.values())


def pair(entries: Iterable[TensorEntry], config: ModelConfig, what: str) -> Paired:
    """Join every FP8 tensor with its scale.

    Args:
        entries: the stored tensors, in any order.
        config: of their checkpoint.
        what: what they are, for the message.

    Raises:
        UnsupportedQuantizationError: a tensor is quantised in another form; names the scheme and every such tensor.
        ModelConfigError: the config describes FP8 in a way that can't be read.
        ScaleMismatchError: tensors and scales do not belong together; names every one, with its file.
    """
    by_name = {entry.name: entry for entry in entries}
    parts = [entry for entry in by_name.values() if entry.dtype == FP8 and scaled_name(entry.name) not in by_name]
    scales = {name: entry for entry in by_name.values() if (name := _scaled(entry.name, by_name))}
    scheme_of = schemes_of(config)
    schemes = {entry.name: scheme for entry in parts if (scheme := scheme_of(entry.name))}
    known = {*schemes, *(entry.name for entry in scales.values())}
    if any(entry.dtype not in FLOAT_DTYPES and name not in known for name, entry in by_name.items()):
        refuse_quantized(by_name.values(), config, what)
    problems = [*_faulty(by_name, schemes, scales), *_unscaled(by_name, schemes, scales)]
    if problems:
        raise ScaleMismatchError(
            f"Loading the {what} of {config.path.parent}: its FP8 tensors and their scales do not belong together.",
            remedy="Restore the tensors, their scales and config.json from the original checkpoint; nothing was loaded.",
            problems=sorted(problems),
        )
    taken = {scales[name].name for name in schemes}
    plain = (e for name, e in by_name.items() if name not in schemes and name not in taken)
    return Paired(tuple(plain), {n: QuantizedTensor(by_name[n], scales[n], scheme) for n, scheme in schemes.items()})


def _scaled(name: str, by_name: Mapping[str, TensorEntry]) -> str | None:
    """The tensor that this one scales, present or not; None where its name says nothing of a scale."""
    base = scaled_name(name)
    return base if base is not None and (base in by_name or base.endswith(".weight")) else None


def _faulty(
    by_name: Mapping[str, TensorEntry], schemes: Mapping[str, Scheme], scales: Mapping[str, TensorEntry]
) -> Iterator[str]:
    """FP8 tensors whose scale is missing, of another dtype or of another shape than their scheme has."""
    for name, scheme in schemes.items():
        weight, scale = by_name[name], scales.get(name)
        if scale is None:
            names = " or ".join(f"{name}{suffix}" for suffix in SCALE_SUFFIXES)
            yield f"{name} in {weight.file}: stored as {FP8}, and there is no {names}"
            continue
        if scale.dtype not in SCALE_DTYPES:
            yield f"{scale.name} in {scale.file}: expected a scale out of {SCALE_DTYPES}, found {scale.dtype}"
        if misfit := scheme.misfit(weight.shape, scale.shape):
            why = " (config.json gives no block size)" if scheme.kind == "tensor" else ""
            yield f"{scale.name} in {scale.file}: {misfit}{why}"


def _unscaled(
    by_name: Mapping[str, TensorEntry], schemes: Mapping[str, Scheme], scales: Mapping[str, TensorEntry]
) -> Iterator[str]:
    """Scales that scale nothing: their tensor is missing or float, has a second scale, or is no weight."""
    for entry in by_name.values():
        base = _scaled(entry.name, by_name)
        stem = entry.name.removesuffix("input_scale")
        if stem != entry.name and f"{stem}weight" in schemes:
            yield f"{entry.name} in {entry.file}: a fixed scale of activations, which training would make wrong"
        if base is None:
            continue
        if base not in by_name:
            yield f"{entry.name} in {entry.file}: a scale without its tensor {base}"
        elif base not in schemes:
            yield f"{entry.name} in {entry.file}: a scale beside {base}, which is stored as {by_name[base].dtype}"
        elif scales[base] is not entry:
            yield f"{entry.name} in {entry.file}: a second scale of {base}, beside {scales[base].name}"


def quantization_settings(config: ModelConfig) -> Mapping[str, Any]:
    """The quantisation that config.json describes; empty where it describes none."""
    for place in (config.raw, config.text):
        for key in CONFIG_KEYS:
            found = place.get(key)
            if isinstance(found, dict) and found:
                return cast("dict[str, Any]", found)
    return {}


def schemes_of(config: ModelConfig) -> Callable[[str], Scheme | None]:
    """How an FP8 tensor of some name is scaled, by the config; None where the config describes no form that can be read.

    Returns:
        a function of the tensor's name; raises ModelConfigError as `pair` does.
    """
    settings = quantization_settings(config)
    method = settings.get("quant_method")
    if method == "fp8":
        scheme = cache(lambda: _fp8_scheme(settings, config))
        return lambda _: scheme()
    if method == "compressed-tensors":
        return lambda name: _compressed_scheme(name.removesuffix(".weight"), settings, config)
    return lambda _: None


def _fp8_scheme(settings: Mapping[str, Any], config: ModelConfig) -> Scheme:
    size = settings.get("weight_block_size")
    return Scheme("tensor") if size is None else Scheme("block", _block(size, "weight_block_size", config))


def _compressed_scheme(module: str, settings: Mapping[str, Any], config: ModelConfig) -> Scheme | None:
    group = compressed_group(module, settings.get("config_groups"))
    weights = group.get("weights") or {}
    if (weights.get("type"), weights.get("num_bits")) != ("float", 8):
        return None
    strategy = weights.get("strategy")
    if strategy == "block":
        return Scheme("block", _block(weights.get("block_structure"), "block_structure", config))
    return Scheme(strategy) if strategy in ("channel", "tensor") else None


def compressed_group(module: str, groups: Any) -> Mapping[str, Any]:
    """The group of a compressed-tensors config that covers a module: one that names it before one that names linears."""
    found = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    for named in (True, False):
        for group in cast("list[dict[str, Any]]", found):
            targets = [str(target) for target in group.get("targets") or ()]
            if any(_targets(target, module) if named else target == "Linear" for target in targets):
                return group
    return {}


def _targets(target: str, module: str) -> bool:
    return bool(re.match(target[3:], module)) if target.startswith("re:") else target == module


def _block(value: Any, field: str, config: ModelConfig) -> tuple[int, int]:
    size: list[Any] = list(value) if isinstance(value, (list, tuple)) else []
    if len(size) != 2 or any(type(number) is not int or number < 1 for number in size):
        raise ModelConfigError(
            f"Reading {config.path}: expected '{field}' to be two positive integers, got {value!r}.",
            remedy=f"Set '{field}' to what the original config.json says.",
        )
    return (size[0], size[1])


def refuse_quantized(entries: Iterable[TensorInfo], config: ModelConfig, what: str) -> None:
    """Accept tensors that are all float; a BF16 head inside a quantised checkpoint is one.

    Args:
        entries: the stored tensors.
        config: of their checkpoint.
        what: what they are, for the message.

    Raises:
        UnsupportedQuantizationError: naming the scheme and every tensor stored in it.
    """
    quantized = [entry for entry in entries if entry.dtype not in FLOAT_DTYPES]
    if not quantized:
        return
    raise UnsupportedQuantizationError(
        f"Loading the {what} of {config.path.parent}: {len(quantized)} tensors are stored as {scheme_name(config)}.",
        remedy="Take them from the BF16 release of the same model.",
        problems=[f"{entry.name}: {entry.dtype} {list(entry.shape)}" for entry in quantized],
    )


def scheme_name(config: ModelConfig) -> str:
    """The checkpoint's own name for its scheme, for messages."""
    settings = quantization_settings(config)
    method = settings.get("quant_method") or settings.get("quant_algo")
    detail = settings.get("fmt") or settings.get("format") or settings.get("quant_algo")
    return (
        " ".join(dict.fromkeys(str(part) for part in (method, detail) if part))
        or "a scheme that config.json does not name"
    )
