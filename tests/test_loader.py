"""load_head: every byte of the head, nothing else, or one error that says why not."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer

import mtp_zoo.loader
from mtp_zoo.blocks import BlockSource
from mtp_zoo.checkpoint import CheckpointIndex
from mtp_zoo.errors import (
    BrokenCheckpointError,
    HeadCountError,
    HeadMismatchError,
    HeadNotFoundError,
    SettingsError,
    UnknownFamilyError,
    UnresolvedFamilyError,
)
from mtp_zoo.families.qwen3_5 import FAMILY
from mtp_zoo.keymap import Rename, Split, Stack, to_native
from mtp_zoo.loader import load_head
from mtp_zoo.registry import Family, Resolution
from mtp_zoo.shared import load_shared
from mtp_zoo.site import HeadSite
from tests.allocations import PeakBytes
from tests.key_maps import same_bits
from tests.tiny import tiny_config, tiny_tensors, write_checkpoint, write_index

CONFIG = tiny_config()
TENSORS = tiny_tensors(CONFIG)
CANONICAL = {
    "mtp.fc.weight": "depths.0.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "depths.0.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "depths.0.hnorm.weight",
    "mtp.norm.weight": "depths.0.norm.weight",
    "mtp.layers.0.input_layernorm.weight": "depths.0.block.input_layernorm.weight",
    "mtp.layers.0.post_attention_layernorm.weight": "depths.0.block.post_attention_layernorm.weight",
    "mtp.layers.0.self_attn.q_proj.weight": "depths.0.block.self_attn.q_proj.weight",
    "mtp.layers.0.self_attn.k_proj.weight": "depths.0.block.self_attn.k_proj.weight",
    "mtp.layers.0.self_attn.v_proj.weight": "depths.0.block.self_attn.v_proj.weight",
    "mtp.layers.0.self_attn.o_proj.weight": "depths.0.block.self_attn.o_proj.weight",
    "mtp.layers.0.self_attn.q_norm.weight": "depths.0.block.self_attn.q_norm.weight",
    "mtp.layers.0.self_attn.k_norm.weight": "depths.0.block.self_attn.k_norm.weight",
    "mtp.layers.0.mlp.gate_proj.weight": "depths.0.block.mlp.gate_proj.weight",
    "mtp.layers.0.mlp.up_proj.weight": "depths.0.block.mlp.up_proj.weight",
    "mtp.layers.0.mlp.down_proj.weight": "depths.0.block.mlp.down_proj.weight",
}
HEAD_BYTES = sum(TENSORS[name].nbytes for name in CANONICAL)
TRUNK = [name for name in TENSORS if name not in CANONICAL]
SPLIT = {
    "model-00001-of-00003.safetensors": TRUNK[: len(TRUNK) // 2],
    "model-00002-of-00003.safetensors": TRUNK[len(TRUNK) // 2 :],
    "model-00003-of-00003.safetensors": list(CANONICAL),
}
TRUNK_FILE, HEAD_FILE = "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"

READ_OVERHEAD = 1.02
"""Bytes read per byte of head: headers and the index come on top of the head, and must stay small beside it."""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "base", CONFIG, TENSORS)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "sharded", CONFIG, TENSORS, shards=SPLIT)


def write(directory: Path, changes: dict[str, Tensor | None], **config: Any) -> Path:
    """A checkpoint in which some tensors are others, or gone."""
    tensors = {name: value for name, value in {**TENSORS, **changes}.items() if value is not None}
    return write_checkpoint(directory, tiny_config(**config), tensors)


# What is loaded


@pytest.mark.parametrize("layout", ["base", "sharded"])
def test_every_tensor_has_its_name_and_the_bits_of_the_file(layout: str, request: pytest.FixtureRequest) -> None:
    root = request.getfixturevalue(layout)
    stored = {name: value for path in root.glob("*.safetensors") for name, value in load_file(path).items()}
    head = load_head(root)
    assert same_bits(head.weights(), {head_name: stored[name] for name, head_name in CANONICAL.items()})
    assert head.state_dict().keys() == set(CANONICAL.values())
    assert same_bits(to_native(head.origin.bindings, head.weights()), {name: stored[name] for name in CANONICAL})


def test_nothing_is_left_on_the_meta_device(base: Path) -> None:
    head = load_head(base)
    assert not [name for name, value in (*head.named_parameters(), *head.named_buffers()) if value.is_meta]


def test_each_tensor_keeps_the_dtype_it_is_stored_in(tmp_path: Path) -> None:
    changes = {"mtp.norm.weight": TENSORS["mtp.norm.weight"].float(), "mtp.fc.weight": TENSORS["mtp.fc.weight"].half()}
    head = load_head(write(tmp_path, {**changes}))
    dtypes = {name: value.dtype for name, value in head.weights().items()}
    assert dtypes.pop("depths.0.norm.weight") == torch.float32
    assert dtypes.pop("depths.0.eh_proj.weight") == torch.float16
    assert set(dtypes.values()) == {torch.bfloat16}
    assert head.origin.dtypes == {
        **dict.fromkeys(CANONICAL.values(), "BF16"),
        "depths.0.norm.weight": "F32",
        "depths.0.eh_proj.weight": "F16",
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_a_cast_is_asked_for_and_the_report_shows_what_was_stored(base: Path, dtype: torch.dtype) -> None:
    """https://github.com/huggingface/transformers/issues/36567: FP32 master weights are a choice, and visible."""
    head = load_head(base, dtype=dtype)
    assert same_bits(head.weights(), {head_name: TENSORS[name].to(dtype) for name, head_name in CANONICAL.items()})
    assert {tensor.dtype for tensor in head.report.tensors} == {"BF16"}
    assert set(head.origin.dtypes.values()) == {"BF16"}


