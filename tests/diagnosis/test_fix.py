"""--fix: what is mended, what is left alone, and that no tensor is ever changed by it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import mtp_zoo as mz
from mtp_zoo.diagnosis.examination import doctor
from mtp_zoo.diagnosis.fix import mend
from mtp_zoo.errors import ExportError
from mtp_zoo.export_plan import PROVENANCE_NAME
from mtp_zoo.journal import rollback
from mtp_zoo.overlay import Overlay
from tests.diagnosis.cases import (
    CASES,
    NORM,
    ONE,
    SIDECAR,
    TWO,
    floats_in_fp8,
    head_tensors,
    moved,
    renamed,
    sidecar,
    tensors,
    true_map,
    whole,
    with_file,
)
from tests.exporting import index_of, same, snapshot, stored, train
from tests.tiny import tiny_config, tiny_tensors, write_checkpoint

FIXED = [name for name, case in CASES.items() if case.fixed]
LEFT = [n for n, case in CASES.items() if not case.fixed and not case.base and case.also.isdisjoint(FIXED)]


def fixed(root: Path) -> tuple[str, ...]:
    return mend(doctor(root))


def ids(root: Path) -> list[str]:
    """What is found, but for the way back that every mending leaves."""
    return [finding.id for finding in doctor(root).findings if finding.id != "MZ015"]


@pytest.mark.parametrize("name", FIXED)
def test_what_is_mended_is_sound_and_can_be_taken_back(name: str, tmp_path: Path) -> None:
    root = CASES[name].broken(tmp_path / "model")
    before = {file: content for file, (_, content) in snapshot(root).items() if content}
    assert fixed(root)
    assert ids(root) == []
    held = stored(root)
    assert held.keys() == tensors().keys()
    assert same(held, tensors(), held)
    assert fixed(root) == ()
    if name != "MZ014":
        rollback(root)
        assert {file: content for file, (_, content) in snapshot(root).items() if content} == before


@pytest.mark.parametrize("name", LEFT)
def test_what_takes_a_choice_is_left_alone(name: str, tmp_path: Path) -> None:
    root = CASES[name].broken(tmp_path / "model")
    before = snapshot(root)
    assert fixed(root) == ()
    assert snapshot(root) == before


def test_the_index_of_renamed_files_is_written_anew(tmp_path: Path) -> None:
    """https://github.com/Blaizzy/mlx-vlm/pull/1827"""
    root = renamed(tmp_path / "model")
    (finding,) = doctor(root).findings
    assert (finding.id, finding.facts["found_in"]) == ("MZ002", ["model-b.safetensors"])
    fixed(root)
    assert ids(root) == []
    expected = {name: "model-b.safetensors" if file == TWO else file for name, file in true_map().items()}
    assert index_of(root)["weight_map"] == expected


def test_names_that_are_lost_stay_listed(tmp_path: Path) -> None:
    """Else a second look would find nothing missing."""
    root = whole(tmp_path / "model", {NORM: None})
    index = index_of(root)
    index["weight_map"] |= {NORM: TWO, "mtp.fc.weight": ONE}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    assert ids(root) == ["MZ004", "MZ005", "MZ201"]
    fixed(root)
    assert ids(root) == ["MZ005", "MZ201"]
    assert index_of(root)["weight_map"] == true_map()


@pytest.mark.parametrize("proof", ["old", "new", "none"])
def test_of_copies_that_differ_the_proven_one_stays(proof: str, tmp_path: Path) -> None:
    """The stale copy is in the file that the index names, or in the one behind it; a hash decides, and nothing else does."""
    stale = {NORM: moved(tensors()[NORM])}
    root = with_file(tmp_path / "model", "old.safetensors", stale, listed=True)
    mz.export(mz.load_head(whole(tmp_path / "other")), tmp_path / "other", tmp_path / "out")
    record = json.loads((tmp_path / "out" / PROVENANCE_NAME).read_text())
    hashes = {"new": record["tensors"][NORM]["sha256"], "old": _sha256(stale[NORM]), "none": "0" * 64}
    record["tensors"][NORM]["sha256"] = hashes[proof]
    (root / PROVENANCE_NAME).write_text(json.dumps(record))
    assert ids(root) == ["MZ006"]
    fixed(root)
    if proof == "none":
        assert ids(root) == ["MZ006"]
        return
    assert ids(root) == []
    expected = {**tensors(), **(stale if proof == "old" else {})}
    assert same(stored(root), expected, expected)
    assert (root / "old.safetensors").exists() is (proof == "old")


