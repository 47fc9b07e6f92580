"""Tier keys: a checkpoint with a name, a shape or a byte that is not what it should be does not pass."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtp_zoo_conformance.case import ConformanceCase
from mtp_zoo_conformance.prepared import Prepared
from mtp_zoo_conformance.tiers import keys


def edited(prepared: Prepared, folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> Prepared:
    """The variant with another set of tensors on disk."""
    checkpoint = folder / "checkpoint"
    shutil.copytree(prepared.checkpoint, checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    edit(tensors)
    save_file(tensors, checkpoint / "model.safetensors")
    return dataclasses.replace(prepared, checkpoint=checkpoint)


def test_a_whole_checkpoint_passes(prepared: Prepared) -> None:
    cells = keys.judge(prepared)
    assert [(cell.stage, cell.verdict, cell.reason) for cell in cells] == [
        ("claimed", "pass", ""),
        ("bijective", "pass", ""),
        ("round_trip", "pass", ""),
    ]


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda t: t.pop("mtp.fc.weight"), "mtp.fc.weight"),
        (lambda t: t.update({"mtp.foo.weight": torch.ones(3)}), "mtp.foo.weight"),
        (lambda t: t.update({"mtp.norm.weight": torch.ones(3, dtype=torch.bfloat16)}), "mtp.norm.weight"),
    ],
    ids=["missing", "unexpected", "misshapen"],
)
def test_a_checkpoint_that_does_not_fit_the_map_differs_in_words(
    edit: Callable[[dict[str, Tensor]], Any], reason: str, prepared: Prepared, tmp_path: Path
) -> None:
    cells = keys.judge(edited(prepared, tmp_path, edit))
    assert {cell.verdict for cell in cells} == {"differs"}
    assert all(reason in cell.reason for cell in cells)


def test_names_that_the_case_lists_and_the_map_does_not_claim_differ(prepared: Prepared) -> None:
    def more(text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        return {**prepared.case.head_shapes(text), "mtp.extra.weight": (4,)}

    listed = dataclasses.replace(prepared, case=dataclasses.replace(prepared.case, head_shapes=more))
    assert keys.unclaimed(listed) == "claimed and listed names differ in ['mtp.extra.weight']"


@pytest.mark.parametrize(
    "change",
    [lambda value: value.clone().flip(0), lambda value: value.float(), lambda value: value.view(torch.float16)],
    ids=["value", "dtype", "same bytes under another dtype"],
)
def test_a_byte_or_a_dtype_that_changed_on_the_way_is_named(
    change: Callable[[Tensor], Tensor], prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = keys.to_native

    def changed(*args: Any) -> dict[str, Tensor]:
        natives = honest(*args)
        return {**natives, "mtp.norm.weight": change(natives["mtp.norm.weight"])}

    monkeypatch.setattr(keys, "to_native", changed)
    assert keys.changed_bytes(prepared) == "changed: ['mtp.norm.weight']"


def test_nan_is_equal_to_itself_byte_for_byte() -> None:
    odd = torch.tensor([torch.nan, -0.0])
    assert keys.same_bytes(odd, odd.clone())
    assert not keys.same_bytes(odd, torch.tensor([torch.nan, 0.0]))


def published(case: ConformanceCase, folder: Path, **shapes: tuple[int, ...]) -> ConformanceCase:
    """An inventory of the case's own head, some of its shapes changed."""
    config = case.variants[0].config
    rows = {**case.head_shapes(config), **{name.replace("__", "."): shape for name, shape in shapes.items()}}
    (folder / "made").mkdir()
    (folder / "made" / "config.excerpt.json").write_text(json.dumps(config))
    tensors = {name: ["model.safetensors", "BF16", list(shape), 0] for name, shape in rows.items()}
    (folder / "made" / "mtp_inventory.excerpt.json").write_text(json.dumps({"tensors": tensors}))
    return dataclasses.replace(case, inventories=("made",))


def test_a_published_list_is_claimed_whole_or_differs(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(keys.INVENTORIES, str(tmp_path))
    case = published(prepared.case, tmp_path)
    (cell,) = keys.judge_inventories(case)
    assert (cell.variant, cell.stage, cell.verdict) == ("made", "inventory", "pass")
    (tmp_path / "other").mkdir()
    monkeypatch.setenv(keys.INVENTORIES, str(tmp_path / "other"))
    (cell,) = keys.judge_inventories(published(prepared.case, tmp_path / "other", mtp__fc__weight=(64, 64)))
    assert cell.verdict == "differs"
    assert "mtp.fc.weight" in cell.reason


def test_an_inventory_that_is_not_there_is_no_pass(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(keys.INVENTORIES, raising=False)
    assert keys.judge_inventories(prepared.case) == []
    monkeypatch.setenv(keys.INVENTORIES, str(tmp_path))
    (cell,) = keys.judge_inventories(prepared.case)
    assert cell.verdict == "not_judged"
    assert "qwen3_6_27b" in cell.reason