def test_several_depths_share_one_fusion_and_have_a_block_each(tmp_path: Path) -> None:
    config = tiny_config(depths=3)
    tensors = tiny_tensors(config, head_depths=3)
    head = load_head(write_checkpoint(tmp_path, config, tensors, shards=2))
    assert (head.num_depths, head.depth_policy) == (3, "distinct")
    assert len(head.weights()) == 4 + 3 * 11
    first, second, third = head.depths
    for part in FAMILY.shared_parts:
        assert getattr(first, part) is getattr(second, part) is getattr(third, part)
    for number, depth in enumerate(head.depths):
        weight = depth.get_submodule("block.self_attn.q_proj").weight
        assert torch.equal(weight, tensors[f"mtp.layers.{number}.self_attn.q_proj.weight"])
    native = {name: value for name, value in tensors.items() if name.startswith("mtp.")}
    assert same_bits(to_native(head.origin.bindings, head.weights()), native)


class RoutedLayer(Qwen3_5DecoderLayer):
    """A layer with a router bias: a buffer that is stored, as several mixture-of-experts families have it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("router_bias", torch.zeros(4))


class RoutedBlock(BlockSource):
    def load_class(self, name: str, kind: str = "modeling") -> Any:
        return RoutedLayer if name == self.layer else super().load_class(name, kind)


def test_a_buffer_is_loaded_as_stored_and_is_part_of_the_state(tmp_path: Path) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/8358: a router's correction bias is no parameter."""
    rule = Rename("mtp.layers.{d}.mlp.gate.e_score_correction_bias", "depths.{d}.block.router_bias")
    fields = {field.name: getattr(FAMILY.block, field.name) for field in dataclasses.fields(FAMILY.block)}
    family = dataclasses.replace(FAMILY, block=RoutedBlock(**fields), rules=(*FAMILY.rules, rule))
    bias = torch.tensor([1.0, 2.0, 3.0, 4.0])
    name = "mtp.layers.0.mlp.gate.e_score_correction_bias"
    head = load_head(write(tmp_path, {name: bias}), family=family)
    assert same_bits({"": head.state_dict()["depths.0.block.router_bias"]}, {"": bias})
    assert same_bits({"": to_native(head.origin.bindings, head.weights())[name]}, {"": bias})
    assert sorted(own for own, _ in head.named_parameters()) == sorted(CANONICAL.values())
    with pytest.raises(HeadMismatchError, match=f"missing: {re.escape(name)}"):
        load_head(write(tmp_path / "lost", {}), family=family)


