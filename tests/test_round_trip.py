"""Load and export of an untouched head: the whole checkpoint comes out byte for byte, in every stored form of every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mtp_zoo as mz
from tests.exporting import same, stored
from tests.stored_forms import Form, all_forms, head_of, make
from tests.tiny import write_checkpoint


@pytest.mark.parametrize("shards", [1, 3], ids=["one file", "shards"])
@pytest.mark.parametrize("form", all_forms(), ids=str)
def test_an_untouched_head_leaves_every_byte_as_it_was(form: Form, shards: int, tmp_path: Path) -> None:
    """Read as stored from one file, and as FP32 master weights from shards; layouts: https://github.com/ISEEKYAN/mbridge/pull/145."""
    config, tensors = make(form)
    base = write_checkpoint(tmp_path / "base", config, tensors, shards=shards)
    head = mz.load_head(base, dtype=None if shards == 1 else torch.float32)
    mz.export(head, base=base, out=tmp_path / "out")
    out = stored(tmp_path / "out")
    assert out.keys() == tensors.keys()
    assert same(out, tensors, tensors)
    assert (tmp_path / "out" / "config.json").read_bytes() == (base / "config.json").read_bytes()
    loaded = {tensor.name for tensor in head.report.tensors} | set(head.report.skipped)
    assert loaded == set(head_of(form.family, tensors))


@pytest.mark.parametrize("form", all_forms(), ids=str)
def test_a_changed_weight_changes_the_heads_bytes_and_no_others(form: Form, tmp_path: Path) -> None:
    """The other half of the round trip: what comes out is the head's own, not the base's."""
    config, tensors = make(form)
    base = write_checkpoint(tmp_path / "base", config, tensors)
    head = mz.load_head(base)
    with torch.no_grad():
        for value in head.weights().values():
            value.copy_(value.flip(0) + 1)
    mz.export(head, base=base, out=tmp_path / "out")
    out = stored(tmp_path / "out")
    changed = {name for name in tensors if not same(out, tensors, [name])}
    assert changed == set(head_of(form.family, tensors)) - set(head.report.skipped)
