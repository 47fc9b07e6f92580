"""What an export says of a head's numbers: those that leave as they came, those that are none, those that must stay exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mtp_zoo as mz
from mtp_zoo.errors import ExportError
from tests.exporting import FC, HEAD, make_base, snapshot, stored, train
from tests.stored_forms import make, plain_form
from tests.tiny import write_checkpoint


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_base(tmp_path / "base")


def test_an_untouched_head_and_one_with_a_single_change_are_told(base: Path, tmp_path: Path) -> None:
    head = mz.load_head(base)
    report = mz.export(head, base, tmp_path / "equal")
    assert (report.tensors_changed, report.tensors_unchanged) == (0, len(HEAD))
    assert "the head is the base's own, bit for bit" in str(report)
    with torch.no_grad():
        head.get_parameter("depths.0.eh_proj.weight").add_(1.0)
    report = mz.export(head, base, tmp_path / "one")
    assert (report.tensors_changed, report.tensors_unchanged) == (1, len(HEAD) - 1)
    (notice,) = (each for each in report.notices if "trainable tensors are stored as in the base" in each)
    assert notice.startswith(f"{len(HEAD) - 1} trainable")
    assert FC not in notice
    report = mz.export(train(head), base, tmp_path / "all")
    assert (report.tensors_changed, report.tensors_unchanged) == (len(HEAD), 0)
    assert report.notices == ()


def test_frozen_tensors_that_stay_are_no_news(base: Path, tmp_path: Path) -> None:
    head = mz.load_head(base, trainable=["fusion"])
    with torch.no_grad():
        head.get_parameter("depths.0.eh_proj.weight").add_(1.0)
    assert mz.export(head, base, tmp_path / "out").notices == ()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_head_with_a_number_that_is_none_is_refused_unless_forced(base: Path, tmp_path: Path, value: float) -> None:
    head, before = train(mz.load_head(base)), snapshot(base)
    with torch.no_grad():
        head.get_parameter("depths.0.eh_proj.weight")[0, 0] = value
    with pytest.raises(ExportError, match="1 of its tensors hold a NaN or an infinity") as caught:
        mz.export(head, base, tmp_path / "out")
    assert caught.value.problems == (FC,)
    assert not (tmp_path / "out").exists()
    assert snapshot(base) == before
    with pytest.raises(ExportError, match="NaN or an infinity"):
        mz.export(head, base, in_place=True)
    assert {name: data for name, data in snapshot(base).items() if data[1]} == {n: d for n, d in before.items() if d[1]}
    report = mz.export(head, base, tmp_path / "out", force=True)
    assert f"1 tensors hold a NaN or an infinity: {FC}" in report.notices
    assert not torch.isfinite(stored(tmp_path / "out")[FC]).all()


def test_a_trained_router_keeps_its_update_where_fp32_is_asked_for(tmp_path: Path) -> None:
    """A step of 7e-4 is lost in BF16; the router must not be rounded."""
    config, tensors = make(plain_form("glm4_moe"))
    bf16 = {name: value.to(torch.bfloat16) if value.is_floating_point() else value for name, value in tensors.items()}
    base = write_checkpoint(tmp_path / "base", config, bf16)
    head = mz.load_head(base, dtype=torch.float32)
    router = "depths.0.block.mlp.gate.weight"
    with torch.no_grad():
        head.get_parameter(router).mul_(1.0007)
    mz.export(head, base, tmp_path / "out", dtype=torch.float32)
    found = mz.load_head(tmp_path / "out")
    assert found.get_parameter(router).dtype == torch.float32
    assert torch.equal(found.get_parameter(router), head.get_parameter(router))
    bias = next(name for name, _ in head.named_buffers() if name.endswith("e_score_correction_bias"))
    report = mz.export(head, base, tmp_path / "half", dtype=torch.float16)
    assert any("must not be rounded" in notice and "gate" in notice for notice in report.notices), bias
