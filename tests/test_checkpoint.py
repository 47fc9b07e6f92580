"""CheckpointIndex and TensorReader: what is read, and what each way in which files and index can disagree leads to."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mtp_zoo.checkpoint import CheckpointIndex, TensorReader
from mtp_zoo.errors import (
    BrokenCheckpointError,
    ModelConfigError,
    MTPZooError,
    SourceNotFoundError,
    UnsafeCheckpointError,
)
from mtp_zoo.loader import load_head
from mtp_zoo.registry import get_family
from mtp_zoo.safetensors_header import encode_header
from mtp_zoo.shared import load_shared
from mtp_zoo.site import HeadSite
from tests.tiny import tiny_config, tiny_tensors, write_checkpoint, write_index

CONFIG = tiny_config()
TENSORS = tiny_tensors(CONFIG)
HEAD = sorted(name for name in TENSORS if name.startswith("mtp."))
TRUNK = sorted(name for name in TENSORS if not name.startswith("mtp."))
FC = "mtp.fc.weight"
OPEN_SECONDS = 2.0
"""CPU time allowed for 60,000 names; a busy machine uses about half of it."""
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SPLIT = {ONE: TRUNK, TWO: HEAD}
TRUE_MAP = {name: file for file, names in SPLIT.items() for name in names}


def is_head(name: str) -> bool:
    return HeadSite(get_family("qwen3_5")).in_scope(name)


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    return {str(p.relative_to(root)): (p.lstat().st_mtime_ns, p.lstat().st_size) for p in sorted(root.rglob("*"))}


@pytest.fixture
def split(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "base", CONFIG, TENSORS, shards=SPLIT)


def test_every_tensor_is_read_bit_for_bit_and_counted(split: Path) -> None:
    index = CheckpointIndex.open(split)
    reader = TensorReader(index)
    assert index.entries.keys() == index.names == TENSORS.keys()
    for name, entry in index.entries.items():
        assert torch.equal(reader.read(entry), TENSORS[name])
    assert reader.bytes_read == sum(tensor.nbytes for tensor in TENSORS.values())
    assert (index.faults, index.files, index.listed) == ((), (ONE, TWO), True)
    assert index.weight_map == TRUE_MAP


def test_raw_yields_the_stored_bytes_in_chunks(split: Path) -> None:
    index = CheckpointIndex.open(split)
    pieces = [bytes(piece) for piece in TensorReader(index).raw(index.entries[FC], chunk=1000)]  # one buffer for all
    assert [len(piece) for piece in pieces] == [1000] * 16 + [384]
    assert b"".join(pieces) == TENSORS[FC].view(torch.uint8).numpy().tobytes()


def test_scalars_empty_tensors_and_parameters_are_filled_in_place(tmp_path: Path) -> None:
    odd = {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "flags": torch.tensor([True, False])}
    index = CheckpointIndex.open(write_checkpoint(tmp_path, CONFIG, odd))
    reader = TensorReader(index)
    assert all(torch.equal(reader.read(index.entries[name]), value) for name, value in odd.items())
    parameter = torch.nn.Parameter(torch.zeros(()))
    reader.read_into(index.entries["scalar"], parameter)
    assert parameter.item() == 3.5


@pytest.mark.parametrize("shards", [1, 40])
def test_sixty_thousand_names_are_opened_in_two_seconds_and_without_torch(tmp_path: Path, shards: int) -> None:
    """https://github.com/safetensors/safetensors/issues/668"""
    names = [f"model.layers.{k // 300}.mlp.experts.{k % 300}.down_proj.weight" for k in range(60_000)]
    size = len(names) // shards
    layout = {f"model-{n:05d}.safetensors": names[size * n : size * (n + 1)] for n in range(shards)}
    write_checkpoint(tmp_path, CONFIG, {}, shards={}, index={n: file for file, part in layout.items() for n in part})
    for file, part in layout.items():
        (tmp_path / file).write_bytes(encode_header([(name, "U8", [1], 1) for name in part], {}) + bytes(size))
    # In a process of its own, where no coverage tool slows it down.
    script = """
import sys, time
from mtp_zoo.checkpoint import CheckpointIndex
began = time.process_time()
index = CheckpointIndex.open(sys.argv[1])
print(time.process_time() - began, len(index.entries), len(index.faults), "torch" in sys.modules)
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent)
    seconds, *found = done.stdout.split()
    assert found == ["60000", "0", "False"]
    assert float(seconds) < OPEN_SECONDS


def test_header_bytes_are_the_headers_and_the_index(split: Path) -> None:
    index = CheckpointIndex.open(split)
    files = sum((split / file).stat().st_size for file in (ONE, TWO))
    weights = sum(tensor.nbytes for tensor in TENSORS.values())
    assert index.header_bytes == files - weights + (split / "model.safetensors.index.json").stat().st_size


def test_opening_reads_no_tensor(split: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorReader, "_fill", lambda *args: pytest.fail("a tensor was read"))
    CheckpointIndex.open(split).verify()


def test_require_keeps_the_order_asked_for_and_names_what_is_nowhere(split: Path) -> None:
    index = CheckpointIndex.open(split)
    assert [entry.name for entry in index.require(reversed(HEAD))] == HEAD[::-1]
    with pytest.raises(BrokenCheckpointError) as caught:
        index.require([FC, "mtp.nope", "mtp.nothing"])
    assert caught.value.problems == ("'mtp.nope' is in no readable file.", "'mtp.nothing' is in no readable file.")


def test_tensor_listed_in_another_shard_names_both_shards(split: Path) -> None:
    """https://github.com/huggingface/huggingface_hub/pull/4728"""
    write_index(split, {**TRUE_MAP, FC: ONE})
    index = CheckpointIndex.open(split)
    message = f"{ONE}: the index puts '{FC}' in it, and it does not hold it; {TWO} does."
    assert [(fault.kind, str(fault), fault.tensors) for fault in index.faults] == [("misplaced", message, (FC,))]
    for refuse in (lambda: index.require([FC]), lambda: index.check(is_head), index.verify, lambda: load_head(split)):
        with pytest.raises(BrokenCheckpointError, match=f"{FC}.*{TWO}"):
            refuse()
    index.require(TRUNK)
    index.check(lambda name: not is_head(name))


