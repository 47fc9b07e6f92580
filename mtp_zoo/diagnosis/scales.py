"""Checks of quantised tensors: scales that are missing, left over or misshapen, and lists that say otherwise than the tensors.

Names of the published forms, each behind its module's name:

    fp8, compressed-tensors FP8     weight          weight_scale_inv or weight_scale
    modelopt NVFP4                  weight          weight_scale (and weight_scale_2)
    compressed-tensors, packed      weight_packed   weight_scale
    GPTQ, AWQ                       qweight         scales
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mtp_zoo.checkpoint import TensorEntry
from mtp_zoo.diagnosis.finding import Finding
from mtp_zoo.diagnosis.subject import Subject, is_float
from mtp_zoo.errors import ModelConfigError
from mtp_zoo.quant_ignore import HeadModules, method_of, quantized_by
from mtp_zoo.quantization import FP8, quantization_settings, schemes_of
from mtp_zoo.scaling import SCALE_DTYPES, SCALE_SUFFIXES, Scheme, scaled_name

CODED: Mapping[str, str] = {"qweight": "scales", "weight_packed": "weight_scale"}
"""Last names of tensors that hold nothing but codes, and of the scale that each has."""

CODES = (FP8, "F4", "U8", "I8")
"""Stored dtypes of a `weight` that means nothing without a scale."""

LEFT_OVER: Mapping[str, tuple[str, ...]] = {
    "scales": ("qweight",),
    "qzeros": ("qweight",),
    "weight_scale": ("weight", "weight_packed"),
    "weight_scale_inv": ("weight",),
    "weight_scale_2": ("weight",),
    "weight_global_scale": ("weight_packed",),
}
"""Last names of scales, and of the tensors of which one must stand beside them."""

WEIGHTS = ("weight", "gate_up_proj", "down_proj")
"""Last names of tensors that are floats or codes, by their dtype."""

RESTORE = "Restore tensors and scales together from the checkpoint that the quantisation tool wrote."


def check_scales(subject: Subject) -> Iterator[Finding]:
    """MZ301 to MZ306."""
    settings = quantization_settings(subject.index.config)
    missing = {entry.name: entry.file for entry in sorted(_unscaled(subject))}
    left = {entry.name: entry.file for entry in sorted(_left_over(subject))}
    if missing:
        yield Finding("MZ301", {"tensors": missing}, _restore(subject, missing))
    if left and (settings or any(name.endswith(SCALE_SUFFIXES) for name in left)):
        yield Finding("MZ302", {"tensors": left}, _restore(subject, left))
    try:
        misfits = dict(sorted(_misfits(subject)))
    except ModelConfigError as error:
        yield Finding("MZ101", {"reason": error.message}, error.remedy)
    else:
        if misfits:
            yield Finding("MZ303", {"tensors": misfits}, _restore(subject, misfits))
    if subject.untrainable is not None:
        fix = f"mtp-zoo graft BF16_RELEASE {subject.place} OUT --dtype bf16"
        yield Finding("MZ306", {"reason": subject.untrainable.message}, fix)
    elif subject.site is not None and subject.head:
        yield from _lists(subject)


def _restore(subject: Subject, names: Mapping[str, str]) -> str:
    inside = {entry.name for entry in subject.head}
    return subject.graft if inside.issuperset(names) else RESTORE


def _scale_names(last: str) -> tuple[str, ...]:
    """What the last name of a scale may be, beside a tensor of that last name."""
    return (CODED[last],) if last in CODED else tuple(last + suffix for suffix in SCALE_SUFFIXES)


def _scales(subject: Subject, last: str) -> Mapping[str, TensorEntry]:
    """Scales of the tensors of that last name, by module."""
    found: dict[str, TensorEntry] = {}
    for name in reversed(_scale_names(last)):
        found |= subject.by_last_name.get(name, {})
    return found


def _unscaled(subject: Subject) -> Iterator[TensorEntry]:
    """The tensors that mean nothing without a scale and have none."""
    for last, held in subject.by_last_name.items():
        if last not in CODED and last not in WEIGHTS:
            continue
        alone = held.keys() - _scales(subject, last).keys()
        coded = alone if last in CODED else [module for module in alone if held[module].dtype in CODES]
        names = _scale_names(last)
        yield from (held[one] for one in coded if subject.lost.isdisjoint(one + name for name in names))


def _left_over(subject: Subject) -> Iterator[TensorEntry]:
    """The scales beside no tensor, or beside one that is stored as floats."""
    parts = subject.by_last_name
    for last, held in parts.items():
        if last in LEFT_OVER:
            bases = LEFT_OVER[last]
            coded = {one for base in bases for one, entry in parts.get(base, {}).items() if not is_float(entry)}
            alone = held.keys() - coded
            yield from (held[one] for one in alone if subject.lost.isdisjoint(one + base for base in bases))
        elif last.endswith(SCALE_SUFFIXES):
            scaled = parts.get(scaled_name(last) or "", {})
            yield from (held[one] for one in held.keys() & scaled.keys() if is_float(scaled[one]))


def _misfits(subject: Subject) -> Iterator[tuple[str, str]]:
    """FP8 tensors whose scale has another dtype or shape than the config's scheme asks for."""
    scheme_of = schemes_of(subject.index.config)
    seen: dict[tuple[object, ...], str | None] = {}  # of thousands of tensors, a few differ in what is looked at
    for last, held in subject.by_last_name.items():
        for module, scale in _scales(subject, last).items():
            entry = held.get(module)
            if entry is None or entry.dtype != FP8 or (scheme := scheme_of(entry.name)) is None:
                continue
            key = (scheme.kind, scheme.block, entry.shape, scale.shape, scale.dtype)
            if key not in seen:
                seen[key] = _misfit(scheme, entry.shape, scale.shape, scale.dtype)
            if problem := seen[key]:
                yield scale.name, problem


def _misfit(scheme: Scheme, shape: tuple[int, ...], scale: tuple[int, ...], dtype: str) -> str | None:
    if dtype not in SCALE_DTYPES:
        return f"expected one of {SCALE_DTYPES}, found {dtype}"
    return scheme.misfit(shape, scale)


def _lists(subject: Subject) -> Iterator[Finding]:
    """What the config's list of exceptions says of the head, against how the head is stored."""
    assert subject.site is not None
    settings = quantization_settings(subject.index.config)
    floats, _ = subject.float_modules
    built = {engine: names for engine, names in quantized_by(settings, floats).items() if names}
    if built:
        yield Finding("MZ304", {"built_quantised_by": built}, subject.mend)
    excluded = _excluded(
        settings, HeadModules.of(subject.site, [(e.name, e.shape) for e in subject.codes], whole=False)
    )
    if excluded:
        fix = "Take these modules off the list of what is not quantised, in config.json and the files that repeat it."
        yield Finding("MZ305", {"built_as_floats_by": excluded}, fix)


def _excluded(settings: Mapping[str, object], stored: HeadModules) -> dict[str, list[str]]:
    """Modules that are stored quantised, and that an engine leaves as floats, under its names."""
    method = method_of(settings)
    if method is None or not stored.names:
        return {}
    found = {
        engine: [
            one.name
            for one in stored.asked(engine)
            if method.leaves_float(method.listed(settings, engine), one, engine, by_any_name=True)
        ]
        for engine in stored.reachable
    }
    return {engine: names for engine, names in found.items() if names}
