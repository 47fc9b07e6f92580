"""verify: what it finds in a checkpoint that was changed behind an export, and what it leaves alone."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtp_zoo.checkpoint import INDEX_NAME
from mtp_zoo.errors import SourceNotFoundError, UnsafeCheckpointError
from mtp_zoo.exporter import export
from mtp_zoo.loader import load_head
from mtp_zoo.verification import Verification, verify
from tests.exporting import CONFIG, FC, HEAD, LAST, ONE, TENSORS, TRUNK, TWO, make_base, train
from tests.stored_forms import Form, write
from tests.tiny import tiny_config, tiny_tensors, write_checkpoint

NORM, LAYER = "mtp.norm.weight", TRUNK[0]
HEAD_BYTES = sum(TENSORS[name].nbytes for name in HEAD)

Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, and the export of a trained head into it."""
    folder = tmp_path_factory.mktemp("exported")
    base = make_base(folder / "base")
    export(train(load_head(base)), base, folder / "out", training={"steps": 3})
    return folder


@pytest.fixture
def out(exported: Path, tmp_path: Path) -> Path:
    """A copy of the export that may be changed, beside the base: no file of it is the base's."""
    os.symlink(exported / "base", tmp_path / "base")
    return Path(shutil.copytree(exported / "out", tmp_path / "out"))


