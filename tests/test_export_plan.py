"""Which files an export makes, links and leaves out, and what its index lists."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mtp_zoo.checkpoint import CheckpointIndex
from mtp_zoo.errors import ExportError
from mtp_zoo.export_plan import natural_order
from mtp_zoo.exporter import export
from mtp_zoo.loader import load_head
from tests.exporting import CONFIG, FC, HEAD, LAST, MIXED, ONE, TENSORS, TRUNK, index_of, make_base, same, stored, train
from tests.tiny import write_checkpoint, write_index


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_base(tmp_path / "base")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_sidecar_that_the_index_left_out_is_listed_after_export(tmp_path: Path, out: Path) -> None:
    layout = {ONE: TRUNK, "mtp.safetensors": HEAD}
    base = write_checkpoint(tmp_path / "base", CONFIG, TENSORS, shards=layout, index=dict.fromkeys(TRUNK, ONE))
    export(load_head(base), base, out)
    assert CheckpointIndex.open(out).faults == ()
    assert not (out / "mtp.safetensors").exists()
    assert index_of(out)["weight_map"][FC] == LAST


def test_file_that_engines_do_not_open_in_the_base_stays_unopened(base: Path, out: Path) -> None:
    save_file({"layers.0.wq": torch.ones(2)}, base / "consolidated.safetensors")
    export(load_head(base), base, out)
    assert os.path.samefile(out / "consolidated.safetensors", base / "consolidated.safetensors")
    index = index_of(out)
    assert "layers.0.wq" not in index["weight_map"]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())


def test_tensor_that_the_index_left_out_of_a_listed_shard_is_listed_after_export(base: Path, out: Path) -> None:
    lost = TRUNK[3]
    write_index(base, {name: file for file, names in MIXED.items() for name in names if name != lost})
    export(load_head(base), base, out)
    assert index_of(out)["weight_map"][lost] == ONE
    assert CheckpointIndex.open(out).faults == ()


@pytest.mark.parametrize(
    "files",
    [
        ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        ("model.safetensors-00001-of-00001.safetensors",),
        ("layers-9.safetensors", "layers-10.safetensors", "outside.safetensors"),
        ("sub/zebra.safetensors", "model-1.safetensors"),
        ("z_mtp_head.safetensors",),
    ],
)
def test_head_shard_sorts_last_in_plain_and_natural_order(tmp_path: Path, out: Path, files: tuple[str, ...]) -> None:
    share = -(-len(TRUNK) // len(files))
    layout = {file: TRUNK[n * share : (n + 1) * share] for n, file in enumerate(files)}
    layout["mtp.safetensors"] = HEAD
    base = write_checkpoint(tmp_path / "base", CONFIG, TENSORS, shards=layout)
    export(load_head(base), base, out)
    names = set(index_of(out)["weight_map"].values())
    (head_file,) = {index_of(out)["weight_map"][name] for name in HEAD}
    assert names == {*files, head_file}
    assert head_file != "mtp.safetensors"
    assert max(names) == max(names, key=natural_order) == head_file
    assert max(names, key=os.path.basename) == head_file


def test_file_that_sorts_behind_every_name_is_told(tmp_path: Path, out: Path) -> None:
    base = write_checkpoint(
        tmp_path / "base", CONFIG, TENSORS, shards={"я.safetensors": TRUNK, "mtp.safetensors": HEAD}
    )
    with pytest.raises(ExportError, match=r"'я\.safetensors' sorts behind every name tried"):
        export(load_head(base), base, out)


def test_version_control_downloads_and_pickles_stay_behind(base: Path, out: Path) -> None:
    for name in (
        ".git/config",
        ".cache/huggingface/x.metadata",
        "pytorch_model-00001-of-00002.bin",
        "training_args.bin",
    ):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text("x")
    export(load_head(base), base, out)
    assert sorted(path.name for path in out.iterdir() if path.name.startswith(".") or path.suffix == ".bin") == [
        "training_args.bin"
    ]


def test_base_of_one_file_gets_an_index_and_no_stale_copy_of_the_head(tmp_path: Path, out: Path) -> None:
    """https://github.com/unslothai/unsloth-zoo/pull/35"""
    base = write_checkpoint(tmp_path / "base", CONFIG, TENSORS)
    export(train(load_head(base)), base, out)
    assert not (out / "model.safetensors").exists(), "many readers would open it alone and miss the head"
    assert set(index_of(out)["weight_map"].values()) == {"model-00001-of-00001.safetensors", LAST}
    assert same(stored(out), TENSORS, TRUNK)
