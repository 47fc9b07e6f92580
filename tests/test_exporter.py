"""export: what comes out of a base and a head, and what it costs."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from mtp_zoo.checkpoint import INDEX_NAME, CheckpointIndex
from mtp_zoo.errors import UnsafeCheckpointError
from mtp_zoo.exporter import export
from mtp_zoo.loader import load_head
from tests.exporting import (
    CONFIG,
    FC,
    HEAD,
    LAST,
    MIXED,
    ONE,
    TENSORS,
    TRUNK,
    TWO,
    index_of,
    make_base,
    same,
    snapshot,
    stored,
    train,
)
from tests.tiny import tiny_config, tiny_tensors, write_checkpoint


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_base(tmp_path / "base")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_untouched_head_comes_out_bit_for_bit(base: Path, out: Path) -> None:
    export(load_head(base), base, out)
    written = stored(out)
    assert written.keys() == TENSORS.keys()
    assert same(written, TENSORS, TENSORS)


def test_trained_head_is_loaded_back_bit_for_bit_and_the_trunk_is_the_bases(base: Path, out: Path) -> None:
    head = train(load_head(base))
    export(head, base, out)
    again = load_head(out)
    assert again.state_dict().keys() == head.state_dict().keys()
    assert same(again.state_dict(), head.state_dict(), head.state_dict())
    assert not torch.equal(stored(out)[FC], TENSORS[FC])
    assert same(stored(out), TENSORS, TRUNK)
    assert again.report.notices == ()


def test_several_depths_with_one_fusion_come_out_as_they_went_in(tmp_path: Path, out: Path) -> None:
    config = tiny_config(depths=3)
    tensors = tiny_tensors(config, head_depths=3)
    base = write_checkpoint(tmp_path / "base", config, tensors, shards=2)
    head = load_head(base)
    export(head, base, out)
    assert same(stored(out), tensors, tensors)
    assert len(tensors) == len(TRUNK) + 4 + 3 * 11


def test_clean_shard_is_linked_mixed_shard_is_rewritten_head_shard_is_dropped(base: Path, out: Path) -> None:
    report = export(train(load_head(base)), base, out)
    assert sorted(path.name for path in out.iterdir()) == sorted(
        [ONE, TWO, LAST, INDEX_NAME, "config.json", "mtp_zoo.json", "README.md", "tokenizer.json", "code"]
    )
    assert os.path.samefile(out / ONE, base / ONE)
    assert not os.path.samefile(out / TWO, base / TWO)
    with safe_open(out / TWO, "pt") as rewritten, safe_open(base / TWO, "pt") as original:
        assert rewritten.metadata() == original.metadata()
        kept = [name for name in original.offset_keys() if not name.startswith("mtp.")]
        assert list(rewritten.offset_keys()) == kept
    assert (report.files_linked, report.files_rewritten, report.files_written) == (1, 1, 4)
    assert report.files_copied == 3, "config.json, tokenizer.json, code/modeling.py"


def test_report_counts_the_bytes_that_were_put_on_the_disk(base: Path, out: Path) -> None:
    report = export(load_head(base), base, out)
    new = [path for path in out.rglob("*") if path.is_file() and not path.samefile(base / ONE)]
    assert report.bytes_written == sum(path.stat().st_size for path in new)
    assert report.head_bytes == sum(TENSORS[name].nbytes for name in HEAD)
    assert report.out == out


def test_index_is_the_union_of_the_headers_and_its_size_is_the_sum_of_the_tensors(base: Path, out: Path) -> None:
    """https://github.com/unslothai/unsloth-zoo/pull/35"""
    export(train(load_head(base)), base, out)
    headers = {}
    for path in out.glob("*.safetensors"):
        with safe_open(path, "pt") as opened:
            headers |= dict.fromkeys(opened.keys(), path.name)
    index = index_of(out)
    assert index["weight_map"] == headers
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored(out).values())
    assert {headers[name] for name in HEAD} == {LAST}


def test_single_file_next_to_an_index_exports_from_a_to_b_to_c(tmp_path: Path) -> None:
    """https://github.com/vllm-project/compressed-tensors/pull/756"""
    layout = {"model.safetensors": TRUNK, "model-mtp.safetensors": HEAD}
    a = write_checkpoint(tmp_path / "a", CONFIG, TENSORS, shards=layout)
    head = train(load_head(a))
    b, c = tmp_path / "b", tmp_path / "c"
    export(head, a, b)
    export(load_head(b), b, c)
    assert (c / LAST).read_bytes() == (b / LAST).read_bytes()
    assert sorted(path.name for path in b.iterdir()) == sorted(path.name for path in c.iterdir())
    for root in (b, c):
        assert sum(name.startswith("mtp.") for name in CheckpointIndex.open(root).entries) == 15
        assert CheckpointIndex.open(root).faults == ()
    assert os.path.samefile(a / "model.safetensors", c / "model-00001-of-00001.safetensors")