def _sha256(value: torch.Tensor) -> str:
    import hashlib

    return hashlib.sha256(value.view(torch.uint8).numpy().tobytes()).hexdigest()


def test_a_second_copy_of_the_whole_head_is_removed(tmp_path: Path) -> None:
    """SGLang opens an unlisted mtp.safetensors of GLM-4.x, so the head would be loaded twice."""
    root = with_file(tmp_path / "model", SIDECAR, head_tensors(), listed=False)
    fixed(root)
    assert not (root / SIDECAR).exists()
    assert ids(root) == []


def test_a_file_of_unknown_tensors_is_never_listed(tmp_path: Path) -> None:
    root = with_file(tmp_path / "model", "consolidated.safetensors", {"wq": torch.ones(2)}, listed=False)
    index = index_of(root)
    del index["weight_map"][NORM]
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    fixed(root)
    assert index_of(root)["weight_map"] == true_map()
    assert ids(root) == ["MZ009"]


def test_a_shard_that_another_checkpoint_shares_is_replaced_not_written_to(tmp_path: Path) -> None:
    root = with_file(
        tmp_path / "model", "old.safetensors", {NORM: tensors()[NORM], "keep": torch.ones(2)}, listed=False
    )
    os.link(root / "old.safetensors", tmp_path / "shared.safetensors")
    fixed(root)
    assert load_file(tmp_path / "shared.safetensors").keys() == {NORM, "keep"}
    assert load_file(root / "old.safetensors").keys() == {"keep"}


def test_a_full_disk_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = CASES["MZ006"].broken(tmp_path / "model")
    before = snapshot(root)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "model.safetensors.index.json")

    diagnosis = doctor(root)
    monkeypatch.setattr(Overlay, "write", full)
    monkeypatch.setattr(Overlay, "rewrite", full)
    index = index_of(root)
    (root / "model.safetensors.index.json").write_text(json.dumps(index | {"metadata": {"total_size": 3}}))
    before = snapshot(root)
    with pytest.raises(ExportError, match="No space left on device"):
        mend(diagnosis)
    assert snapshot(root) == before


def test_a_hub_cache_is_never_mended(tmp_path: Path) -> None:
    """Its files are shared, and a snapshot stands for a commit."""
    root = sidecar(tmp_path / "models--org--name" / "snapshots" / "abc", listed=False)
    before = snapshot(root)
    with pytest.raises(ExportError, match="hub cache"):
        fixed(root)
    assert snapshot(root) == before


def test_side_files_are_mended_with_the_config(tmp_path: Path) -> None:
    """After it, both engines build the head as floats, and an export would have nothing more to say."""
    root = floats_in_fp8(tmp_path / "model", listed=False)
    fixed(root)
    assert ids(root) == []
    mended = json.loads((root / "config.json").read_text())["quantization_config"]
    mz.export(train(mz.load_head(root)), root, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"] == mended


def test_a_count_is_raised_and_never_lowered(tmp_path: Path) -> None:
    """A declared depth that is not on disk is lost: to declare less would hide that."""
    from tests.diagnosis.cases import depths

    few, many = depths(tmp_path / "few", declared=1, stored=3), depths(tmp_path / "many", declared=3, stored=1)
    assert ids(few) == ["MZ104"]
    assert fixed(few) == ("config.json: mtp_num_hidden_layers set to 3",)
    assert ids(few) == []
    assert fixed(many) == ()


def test_a_list_that_can_not_be_completed_is_not_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a scheme's list has no place for a module, nothing is written, and nothing is claimed."""
    from mtp_zoo.diagnosis import fix as fixing
    from mtp_zoo.quant_patch import QuantPatch

    root = write_checkpoint(tmp_path / "base", tiny_config(), tiny_tensors(tiny_config()))
    before = (root / "config.json").read_bytes()
    monkeypatch.setattr(fixing, "quantized_by", lambda *_: {"vllm": ["mtp.fc"]})
    monkeypatch.setattr(fixing, "plan_patch", lambda *_: QuantPatch(None, {}, ()))
    assert not any("float modules" in line for line in fixed(root))
    assert (root / "config.json").read_bytes() == before