def rewritten(root: Path, file: str, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """A weight file with other tensors, and an index that tells the truth."""
    tensors = load_file(root / file)
    edit(tensors)
    save_file(tensors, root / file, metadata={"format": "pt"})
    index = json.loads((root / INDEX_NAME).read_text())
    kept = {name: place for name, place in index["weight_map"].items() if place != file}
    index["weight_map"] = {**kept, **dict.fromkeys(tensors, file)}
    (root / INDEX_NAME).write_text(json.dumps(index))


def edited(root: Path, file: str, edit: Callable[[Any], object]) -> None:
    content = json.loads((root / file).read_text())
    edit(content)
    (root / file).write_text(json.dumps(content))


def flip(root: Path, file: str, at: int) -> None:
    """Change one bit."""
    content = bytearray((root / file).read_bytes())
    content[at] ^= 1
    (root / file).write_bytes(content)


def test_fresh_export_is_right_and_links_are_not_read(exported: Path) -> None:
    found = verify(exported / "out", against=exported / "base")
    assert (found.ok, found.problems, found.notices) == (True, (), ())
    assert (found.head_tensors, found.trunk_tensors) == (len(HEAD), len(TRUNK))
    copied = sum(TENSORS[name].nbytes for name in TRUNK[10:])
    assert found.bytes_read == HEAD_BYTES + 2 * copied, "the shard that was linked holds TRUNK[:10]"
    alone = verify(exported / "out")
    assert (alone.ok, alone.trunk_tensors, alone.bytes_read) == (True, 0, HEAD_BYTES)


def test_export_whose_single_file_is_linked_under_another_name_is_right(tmp_path: Path) -> None:
    """An index beside `model.safetensors` would be overlooked, so the link gets a shard's name."""
    trunk = {name: TENSORS[name] for name in TRUNK}
    base = write_checkpoint(tmp_path / "base", CONFIG, trunk)
    export(load_head(write_checkpoint(tmp_path / "donor", CONFIG, TENSORS)), base, tmp_path / "out")
    found = verify(tmp_path / "out", against=base)
    assert (found.ok, found.trunk_tensors, found.bytes_read) == (True, len(TRUNK), HEAD_BYTES)


def test_head_among_the_trunks_layers_is_told_from_them(tmp_path: Path) -> None:
    base = write(tmp_path / "base", Form("deepseek_v3", "one_by_one", copies=True), shards=2)
    head = train(load_head(base))
    export(head, base, tmp_path / "out")
    found = verify(tmp_path / "out", against=base)
    assert (found.ok, found.problems) == (True, ())
    assert found.head_tensors == len(json.loads((tmp_path / "out" / "mtp_zoo.json").read_text())["tensors"])
    assert found.trunk_tensors > 0


CHANGES: dict[str, tuple[Change, str]] = {
    "a bit of the head": (
        lambda root: flip(root, LAST, -1),
        rf"'mtp\..*' of the head in {LAST} has other numbers than at the export",
    ),
    "another shape of the head": (
        lambda root: rewritten(root, LAST, lambda held: held.update({FC: held[FC].reshape(128, 64)})),
        rf"'{FC}' of the head is BF16 \[128, 64\], it was BF16 \[64, 128\]",
    ),
    "another dtype of the head": (
        lambda root: rewritten(root, LAST, lambda held: held.update({NORM: held[NORM].half()})),
        rf"'{NORM}' of the head is F16 \[64\], it was BF16 \[64\]",
    ),
    "a tensor of the head gone": (
        lambda root: rewritten(root, LAST, lambda held: held.pop(NORM)),
        rf"'{NORM}' of the head is gone",
    ),
    "a tensor more in the head": (
        lambda root: rewritten(root, LAST, lambda held: held.update({"mtp.extra": torch.ones(1)})),
        rf"'mtp.extra' in {LAST} was not in the head that was exported",
    ),
    "another name in the trunk": (
        lambda root: rewritten(root, ONE, lambda held: held.update({"model.x": held.pop(LAYER)})),
        f"{ONE} has another header than at the export",
    ),
    "a weight file gone": (lambda root: (root / TWO).unlink(), f"{TWO} is gone"),
    "a weight file more": (
        lambda root: save_file({"x": torch.ones(1)}, root / "more.safetensors"),
        "more.safetensors was not there at the export",
    ),
    "another count in the config": (
        lambda root: edited(root, "config.json", lambda config: config.update(mtp_num_hidden_layers=2)),
        "'mtp_num_hidden_layers' says 2, the tensors hold 1",
    ),
    "a tensor misplaced in the index": (
        lambda root: edited(root, INDEX_NAME, lambda index: index["weight_map"].update({FC: ONE})),
        f"{ONE}: the index puts '{FC}' in it, and it does not hold it; {LAST} does",
    ),
    "a truncated file": (lambda root: os.truncate(root / TWO, 5000), f"{TWO}: "),
    "a record that is none": (lambda root: (root / "mtp_zoo.json").write_text("{"), "mtp_zoo.json can't be read"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_behind_the_export_is_found_without_the_base(out: Path, name: str) -> None:
    change, says = CHANGES[name]
    assert verify(out).ok, "the neighbour"
    change(out)
    found = verify(out)
    assert not found.ok
    assert_says(found, says)


def assert_says(found: Verification, says: str) -> None:
    told = "\n".join(found.problems)
    assert re.search(says, told), told


def test_bit_of_the_trunk_is_found_against_the_base_alone(out: Path) -> None:
    flip(out, ONE, -1)
    assert verify(out).ok, "headers say nothing of numbers"
    found = verify(out, against=out.parent / "base")
    (problem,) = found.problems
    assert problem == f"'{TRUNK[9]}' in {ONE} has other bytes than the base's in {ONE}"


def test_trunk_of_another_base_is_found_tensor_by_tensor(exported: Path, tmp_path: Path) -> None:
    tensors = {name: value for name, value in TENSORS.items() if name != TRUNK[2]}
    tensors[TRUNK[0]] = TENSORS[TRUNK[0]].float()
    tensors[TRUNK[1]] = TENSORS[TRUNK[1]] + 1
    tensors["model.other.weight"] = torch.ones(1)
    base = write_checkpoint(tmp_path / "base", CONFIG, tensors)
    shape = list(TENSORS[TRUNK[0]].shape)
    assert sorted(verify(exported / "out", against=base).problems) == sorted(
        [
            f"'{TRUNK[0]}' is BF16 {shape}, the base has F32 {shape}",
            f"'{TRUNK[1]}' in {ONE} has other bytes than the base's in model.safetensors",
            f"'{TRUNK[2]}' in {ONE} is neither the base's nor the head's",
            "'model.other.weight' of the base is missing",
        ]
    )


def test_checkpoint_without_a_record_is_checked_by_its_headers(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", CONFIG, TENSORS)
    found = verify(base, against=base)
    assert found.ok
    assert found.notices == ("there is no mtp_zoo.json, so there are no hashes to compare with",)
    assert (found.head_tensors, found.trunk_tensors, found.bytes_read) == (0, len(TRUNK), 0)


def test_save_that_lost_its_head_fails_with_that_contradiction(tmp_path: Path) -> None:
    """https://github.com/unslothai/unsloth/pull/11042"""
    saved = write_checkpoint(tmp_path / "saved", tiny_config(), tiny_tensors(tiny_config(), head_depths=0))
    found = verify(saved)
    assert not found.ok
    assert_says(found, "'mtp_num_hidden_layers' declares 1, and none of its 15 tensors .* is on disk")


def test_ignore_list_that_forgets_parts_fails(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/pull/41994"""
    listed = ["re:.*mtp.*"]
    for ignore, ok in ((listed, True), (["lm_head", "mtp.fc"], False)):
        settings = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8}}},
            "ignore": ignore,
        }
        root = write_checkpoint(tmp_path / str(ok), {**CONFIG, "quantization_config": settings}, TENSORS)
        found = verify(root)
        assert found.ok is ok
        assert ok or "ignore list incomplete" in found.problems[0]


def test_record_that_is_a_link_out_of_the_directory_is_not_read(out: Path, tmp_path: Path) -> None:
    (out / "mtp_zoo.json").rename(tmp_path / "elsewhere.json")
    os.symlink("../elsewhere.json", out / "mtp_zoo.json")
    with pytest.raises(UnsafeCheckpointError, match=r"elsewhere\.json"):
        verify(out)


def test_what_is_no_checkpoint_is_an_error_and_not_a_finding(exported: Path, tmp_path: Path) -> None:
    for call in (lambda: verify(tmp_path), lambda: verify(exported / "out", against=tmp_path)):
        with pytest.raises(SourceNotFoundError):
            call()


def test_words_and_json_say_the_same(out: Path) -> None:
    flip(out, LAST, -1)
    found = verify(out)
    assert json.loads(json.dumps(found.as_dict())) == {
        "ok": False,
        "problems": list(found.problems),
        "notices": [],
        "head_tensors": len(HEAD),
        "trunk_tensors": 0,
        "bytes_read": HEAD_BYTES,
    }
    assert f"problem: {found.problems[0]}" in str(found)
    assert "no problems" in str(verify(out.parent / "base"))