def test_base_whose_trainer_dropped_the_head_gets_it_back(tmp_path: Path, out: Path) -> None:
    """https://github.com/unslothai/unsloth/pull/11042"""
    original = write_checkpoint(tmp_path / "original", CONFIG, TENSORS)
    tuned = write_checkpoint(tmp_path / "tuned", CONFIG, {name: TENSORS[name] + 1 for name in TRUNK})
    head = train(load_head(original))
    report = export(head, tuned, out)
    assert len(stored(out)) == len(TRUNK) + 15
    assert json.loads((out / "config.json").read_text())["mtp_num_hidden_layers"] == 1
    assert report.files_linked == 1
    assert same(load_head(out).state_dict(), head.state_dict(), head.state_dict())


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("depths", ["absent", None, 0])
def test_declared_depths_are_corrected_in_the_place_where_they_were(
    tmp_path: Path, out: Path, nested: bool, depths: Any
) -> None:
    """https://github.com/unslothai/unsloth-zoo/pull/847 and https://github.com/arcee-ai/mergekit/pull/686"""
    prefix = "model.language_model." if nested else "model."
    right = tiny_config(nested=nested)
    tensors = tiny_tensors(right, prefix=prefix)
    head = load_head(write_checkpoint(tmp_path / "right", right, tensors))
    config = tiny_config(nested=nested, depths=None)
    if depths != "absent":
        config.get("text_config", config)["mtp_num_hidden_layers"] = depths
    base = write_checkpoint(
        tmp_path / "base", config, {name: t for name, t in tensors.items() if not name.startswith("mtp.")}
    )
    export(head, base, out)
    written = json.loads((out / "config.json").read_text())
    config.get("text_config", config)["mtp_num_hidden_layers"] = 1
    assert written == config
    assert list(written) == list(config), "fields keep their order"
    assert ("text_config" in written) == nested
    assert load_head(out).num_depths == 1


def test_config_that_is_right_already_comes_along_byte_for_byte(base: Path, out: Path) -> None:
    text = json.dumps(CONFIG, indent=7) + "  \n\n"
    (base / "config.json").write_text(text)
    export(load_head(base), base, out)
    assert (out / "config.json").read_text() == text


def test_other_files_are_copied_never_linked(base: Path, out: Path) -> None:
    (base / "run.sh").write_text("#!/bin/sh\n")
    (base / "run.sh").chmod(0o755)
    export(load_head(base), base, out)
    for name in ("tokenizer.json", "code/modeling.py", "run.sh", "config.json"):
        assert (out / name).read_bytes() == (base / name).read_bytes()
        assert not os.path.samefile(out / name, base / name)
    assert (out / "run.sh").stat().st_mode & 0o777 == 0o755


