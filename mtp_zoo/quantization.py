"""Quantised heads: refused by the name of their scheme before anything is read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from mtp_zoo.errors import UnsupportedQuantizationError
from mtp_zoo.keymap import FLOAT_DTYPES, TensorInfo
from mtp_zoo.modelconfig import ModelConfig


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
    found = config.raw.get("quantization_config") or config.text.get("quantization_config")
    settings = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    method = settings.get("quant_method") or settings.get("quant_algo")
    detail = settings.get("fmt") or settings.get("format") or settings.get("quant_algo")
    return (
        " ".join(dict.fromkeys(str(part) for part in (method, detail) if part))
        or "a scheme that config.json does not name"
    )
