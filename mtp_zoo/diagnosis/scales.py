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
from mtp_zoo.quantization import FP8, quantization_settings, scheme_of
from mtp_zoo.scaling import SCALE_DTYPES, SCALE_SUFFIXES, scaled_name

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

ENDS_CODED = tuple(f".{name}" for name in CODED)
ENDS_WEIGHT = (".weight", ".gate_up_proj", ".down_proj")
ENDS_SCALE = (*(f".{name}" for name in LEFT_OVER), *SCALE_SUFFIXES)

RESTORE = "Restore tensors and scales together from the checkpoint that the quantisation tool wrote."


def check_scales(subject: Subject) -> Iterator[Finding]:
    """MZ301 to MZ306."""
    entries = subject.index.entries  # sixty thousand in a large model: each test begins with its cheapest part
    settings = quantization_settings(subject.index.config)
    missing = {name: entry.file for name, entry in entries.items() if _unscaled(entry, entries)}
    missing = {name: file for name, file in missing.items() if subject.lost.isdisjoint(_scales(name))}
    left = {name: entry.file for name, entry in entries.items() if _left_over(name, entries, subject.lost)}
    if missing:
        yield Finding("MZ301", {"tensors": missing}, _restore(subject, missing))
    if left and (settings or any(name.endswith(SCALE_SUFFIXES) for name in left)):
        yield Finding("MZ302", {"tensors": left}, _restore(subject, left))
    try:
        misfits = dict(_misfits(subject))
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


def _scales(name: str) -> tuple[str, ...]:
    """What the scale of a tensor of that name may be called."""
    stem, _, last = name.rpartition(".")
    return (f"{stem}.{CODED[last]}",) if last in CODED else tuple(f"{name}{suffix}" for suffix in SCALE_SUFFIXES)


def _unscaled(entry: TensorEntry, entries: Mapping[str, TensorEntry]) -> bool:
    coded = entry.name.endswith(ENDS_CODED) or (entry.dtype in CODES and entry.name.endswith(ENDS_WEIGHT))
    return coded and not any(scale in entries for scale in _scales(entry.name))


def _left_over(name: str, entries: Mapping[str, TensorEntry], lost: frozenset[str]) -> bool:
    """Whether this is a scale beside no tensor, or beside one that is stored as floats."""
    if not name.endswith(ENDS_SCALE):
        return False
    stem, _, last = name.rpartition(".")
    if last in LEFT_OVER:
        bases = [f"{stem}.{base}" for base in LEFT_OVER[last]]
        present = [base for base in bases if base in entries]
        return lost.isdisjoint(bases) and all(is_float(entries[base]) for base in present)
    base = entries.get(scaled_name(name) or "")
    return base is not None and is_float(base)


def _misfits(subject: Subject) -> Iterator[tuple[str, str]]:
    """FP8 tensors whose scale has another dtype or shape than the config's scheme asks for."""
    entries, config = subject.index.entries, subject.index.config
    coded = ((name, entry) for name, entry in entries.items() if entry.dtype == FP8)
    for name, entry in coded:
        scale = next((entries[one] for one in _scales(name) if one in entries), None)
        if scale is None or (scheme := scheme_of(name, config)) is None:
            continue
        if scale.dtype not in SCALE_DTYPES:
            yield scale.name, f"expected one of {SCALE_DTYPES}, found {scale.dtype}"
        elif misfit := scheme.misfit(entry.shape, scale.shape):
            yield scale.name, misfit


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