def test_copy_makes_files_of_its_own(base: Path, out: Path) -> None:
    report = export(load_head(base), base, out, copy=True)
    assert report.files_linked == 0
    assert not os.path.samefile(out / ONE, base / ONE)
    assert same(stored(out), TENSORS, TENSORS)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_weights_are_copied_where_links_are_not_possible(
    base: Path, out: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("mtp_zoo.overlay.os.link", refuse)
    report = export(load_head(base), base, out)
    assert (report.files_linked, report.files_copied) == (0, 4)
    assert same(stored(out), TENSORS, TENSORS)


def test_links_of_a_hub_cache_are_resolved_first(tmp_path: Path, out: Path) -> None:
    tree = tmp_path / "models--acme--tiny"
    commit = "c" * 40
    plain = write_checkpoint(tmp_path / "plain", CONFIG, TENSORS, shards=MIXED)
    snapshot_dir = tree / "snapshots" / commit
    snapshot_dir.mkdir(parents=True)
    (tree / "blobs").mkdir()
    for file in plain.iterdir():
        file.rename(tree / "blobs" / file.name)
        os.symlink(f"../../blobs/{file.name}", snapshot_dir / file.name)
    before = snapshot(tree)
    export(train(load_head(tree)), tree, out)
    assert not any(path.is_symlink() for path in out.rglob("*"))
    assert os.path.samefile(out / ONE, tree / "blobs" / ONE)
    assert snapshot(tree) == before
    assert json.loads((out / "mtp_zoo.json").read_text())["base"]["revision"] == commit


def test_base_is_never_touched(base: Path, out: Path) -> None:
    """https://github.com/bghira/SimpleTuner/pull/2714"""
    before = snapshot(base)
    export(train(load_head(base)), base, out)
    assert snapshot(base) == before


def test_float_head_inside_a_quantised_base_is_replaced(tmp_path: Path, out: Path) -> None:
    config = {**CONFIG, "quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["mtp.fc"]}}
    base = write_checkpoint(tmp_path / "base", config, TENSORS)
    head = train(load_head(base))
    export(head, base, out)
    assert same(load_head(out).state_dict(), head.state_dict(), head.state_dict())


def test_fp32_master_weights_are_stored_as_the_base_stores_its_head(base: Path, out: Path) -> None:
    """https://github.com/benchflow-ai/posttrainarena/pull/9"""
    head = train(load_head(base, dtype=torch.float32))
    report = export(head, base, out)
    assert report.tensors_cast == 15
    assert report.head_bytes == sum(TENSORS[name].nbytes for name in HEAD)
    assert {stored(out)[name].dtype for name in HEAD} == {torch.bfloat16}
    assert torch.equal(stored(out)[FC], head.depths[0].eh_proj.weight.detach().to(torch.bfloat16))


def test_another_dtype_is_written_only_on_request(base: Path, out: Path) -> None:
    """https://github.com/benchflow-ai/posttrainarena/pull/9"""
    head = train(load_head(base, dtype=torch.float32))
    report = export(head, base, out, dtype=torch.float32)
    assert report.tensors_cast == 0
    assert report.head_bytes == 2 * sum(TENSORS[name].nbytes for name in HEAD)
    assert same(load_head(out).state_dict(), head.state_dict(), head.state_dict())


def test_dtype_is_kept_tensor_by_tensor(tmp_path: Path, out: Path) -> None:
    tensors = {**TENSORS, "mtp.norm.weight": TENSORS["mtp.norm.weight"].float()}
    base = write_checkpoint(tmp_path / "base", CONFIG, tensors)
    assert export(load_head(base), base, out).tensors_cast == 0
    assert same(stored(out), tensors, tensors)


def test_views_and_transposed_weights_are_stored_once_and_whole(base: Path, out: Path) -> None:
    """https://github.com/safetensors/safetensors/issues/98, https://github.com/huggingface/transformers/issues/33807"""
    head = load_head(base)
    depth = head.depths[0]
    big = torch.randn(256, 200).to(torch.bfloat16)
    depth.eh_proj.weight = torch.nn.Parameter(big[:128, :64].T)  # transposed, not contiguous, in a larger storage
    depth.hnorm.weight = depth.enorm.weight  # aliases
    export(head, base, out)
    written = stored(out)
    assert torch.equal(written[FC], big[:128, :64].T)
    assert torch.equal(written["mtp.pre_fc_norm_hidden.weight"], TENSORS["mtp.pre_fc_norm_embedding.weight"])
    assert CheckpointIndex.open(out).entries[FC].nbytes == 2 * 64 * 128
    assert load_head(out).report.head_bytes == sum(TENSORS[name].nbytes for name in HEAD)


def test_provenance_names_the_base_and_the_hash_of_every_head_tensor(base: Path, out: Path) -> None:
    export(train(load_head(base)), base, out, training={"steps": 3, "loss": 0.5})
    content = json.loads((out / "mtp_zoo.json").read_text())
    written = stored(out)
    assert content["training"] == {"steps": 3, "loss": 0.5}
    assert (content["family"], content["depths"], content["engine"]) == ("qwen3_5", 1, None)
    told = ("hidden_tap", "fuse_order", "recycle", "norm_weight")
    assert [content["conventions"][name] for name in told] == [
        "post_norm",
        "embed_hidden",
        "post_norm",
        "zero_centered",
    ]
    assert content["base"] == {"source": str(base), "path": str(base), "revision": None}
    assert content["head_bytes"] == sum(written[name].nbytes for name in HEAD)
    assert content["tensors"] == {
        name: {
            "dtype": "BF16",
            "shape": list(written[name].shape),
            "sha256": hashlib.sha256(written[name].view(torch.uint8).numpy().tobytes()).hexdigest(),
        }
        for name in HEAD
    }


def test_linked_folder_is_copied_as_files(base: Path, out: Path) -> None:
    os.symlink("code", base / "templates")
    export(load_head(base), base, out)
    assert (out / "templates" / "modeling.py").read_text() == "print()\n"
    assert not (out / "templates").is_symlink()


def test_what_is_linked_from_outside_of_the_base_is_not_copied(base: Path, out: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "id_rsa").write_text("secret")
    os.symlink(tmp_path / "keys", base / "templates")
    os.symlink("../keys/id_rsa", base / "LICENSE")
    with pytest.raises(UnsafeCheckpointError, match="2 of its files are links that lead out") as caught:
        export(load_head(base), base, out)
    assert ["LICENSE" in str(caught.value), "templates/id_rsa" in str(caught.value)] == [True, True]
    assert not out.exists()


@pytest.mark.parametrize("nested", [False, True])
def test_transformers_opens_the_output_and_finds_the_bases_trunk(tmp_path: Path, out: Path, nested: bool) -> None:
    from transformers import AutoModelForCausalLM

    config = tiny_config(nested=nested, tied=False)
    tensors = tiny_tensors(config, prefix="model.language_model." if nested else "model.")
    base = write_checkpoint(tmp_path / "base", config, tensors)
    export(train(load_head(base)), base, out)
    ids = torch.arange(16)[None]
    with torch.no_grad():
        original, exported = (AutoModelForCausalLM.from_pretrained(path)(input_ids=ids).logits for path in (base, out))
    assert torch.equal(original, exported)
    assert original.float().std() > 0.1, "the trunk was read, not made up"
