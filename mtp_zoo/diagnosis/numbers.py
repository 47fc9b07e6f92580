"""Checks of the head's numbers; these read every one of its tensors, one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from mtp_zoo.checkpoint import DTYPES, TensorEntry, TensorReader
from mtp_zoo.diagnosis.finding import Finding
from mtp_zoo.diagnosis.subject import Subject
from mtp_zoo.progress import progress

if TYPE_CHECKING:
    from torch import Tensor

SUSPECTED_FROM = 4096
"""Fewest numbers of a matrix of which it is judged whether they are as initialised: fewer scatter too much."""

SIGMAS = 4.0
"""How far a moment of random numbers may lie from its expectation, in standard errors: one in 16,000 lies further."""

ROUNDING = 0.005
"""Relative error of a moment that rounding to BF16 (8 bits) may add to that."""

NORMAL_KURTOSIS, UNIFORM_KURTOSIS = 3.0, 1.8


def check_numbers(subject: Subject) -> Iterator[Finding]:
    """MZ401 to MZ403."""
    spread = subject.index.config.text.get("initializer_range")
    expected = float(spread) if isinstance(spread, int | float) else None
    wrong: dict[str, dict[str, str]] = {"MZ401": {}, "MZ402": {}, "MZ403": {}}
    reader = TensorReader(subject.index)
    entries = [entry for entry in subject.head if _is_readable(entry)]
    reader.fetch(entries)
    with progress("Reading the head", total=len(entries)) as advance:
        for entry in entries:
            value = reader.read(entry)
            for finding, detail in _judged(value, lambda matrix: initialised(matrix, expected)):
                wrong[finding][entry.name] = detail
            advance()
    for finding, tensors in wrong.items():
        if tensors:
            yield Finding(finding, {"tensors": tensors}, subject.graft)


def _is_readable(entry: TensorEntry) -> bool:
    """Whether torch has the dtype, and its numbers are floats."""
    name = DTYPES[entry.dtype][1]
    return name is not None and "float" in name and entry.nbytes > 0


def _judged(value: Tensor, looks_new: Callable[[Tensor], str | None]) -> Iterator[tuple[str, str]]:
    """Findings about one tensor; of a stack of matrices [.., R, C] each matrix is judged."""
    parts = value.reshape(-1, *value.shape[-2:]) if value.ndim > 2 else value[None]
    found: dict[str, list[str]] = {}
    for number, part in enumerate(parts):
        matrix = part.float()
        where = f"matrix {number} of {len(parts)}: " if value.ndim > 2 else ""
        bad = int((~matrix.isfinite()).sum())
        if bad:
            found.setdefault("MZ401", []).append(f"{where}{bad:,} of {matrix.numel():,} numbers")
        elif value.ndim > 1 and not matrix.any():
            found.setdefault("MZ402", []).append(f"{where}{list(matrix.shape)}")
        elif value.ndim > 1 and value.dtype.itemsize > 1 and (how := looks_new(matrix)):
            found.setdefault("MZ403", []).append(f"{where}{how}")
    for finding, details in found.items():
        more = f", and {len(details) - 1} more matrices" if len(details) > 1 else ""
        yield finding, details[0] + more


def initialised(matrix: Tensor, spread: float | None) -> str | None:
    """How a float matrix [R, C] looks as if it had been initialised, in words; None where it does not.

    Two rules are in use: normal numbers with the config's `initializer_range` as their standard deviation (transformers), and
    uniform ones up to 1/sqrt(C) on both sides (torch's own layers). Mean, standard deviation and kurtosis must all be
    those of the rule; trained matrices have longer tails, and another spread.

    Example: the standard deviation of 1024 x 2048 normal numbers is known to 1/sqrt(2 * 2097152) = 0.05 %, so a matrix of that
    size is suspected where its own is within 0.5 % + 4 * 0.05 % of `initializer_range`, and its kurtosis within
    3 * 0.5 % + 4 * sqrt(24 / 2097152) = 0.029 of 3.
    """
    count = matrix.numel()
    if count < SUSPECTED_FROM:
        return None
    mean = float(matrix.mean())
    second = float((matrix - mean).square().mean())
    kurtosis = float((matrix - mean).pow(4).mean()) / second**2 if second else 0.0
    rules = {"normal": (spread, NORMAL_KURTOSIS), "uniform": ((3 * matrix.shape[-1]) ** -0.5, UNIFORM_KURTOSIS)}
    for name, (expected, tails) in rules.items():
        if expected and _agree(mean, math.sqrt(second), kurtosis, count, expected, tails):
            return f"{name} numbers with mean {mean:.1e} and standard deviation {math.sqrt(second):.5f}"
    return None


def _agree(mean: float, deviation: float, kurtosis: float, count: int, expected: float, tails: float) -> bool:
    """Whether three moments of `count` numbers are those of a rule, within SIGMAS standard errors and the rounding.

    The relative error of a standard deviation is sqrt((kurtosis - 1) / 4n), that of normal numbers' kurtosis sqrt(24 / n),
    which is more than that of uniform ones.
    """
    errors: Mapping[str, float] = {
        "mean": SIGMAS * expected / math.sqrt(count),
        "deviation": expected * (ROUNDING + SIGMAS * math.sqrt((tails - 1) / (4 * count))),
        "kurtosis": tails * ROUNDING + SIGMAS * math.sqrt(24 / count),
    }
    return (
        abs(mean) < errors["mean"]
        and abs(deviation - expected) < errors["deviation"]
        and abs(kurtosis - tails) < errors["kurtosis"]
    )