@pytest.mark.parametrize("architecture", ["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"])
@pytest.mark.parametrize("prefix", FAMILY.target.prefixes)
def test_the_trunks_prefix_and_the_architecture_do_not_matter(tmp_path: Path, prefix: str, architecture: str) -> None:
    """https://github.com/vllm-project/vllm/pull/50355"""
    config = {**CONFIG, "architectures": [architecture]}
    tensors = tiny_tensors(config, prefix=prefix)
    traps = {"visual.mtp.fc.weight": torch.ones(3), "model.layers.0.mlp.mtp_gate_dummy.weight": torch.ones(3)}
    write_checkpoint(tmp_path, config, {**tensors, **traps})
    head = load_head(tmp_path, target=load_shared(tmp_path))
    assert same_bits(head.weights(), {head_name: tensors[name] for name, head_name in CANONICAL.items()})
    assert torch.equal(head.shared.lm_head_weight, tensors[f"{prefix}embed_tokens.weight"])
    assert {tensor.name for tensor in head.report.tensors} == CANONICAL.keys()
    assert head.report.skipped == {}


def test_the_nested_config_of_a_vision_language_model_is_read(tmp_path: Path) -> None:
    config = tiny_config(nested=True)
    tensors = tiny_tensors(config, prefix="model.language_model.")
    head = load_head(write_checkpoint(tmp_path, config, tensors))
    assert same_bits(head.weights(), {head_name: tensors[name] for name, head_name in CANONICAL.items()})


def test_a_head_in_a_sidecar_file_is_found_listed_or_not(tmp_path: Path) -> None:
    """https://github.com/ggml-org/llama.cpp/pull/16359"""
    layout = {"model.safetensors": TRUNK, "mtp.safetensors": list(CANONICAL)}
    listed = write_checkpoint(tmp_path / "listed", CONFIG, TENSORS, shards=layout)
    assert load_head(listed).report.notices == ()
    index = dict.fromkeys(TRUNK, "model.safetensors")
    unlisted = write_checkpoint(tmp_path / "unlisted", CONFIG, TENSORS, shards=layout, index=index)
    (notice,) = load_head(unlisted).report.notices
    assert notice.startswith("mtp.safetensors: not listed in the index")


def test_the_callers_default_device_and_dtype_do_not_matter(base: Path) -> None:
    expected = load_head(base, dtype=torch.float32)
    try:
        torch.set_default_dtype(torch.float16)
        with torch.device("meta"):
            head = load_head(base, dtype=torch.float32, target=load_shared(base))
    finally:
        torch.set_default_dtype(torch.float32)
    assert same_bits(head.weights(), expected.weights())
    assert torch.equal(head.rotary.inner.inv_freq, expected.rotary.inner.inv_freq)
    assert not head.shared.lm_head_weight.is_meta


# What is read


