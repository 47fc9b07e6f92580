"""Loading a head with experts holds each tensor once, and one stored tensor beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_zoo.loader import load_head
from tests.allocations import PeakBytes
from tests.stored_forms import WITH_EXPERTS, Form, Tensors, make
from tests.tiny import write_checkpoint

EXPERTS = 32
SMALL = 50_000
"""Bytes of what is computed and not stored: rotary frequencies, a cast bias."""

READ_OVERHEAD = 1.2
"""Bytes read over bytes of the head: headers of some 200 tiny tensors, and of the trunk's, weigh much here."""


def many_experts(form: Form) -> tuple[dict[str, Any], Tensors]:
    """The tiny checkpoint with 32 experts in its head instead of 8: its own ones, repeated."""
    config, tensors = make(form)
    field = "num_experts" if "num_experts" in config else "n_routed_experts"
    times = EXPERTS // config[field]
    config[field] = EXPERTS
    head = {name: value for name, value in tensors.items() if name.startswith(("mtp.", "model.layers.2."))}
    for name, value in head.items():
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj", ".mlp.gate.weight", "correction_bias")):
            tensors[name] = value.repeat(times, *[1] * (value.ndim - 1))
        elif ".experts." in name:
            start, _, rest = name.partition(".experts.")
            number, _, part = rest.partition(".")
            for again in range(1, times):
                tensors[f"{start}.experts.{int(number) + 8 * again}.{part}"] = value.clone()
    return config, tensors


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("experts", ["one_by_one", "packed"])
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_a_load_holds_the_head_and_one_stored_tensor(
    family: str, experts: Any, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    config, tensors = many_experts(Form(family, experts))
    base = write_checkpoint(tmp_path, config, tensors)
    load_head(base)  # what torch and transformers make once is made
    with PeakBytes() as seen:
        head = load_head(base, dtype=dtype)
    held = sum(value.nbytes for value in head.weights().values())
    stacked = max(value.nbytes for name, value in head.weights().items() if ".experts." in name)
    largest = max(tensor.nbytes for tensor in head.report.tensors)
    assert stacked > 5 * SMALL
    assert held <= seen.peak < held + largest + SMALL
    if experts == "one_by_one":  # nothing as large as a stacked tensor is held beside the head
        assert seen.peak < held + stacked / 4
    assert head.report.bytes_read < READ_OVERHEAD * head.report.head_bytes