def test_tensor_listed_and_stored_nowhere_is_named_with_its_claimed_shard(tmp_path: Path) -> None:
    """https://github.com/huggingface/huggingface_hub/pull/4728"""
    lost = {name: tensor for name, tensor in TENSORS.items() if name != FC}
    split = write_checkpoint(
        tmp_path, CONFIG, lost, shards={ONE: TRUNK, TWO: [n for n in HEAD if n != FC]}, index=TRUE_MAP
    )
    index = CheckpointIndex.open(split)
    assert [(fault.kind, fault.file, fault.tensors) for fault in index.faults] == [("absent", TWO, (FC,))]
    assert FC in index.names
    for refuse in (lambda: index.require([FC]), lambda: index.check(is_head), index.verify, lambda: load_head(split)):
        with pytest.raises(BrokenCheckpointError, match=f"{TWO}: the index puts '{FC}' in it.*no readable file does"):
            refuse()


def test_missing_shard_stops_only_who_needs_it(split: Path) -> None:
    """https://github.com/sgl-project/sglang/pull/32279"""
    (split / ONE).unlink()
    index = CheckpointIndex.open(split)
    assert [(fault.kind, fault.file) for fault in index.faults] == [("missing_file", ONE)]
    assert len(index.require(HEAD)) == 15
    index.check(is_head)
    assert len(load_head(split).report.tensors) == 15
    for refuse in (lambda: index.require(TRUNK), index.verify):
        with pytest.raises(BrokenCheckpointError, match=f"{ONE}: not on disk. The index puts {len(TRUNK)} tensors"):
            refuse()


def test_missing_head_shard_is_named_before_anything_is_allocated(split: Path) -> None:
    """https://github.com/sgl-project/sglang/pull/32279"""
    (split / TWO).unlink()
    index = CheckpointIndex.open(split)
    for refuse in (lambda: index.require(HEAD), lambda: index.check(is_head), lambda: load_head(split)):
        with pytest.raises(BrokenCheckpointError, match=f"{TWO}: not on disk. The index puts 15 tensors in it"):
            refuse()


def test_corrupt_shard_stops_only_who_needs_it(split: Path) -> None:
    (split / ONE).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    index = CheckpointIndex.open(split)
    assert [(fault.kind, fault.file, len(fault.tensors)) for fault in index.faults] == [
        ("corrupt_file", ONE, len(TRUNK))
    ]
    index.check(is_head)
    with pytest.raises(BrokenCheckpointError, match="git-lfs pointer"):
        index.verify()