def write_sparse(directory: Path, tensors: dict[str, tuple[int, ...]]) -> int:
    """A BF16 safetensors file of zeros that takes no room on disk; its size in bytes."""
    table, end = {}, 0
    for name, shape in tensors.items():
        start, end = end, end + 2 * torch.Size(shape).numel()
        table[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(table).encode()
    with directory.open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(8 + len(header) + end)
    return end


@pytest.fixture
def lopsided(tmp_path: Path) -> Path:
    """A head of some megabytes behind a trunk of fifty times its size."""
    config = tiny_config(hidden=512, num_attention_heads=8, num_key_value_heads=2)
    head = {name: value for name, value in tiny_tensors(config).items() if name.startswith("mtp.")}
    size = sum(value.nbytes for value in head.values())
    write_checkpoint(tmp_path, config, head, shards={"model-00021-of-00021.safetensors": list(head)}, index=False)
    weight_map = dict.fromkeys(head, "model-00021-of-00021.safetensors")
    trunk = 0
    for shard in range(20):
        file = f"model-{shard + 1:05d}-of-00021.safetensors"
        shapes = {f"model.layers.{shard}.mlp.{part}.weight": (size // 1024, 512) for part in ("up", "gate", "down")}
        trunk += write_sparse(tmp_path / file, shapes)
        weight_map |= dict.fromkeys(shapes, file)
    write_index(tmp_path, weight_map)
    assert trunk > 50 * size
    return tmp_path


def bytes_read_by_process() -> int:
    return int(re.findall(r"^rchar: (\d+)$", Path("/proc/self/io").read_text(), re.MULTILINE)[0])


def test_only_the_heads_bytes_are_read(lopsided: Path) -> None:
    report = load_head(lopsided).report
    assert report.head_bytes > 3_000_000
    assert report.bytes_read / report.head_bytes < READ_OVERHEAD
    headers = CheckpointIndex.open(lopsided).header_bytes
    assert report.bytes_read == report.head_bytes + headers


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="the system does not count a process's reads")
def test_the_system_counts_the_same_bytes_as_the_report(lopsided: Path) -> None:
    report = load_head(lopsided).report  # imports are done, and not counted below
    before = bytes_read_by_process()
    load_head(lopsided)
    assert (bytes_read_by_process() - before) / report.head_bytes < READ_OVERHEAD


def test_no_tensor_is_held_twice(lopsided: Path) -> None:
    largest = 512 * 1024 * 2  # fc, and the three matrices of the MLP
    with PeakBytes() as plain:
        head = load_head(lopsided)
    assert plain.peak < head.report.head_bytes + 10_000  # the rotary frequencies are computed, not stored
    with PeakBytes() as cast:
        load_head(lopsided, dtype=torch.float32)
    assert cast.peak < 2 * head.report.head_bytes + largest + 10_000


def test_the_count_of_held_bytes_sees_what_is_held_twice() -> None:
    """The test above rests on it."""
    with PeakBytes() as once:
        x = torch.zeros(1000)
        x.view(10, 100).add_(1)
    with PeakBytes() as twice:
        y = torch.zeros(1000)
        y = y + 1
    with PeakBytes() as in_turn:
        for _ in range(3):
            z = torch.zeros(1000)
            del z
    assert (once.peak, twice.peak, in_turn.peak) == (4000, 8000, 4000)


def other_layout() -> tuple[Family, dict[str, Tensor]]:
    """A family that stores the same head with halves of fc, two parts of down_proj, and gate and up fused."""
    fc, down = "mtp.fc.weight", "mtp.layers.0.mlp.down_proj.weight"
    gate, up = "mtp.layers.0.mlp.gate_proj.weight", "mtp.layers.0.mlp.up_proj.weight"
    rules = (
        *(Rename(native, head) for native, head in CANONICAL.items() if native not in (fc, down, gate, up)),
        Stack(("mtp.fc_e", "mtp.fc_h"), CANONICAL[fc], axis=1),
        Stack(("mtp.down.0", "mtp.down.1"), CANONICAL[down]),
        Split("mtp.gate_up", (CANONICAL[gate], CANONICAL[up])),
    )
    halves = {"mtp.fc_e": TENSORS[fc][:, :64], "mtp.fc_h": TENSORS[fc][:, 64:]}
    parts = {"mtp.down.0": TENSORS[down][:32], "mtp.down.1": TENSORS[down][32:]}
    fused = {"mtp.gate_up": torch.cat([TENSORS[gate], TENSORS[up]])}
    rest = {name: value for name, value in TENSORS.items() if name not in (fc, down, gate, up)}
    return dataclasses.replace(FAMILY, rules=rules), {**rest, **halves, **parts, **fused}


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_parts_and_fused_tensors_are_read_into_their_places(tmp_path: Path, dtype: torch.dtype | None) -> None:
    family, tensors = other_layout()
    with PeakBytes() as held:
        head = load_head(write_checkpoint(tmp_path, CONFIG, tensors), family=family, dtype=dtype)
    expected = {head_name: TENSORS[name].to(dtype or torch.bfloat16) for name, head_name in CANONICAL.items()}
    assert same_bits(head.weights(), expected)
    assert head.report.head_bytes == HEAD_BYTES
    assert head.report.bytes_read < HEAD_BYTES + 10_000
    own = sum(value.nbytes for value in head.weights().values())
    assert held.peak < own + tensors["mtp.gate_up"].nbytes + 10_000


# What is refused


def refuse_to_build(*args: object, **kwargs: object) -> None:
    raise AssertionError("nothing may be built or allocated for a head that can't be loaded")


@pytest.mark.parametrize("name", CANONICAL)
def test_a_head_that_lacks_a_tensor_is_refused(tmp_path: Path, name: str) -> None:
    """https://github.com/ohdearquant/lattice/issues/418"""
    root = write(tmp_path, {name: None})
    with pytest.raises(HeadMismatchError, match=re.escape(f"missing: {name}: expected shape")) as caught:
        load_head(root)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("name", CANONICAL)
def test_a_tensor_of_another_shape_is_refused_with_both(tmp_path: Path, name: str) -> None:
    shape = list(TENSORS[name].shape)
    longer = torch.cat([TENSORS[name], TENSORS[name][:1]])
    with pytest.raises(HeadMismatchError) as caught:
        load_head(write(tmp_path, {name: longer}))
    assert [str(problem) for problem in caught.value.problems] == [
        f"shape: {name}: expected {shape}, found {[shape[0] + 1, *shape[1:]]}"
    ]


@pytest.mark.parametrize(
    "name", ["mtp.foo", "mtp.fc.bias", "mtp.layers.0.mlp.gate.weight", "mtp.layers.0.self_attn.q_proj.weight.1"]
)
def test_a_tensor_that_nothing_claims_is_refused(tmp_path: Path, name: str) -> None:
    """https://github.com/Avarok-Cybersecurity/atlas/pull/746"""
    with pytest.raises(HeadMismatchError) as caught:
        load_head(write(tmp_path, {name: torch.zeros(3)}))
    assert [str(problem) for problem in caught.value.problems] == [
        f"unexpected: {name}: no rule claims it (shape [3], dtype F32)"
    ]


def test_a_depth_that_lacks_a_tensor_is_named(tmp_path: Path) -> None:
    config = tiny_config(depths=3)
    tensors = tiny_tensors(config, head_depths=3)
    del tensors["mtp.layers.1.mlp.up_proj.weight"]
    with pytest.raises(HeadMismatchError, match=r"missing: mtp\.layers\.1\.mlp\.up_proj\.weight"):
        load_head(write_checkpoint(tmp_path, config, tensors))


def test_one_error_holds_all_that_is_wrong_with_a_head(tmp_path: Path) -> None:
    changes = {"mtp.fc.weight": None, "mtp.norm.weight": torch.zeros(63), "mtp.foo": torch.zeros(3)}
    with pytest.raises(HeadMismatchError) as caught:
        load_head(write(tmp_path, {**changes}))
    assert [str(problem).split(":")[0] for problem in caught.value.problems] == ["missing", "shape", "unexpected"]


def test_a_head_that_is_gone_is_not_made_up(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/pull/35548"""
    root = write(tmp_path, dict.fromkeys(CANONICAL))
    with pytest.raises(HeadNotFoundError, match="'mtp_num_hidden_layers' declares 1, and none of its 15 tensors"):
        load_head(root)
    assert load_head(root, init="random").report.initialised == tuple(load_head(root, init="random").weights())


def test_a_config_that_declares_more_depths_than_there_are_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadCountError, match="'mtp_num_hidden_layers' says 3, the tensors hold 1"):
        load_head(write(tmp_path, {}, depths=3))


def test_a_count_that_the_config_leaves_out_is_noticed(tmp_path: Path) -> None:
    report = load_head(write(tmp_path, {}, depths=None)).report
    assert report.notices == ("config.json does not declare 'mtp_num_hidden_layers' although 1 depth(s) are on disk.",)


def test_a_checkpoint_of_an_unknown_family_is_refused_with_what_was_seen(tmp_path: Path) -> None:
    with pytest.raises(UnresolvedFamilyError, match=r"its tensors fit \['qwen3_5'\], its config says .*\['llama'\]"):
        load_head(write(tmp_path, {}, model_type="llama"))
    assert load_head(tmp_path, family="qwen3_5").family is FAMILY
    assert load_head(tmp_path, family=FAMILY).family is FAMILY
    with pytest.raises(UnknownFamilyError, match="Did you mean 'qwen3_5'"):
        load_head(tmp_path, family="qwen35")


# Damaged files


def test_a_damaged_trunk_shard_does_not_stop_the_head(sharded: Path) -> None:
    """https://github.com/sgl-project/sglang/pull/32279: the head needs nothing of it."""
    whole = load_head(sharded).weights()
    for damage in (lambda path: path.write_bytes(b"junk"), lambda path: path.unlink()):
        damage(sharded / TRUNK_FILE)
        assert same_bits(load_head(sharded).weights(), whole)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "not on disk. The index puts 15 tensors in it"),
        (lambda path: path.write_bytes(b""), "it is empty"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "truncated"),
        (lambda path: path.rename(path.with_name("head.safetensors")), "The index is stale"),
    ],
)
def test_a_damaged_head_shard_stops_it_before_anything_is_built(
    sharded: Path, damage: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/sgl-project/sglang/pull/32279, https://github.com/Blaizzy/mlx-vlm/pull/1827"""
    damage(sharded / HEAD_FILE)
    monkeypatch.setattr(mtp_zoo.loader, "DraftHead", refuse_to_build)
    with pytest.raises(BrokenCheckpointError, match=message) as caught:
        load_head(sharded)
    assert HEAD_FILE in str(caught.value)


def test_a_file_that_nobody_can_read_or_describe_may_hold_a_tensor_of_the_head(tmp_path: Path) -> None:
    """The head in the other file looks whole; which of two copies an engine would load is unknown."""
    root = write_checkpoint(tmp_path, CONFIG, TENSORS)
    (root / "extra.safetensors").write_bytes(b"junk")
    with pytest.raises(BrokenCheckpointError, match=r"extra\.safetensors"):
        load_head(root)
    write_index(root, dict.fromkeys(TENSORS, "model.safetensors"))
    assert load_head(root).report.tensors


def test_a_tensor_that_the_index_lists_and_no_file_holds_is_named_with_the_file(tmp_path: Path) -> None:
    """https://github.com/huggingface/huggingface_hub/pull/4728"""
    layout = {file: [name for name in names if name != "mtp.fc.weight"] for file, names in SPLIT.items()}
    index = {name: file for file, names in SPLIT.items() for name in names}
    write_checkpoint(tmp_path, CONFIG, TENSORS, shards=layout, index=index)
    with pytest.raises(BrokenCheckpointError, match=rf"{HEAD_FILE}: the index puts 'mtp\.fc\.weight' in it"):
        load_head(tmp_path)


# A new head


def test_a_new_head_is_asked_for_by_name_repeats_with_its_seed_and_says_what_it_is(base: Path) -> None:
    head = load_head(base, init="random", seed=3)
    assert head.report.initialised == tuple(head.weights())
    assert sorted(head.weights()) == sorted(CANONICAL.values())
    assert head.report.tensors == ()
    assert head.report.skipped == dict.fromkeys(sorted(CANONICAL), 'init="random" was asked for')
    assert same_bits(head.weights(), load_head(base, init="random", seed=3).weights())
    other = load_head(base, init="random", seed=4).weights()
    differs = [name for name, value in head.weights().items() if not torch.equal(value, other[name])]
    assert differs == [name for name in head.weights() if not name.endswith("norm.weight")]


def test_a_new_head_follows_transformers_rule_and_the_trunks_dtype(tmp_path: Path) -> None:
    config = tiny_config(initializer_range=0.5)
    head = load_head(write_checkpoint(tmp_path, config, tiny_tensors(config, head_depths=0)), init="random")
    assert {value.dtype for value in head.weights().values()} == {torch.bfloat16}
    assert head.origin.dtypes == dict.fromkeys(CANONICAL.values(), "BF16")
    assert same_bits(
        to_native(head.origin.bindings, head.weights()),
        {name: head.weights()[head_name] for name, head_name in CANONICAL.items()},
    )
    spread = head.weights()["depths.0.eh_proj.weight"].float().std().item()
    assert spread == pytest.approx(0.5, rel=0.05)  # 8,192 draws: two standard errors are under 2 %


def test_a_new_head_can_have_its_own_dtype_and_number_of_depths(base: Path) -> None:
    head = load_head(base, init="random", dtype=torch.float32, depths=2)
    assert {value.dtype for value in head.weights().values()} == {torch.float32}
    assert (head.num_depths, head.report.depths, len(head.weights())) == (2, 2, 4 + 2 * 11)
    assert set(head.origin.dtypes.values()) == {"BF16"}


@pytest.mark.parametrize(("declared", "expected"), [(None, 1), (0, 1), (1, 1), (3, 3)])
def test_a_new_head_has_as_many_depths_as_the_config_declares(
    tmp_path: Path, declared: int | None, expected: int
) -> None:
    root = write(tmp_path, dict.fromkeys(CANONICAL), depths=declared)
    assert load_head(root, init="random").num_depths == expected


def test_a_new_head_leaves_the_callers_random_numbers_alone(base: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first = load_head(base, init="random").weights()
    assert torch.equal(torch.rand(3), expected)
    assert same_bits(load_head(base, init="random").weights(), first)


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        ({"init": "Random"}, SettingsError, r"init: expected one of \['checkpoint', 'random'\], got 'Random'"),
        (
            {"dtype": torch.int8},
            SettingsError,
            r"dtype: expected a torch dtype for floats .*, or None, got torch\.int8",
        ),
        ({"dtype": torch.float8_e4m3fn}, SettingsError, r"dtype: .* got torch\.float8_e4m3fn"),
        ({"dtype": torch.complex64, "init": "random"}, SettingsError, r"dtype: .* got torch\.complex64"),
        ({"engine": "vLLM"}, SettingsError, r"engine: expected one of \['vllm', 'sglang'\], or None, got 'vLLM'"),
        ({"depths": 1}, HeadCountError, "got 1 with init='checkpoint'"),
        ({"depths": 0, "init": "random"}, HeadCountError, "expected depths >= 1"),
        ({"depths": -1, "init": "random"}, HeadCountError, "expected depths >= 1"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(
    base: Path, request_: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_head(base, **request_)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [(["BF16"], torch.bfloat16), (["F32", "F16"], torch.float32), (["U8"], torch.bfloat16)],
)
def test_a_new_head_is_stored_as_most_of_the_trunk_is(tmp_path: Path, dtypes: list[str], expected: torch.dtype) -> None:
    makers = {
        "BF16": lambda: torch.zeros(64, dtype=torch.bfloat16),
        "F16": lambda: torch.zeros(64, dtype=torch.float16),
        "F32": lambda: torch.zeros(64),
        "U8": lambda: torch.zeros(640, dtype=torch.uint8),
    }
    tensors = {f"model.layers.0.{dtype}": makers[dtype]() for dtype in dtypes}
    head = load_head(write_checkpoint(tmp_path, CONFIG, tensors), init="random")
    assert {value.dtype for value in head.weights().values()} == {expected}


@pytest.mark.parametrize("engine", [None, "vllm", "sglang"])
def test_the_engine_that_will_serve_is_kept_with_the_head(base: Path, engine: Any) -> None:
    assert load_head(base, engine=engine).engine == engine
    assert load_head(base, engine=engine, init="random").engine == engine


# The report


def test_the_report_is_a_table_of_every_tensor(sharded: Path) -> None:
    report = load_head(sharded).report
    lines = str(report).splitlines()
    assert lines[0] == f"qwen3_5, 1 depth(s), {HEAD_BYTES:,} bytes of head, {report.bytes_read:,} bytes read"
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert cells == [
        [name, "BF16", "x".join(map(str, TENSORS[name].shape)), f"{TENSORS[name].nbytes:,}", HEAD_FILE]
        for name in sorted(CANONICAL)
    ]
    assert report.source == str(sharded)


def test_the_report_of_a_new_head_shows_what_is_random_and_what_was_left_alone(base: Path) -> None:
    text = str(load_head(base, init="random").report)
    for name in CANONICAL.values():
        assert re.search(rf"│ {re.escape(name)} .*│ random, not read +│", text)
    for name in CANONICAL:
        assert re.search(rf'│ {re.escape(name)} .*│ skipped: init="random" was asked for │', text)


def test_the_report_ends_with_its_notices(tmp_path: Path) -> None:
    report = load_head(write(tmp_path, {}, depths=None)).report
    assert str(report).splitlines()[-1] == f"notice: {report.notices[0]}"


# A plan reads nothing


def test_a_plan_is_made_from_headers_alone(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mtp_zoo.loader.TensorReader, "read_into", refuse_to_build)
    index = CheckpointIndex.open(base)
    head, plan, _ = mtp_zoo.loader.plan_head(index, Resolution(HeadSite(FAMILY), 1, tuple(CANONICAL)))
    assert plan.natives == tuple(sorted(CANONICAL))
    assert all(value.is_meta for value in head.weights().values())


def test_the_trainable_block_is_made_of_plain_modules_whatever_the_checkpoint_is_quantised_with(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/issues/43304"""
    for method in ("fp8", "compressed-tensors", "modelopt", "gptq", "awq", "quark"):
        root = write(tmp_path / method, {}, quantization_config={"quant_method": method})
        head = load_head(root)
        linear = [
            module for module in head.modules() if "proj" in type(module).__name__ or isinstance(module, nn.Linear)
        ]
        assert {type(module) for module in linear} == {nn.Linear}
        assert len(linear) == 8
        assert same_bits(head.weights(), {head_name: TENSORS[name] for name, head_name in CANONICAL.items()})


# Master weights


def test_a_hundred_tiny_steps_move_fp32_weights_and_leave_bf16_ones_where_they_were(base: Path) -> None:
    """https://github.com/huggingface/transformers/issues/36567: why training loads the head with dtype=torch.float32."""
    moved: dict[torch.dtype, Tensor] = {}
    for dtype in (torch.float32, torch.bfloat16):
        head = load_head(base, dtype=dtype)
        weight = head.weights()["depths.0.eh_proj.weight"]
        before = weight.detach().clone()
        optimizer = torch.optim.SGD(head.trainable_parameters(), lr=1e-6)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        moved[dtype] = (before - weight.detach()).float()[before.abs() > 0.05]
    expected = torch.full_like(moved[torch.float32], 1e-4)
    torch.testing.assert_close(moved[torch.float32], expected, rtol=0.1, atol=0)  # FP32 steps of 1e-6 round, too
    assert not moved[torch.bfloat16].any()
