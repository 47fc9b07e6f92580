"""The weight of the MTP loss beside a model's own loss, as a checkpoint's config.json states it.

Trainers write it under several names and in several places. A reader that knows one of them and falls back on 1.0 trains
with ten times the weight that the checkpoint was made with. So every known name is read, all must agree, and silence is
`None`, never a number: the caller's documented default then applies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

from mtp_zoo.errors import ModelConfigError

NAMES = ("mtp_loss_scaling_factor", "mtp_loss_weight")
"""Fields that hold the weight, at the top level and in `text_config`."""

NESTED = "mtp_config"
"""Object that may hold it too, there also without the prefix: `mtp_config.loss_scaling_factor`."""


def configured_lambda(config: Mapping[str, Any]) -> float | None:
    """The weight that a config.json gives to the MTP loss, or None where it names none.

    The number multiplies the mean over depths of the depths' mean losses, which is what `MTPObjective` computes, with
    weights that sum to one.

    Args:
        config: the whole file as a mapping (`model.config.to_dict()`), flat or with a `text_config`.

    Raises:
        ModelConfigError: a value that is no finite number >= 0, or several that differ; all of them are listed.

    Example:
        >>> configured_lambda({"text_config": {"mtp_config": {"loss_scaling_factor": 0.3}}})
        0.3
    """
    found = {name: value for name, value in _named(config) if value is not None}
    wrong = [f"{name}: {value!r} is no finite number >= 0" for name, value in found.items() if not _is_weight(value)]
    if not wrong and len(set(found.values())) > 1:
        wrong = [f"{name}: {value}" for name, value in found.items()]
    if wrong:
        raise ModelConfigError(
            f"Reading the weight of the MTP loss: expected one finite number >= 0 under whatever names, got {found}.",
            remedy="Pass the weight explicitly, or give every name in config.json the same value.",
            problems=wrong,
        )
    return float(next(iter(found.values()))) if found else None


def _named(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every known name of the weight with its value, in the order of the file's places."""
    for where, place in (("", config), ("text_config.", config.get("text_config"))):
        if not isinstance(place, Mapping):
            continue
        fields = cast("Mapping[str, Any]", place)
        yield from ((f"{where}{name}", fields.get(name)) for name in NAMES)
        nested = fields.get(NESTED)
        if isinstance(nested, Mapping):
            inner = cast("Mapping[str, Any]", nested)
            for name in (*NAMES, *(name.removeprefix("mtp_") for name in NAMES)):
                yield f"{where}{NESTED}.{name}", inner.get(name)


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