def test_corrupt_shard_without_an_index_may_hold_anything(tmp_path: Path) -> None:
    split = write_checkpoint(tmp_path, CONFIG, TENSORS, shards=SPLIT, index=False)
    (split / ONE).write_bytes(b"")
    index = CheckpointIndex.open(split)
    assert len(index.require(HEAD)) == 15
    for refuse in (lambda: index.check(is_head), lambda: index.require([FC, "mtp.other"])):
        with pytest.raises(BrokenCheckpointError, match=f"{ONE}: it is empty"):
            refuse()


def test_renamed_shard_is_told_as_a_stale_index(split: Path) -> None:
    """https://github.com/Blaizzy/mlx-vlm/pull/1827"""
    (split / TWO).rename(split / "model-b.safetensors")
    index = CheckpointIndex.open(split)
    for refuse in (lambda: index.require(HEAD), lambda: index.check(is_head), index.verify, lambda: load_head(split)):
        with pytest.raises(BrokenCheckpointError) as caught:
            refuse()
        assert "The index is stale" in str(caught.value)
        assert f"['{TWO}']" in str(caught.value)
        assert "['model-b.safetensors']" in str(caught.value)


def test_listed_sidecar_is_read(tmp_path: Path) -> None:
    """https://github.com/ggml-org/llama.cpp/pull/16359"""
    split = write_checkpoint(tmp_path, CONFIG, TENSORS, shards={ONE: TRUNK, "mtp.safetensors": HEAD})
    index = CheckpointIndex.open(split)
    assert index.faults == ()
    assert {entry.file for entry in index.require(HEAD)} == {"mtp.safetensors"}


def test_sidecar_that_the_index_leaves_out_is_read_with_a_warning(tmp_path: Path) -> None:
    """https://github.com/ggml-org/llama.cpp/pull/16359"""
    split = write_checkpoint(
        tmp_path,
        CONFIG,
        TENSORS,
        shards={ONE: TRUNK, "mtp.safetensors": HEAD},
        index=dict.fromkeys(TRUNK, ONE),
    )
    index = CheckpointIndex.open(split)
    assert [(fault.kind, fault.fatal, fault.tensors) for fault in index.faults] == [("unlisted", False, tuple(HEAD))]
    assert "vLLM and SGLang will not open it" in str(index.faults[0])
    index.verify()
    assert any("mtp.safetensors: not listed" in notice for notice in load_head(split).report.notices)


def test_tensors_that_the_index_leaves_out_of_a_listed_shard_are_read_with_a_warning(split: Path) -> None:
    write_index(split, {name: file for name, file in TRUE_MAP.items() if name != FC})
    index = CheckpointIndex.open(split)
    assert [(fault.kind, fault.fatal, fault.file, fault.tensors) for fault in index.faults] == [
        ("unlisted", False, TWO, (FC,))
    ]
    index.check(is_head)
    assert len(load_head(split).report.tensors) == 15


def test_single_file_next_to_an_index_is_read_whole(tmp_path: Path) -> None:
    """https://github.com/vllm-project/compressed-tensors/pull/756"""
    layout = {"model.safetensors": TRUNK, "model-mtp.safetensors": HEAD}
    index = CheckpointIndex.open(write_checkpoint(tmp_path, CONFIG, TENSORS, shards=layout))
    assert (index.faults, index.entries.keys()) == ((), TENSORS.keys())


def test_tensor_in_two_files_is_fatal_for_who_needs_it(split: Path) -> None:
    save_file({FC: TENSORS[FC] + 1}, split / "mtp.safetensors")
    index = CheckpointIndex.open(split)
    assert [(fault.kind, fault.tensors) for fault in index.faults] == [("duplicate", (FC,))]
    assert index.entries[FC].file == TWO, "the copy that the index names"
    for refuse in (lambda: index.require([FC]), lambda: index.check(is_head), index.verify, lambda: load_head(split)):
        with pytest.raises(BrokenCheckpointError, match=rf"{TWO} and mtp\.safetensors: each of these files holds"):
            refuse()
    index.require(TRUNK)
    load_shared(split)


def test_positive_list_of_the_family_is_the_head_and_nothing_else(tmp_path: Path) -> None:
    """https://github.com/huggingface/transformers/pull/45638"""
    extra = {
        "model.visual.blocks.0.attn.qkv.weight": torch.ones(4, 4),
        "model.rotary_emb.inv_freq": torch.ones(4),
        "model.layers.0.mlp.mtp_gate_dummy.weight": torch.ones(4),
    }
    index = CheckpointIndex.open(write_checkpoint(tmp_path, CONFIG, {**TENSORS, **extra}))
    assert sorted(name for name in index.entries if is_head(name)) == HEAD
    assert len(HEAD) == 15
    report = load_head(tmp_path).report
    assert sorted(tensor.name for tensor in report.tensors) == HEAD
    assert not report.skipped
    assert not report.notices


def test_tensors_that_were_read_do_not_change_with_the_file(split: Path) -> None:
    """https://github.com/bghira/SimpleTuner/pull/2714"""
    index = CheckpointIndex.open(split)
    tensor = TensorReader(index).read(index.entries[FC])
    (split / TWO).write_bytes(b"\0" * 100)
    assert torch.equal(tensor, TENSORS[FC])


def test_file_that_shrinks_after_opening_is_a_typed_error(split: Path) -> None:
    index = CheckpointIndex.open(split)
    with (split / TWO).open("r+b") as file:
        file.truncate(index.entries[FC].start + 100)
    with pytest.raises(BrokenCheckpointError, match=f"'{FC}' of {TWO}: expected 16384 bytes, got 100"):
        TensorReader(index).read(index.entries[FC])


@pytest.mark.parametrize("file", [ONE, TWO])
@pytest.mark.parametrize("content", [b"", b"\xff" * 4096])
def test_no_entry_point_changes_a_corrupt_checkpoint(split: Path, file: str, content: bytes) -> None:
    """https://github.com/sgl-project/sglang/issues/14754"""
    (split / file).write_bytes(content)
    before = snapshot(split)
    for call in (load_head, load_shared):
        with contextlib.suppress(MTPZooError):
            call(split)
    with pytest.raises(BrokenCheckpointError, match=f"{file}: "):
        CheckpointIndex.open(split).verify()
    assert snapshot(split) == before


def test_no_readable_weight_file_at_all_is_told_on_opening(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, TENSORS)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(
        BrokenCheckpointError, match=r"none of its weight files.*\n.*model\.safetensors: its header claims"
    ):
        CheckpointIndex.open(tmp_path)


def test_directory_without_weights_is_not_found(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, TENSORS, shards={})
    with pytest.raises(SourceNotFoundError, match="hf download"):
        CheckpointIndex.open(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_with_the_way_to_convert_them(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, CONFIG, {}, shards={})
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(UnsafeCheckpointError, match=rf"{name}.*would run code(.|\n)*save_pretrained"):
        CheckpointIndex.open(tmp_path)


def test_pickles_beside_safetensors_are_left_alone(split: Path) -> None:
    (split / "training_args.bin").write_bytes(b"\x80\x04.")
    assert CheckpointIndex.open(split).faults == ()


def test_missing_config_is_told(split: Path) -> None:
    (split / "config.json").unlink()
    with pytest.raises(ModelConfigError, match=r"config\.json does not exist"):
        CheckpointIndex.open(split)


def test_hidden_files_and_folders_are_no_weight_files(split: Path) -> None:
    (split / "._model.safetensors").write_bytes(b"\0\5\x16\7")  # what macOS leaves on foreign disks
    (split / "old.safetensors").mkdir()
    nested = split / "original"
    nested.mkdir()
    shutil.copy(split / TWO, nested / "consolidated.safetensors")
    index = CheckpointIndex.open(split)
    assert (index.files, index.faults) == ((ONE, TWO), ())


def test_shard_in_a_listed_subfolder_is_read(tmp_path: Path) -> None:
    index = CheckpointIndex.open(
        write_checkpoint(tmp_path, CONFIG, TENSORS, shards={ONE: TRUNK, "head/mtp.safetensors": HEAD})
    )
    assert index.faults == ()
    assert {entry.file for entry in index.require(HEAD)} == {"head/mtp.safetensors"}


def test_link_to_nothing_is_a_missing_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, TENSORS, shards=SPLIT, index=False)
    (tmp_path / ONE).unlink()
    os.symlink("../blobs/gone", tmp_path / ONE)
    index = CheckpointIndex.open(tmp_path)
    assert [(fault.kind, fault.file, fault.tensors) for fault in index.faults] == [("missing_file", ONE, ())]
    with pytest.raises(BrokenCheckpointError, match="links to nothing"):
        index.check(is_head)


def test_half_updated_directory_is_not_read(split: Path) -> None:
    (split / ".mtp-zoo-update").mkdir()
    assert CheckpointIndex.open(split).faults == (), "so far only new files were being made"
    (split / ".mtp-zoo-update" / "journal.json").write_text("{}")
    for call in (CheckpointIndex.open, load_head, load_shared):
        with pytest.raises(BrokenCheckpointError, match=r"half old, half new(.|\n)*mtp-zoo rollback"):
            call(split)
