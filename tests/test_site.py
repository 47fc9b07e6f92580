"""Heads that are further layers of the trunk's stack: which layer is theirs, and what export makes of another base's number."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mtp_zoo as mz
from mtp_zoo.errors import HeadCountError, HeadLayerError, HeadNotFoundError, MTPZooError
from mtp_zoo.registry import get_family
from mtp_zoo.site import HeadSite
from tests.exporting import same, stored, train
from tests.stored_forms import IN_STACK, Form, Tensors, config_of, make, plain_form, renumbered
from tests.tiny import write_checkpoint

TRUNK = 2
"""Layers of the tiny trunks; the head is layer 2."""


def layer(tensors: Tensors, number: int) -> Tensors:
    return {name: value for name, value in tensors.items() if name.startswith(f"model.layers.{number}.")}


def without(tensors: Tensors, number: int) -> Tensors:
    return {name: value for name, value in tensors.items() if name not in layer(tensors, number)}


def moved(tensors: Tensors, trunk: int) -> Tensors:
    """The same model with a trunk of another length: layers are cut off, or the last is repeated; the head lies behind it."""
    head = layer(tensors, TRUNK)
    out = without(tensors, TRUNK)
    for number in range(trunk, TRUNK):
        out = without(out, number)
    for number in range(TRUNK, trunk):
        out |= renumbered(layer(tensors, TRUNK - 1), TRUNK - 1, number)
    return {**out, **renumbered(head, TRUNK, trunk)}


def checkpoint(folder: Path, family: str, trunk: int = TRUNK, **fields: Any) -> tuple[Path, Tensors]:
    config, tensors = make(plain_form(family), num_hidden_layers=trunk, **fields)
    tensors = moved(tensors, trunk)
    return write_checkpoint(folder, config, tensors), tensors


# Scope


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.61.eh_proj.weight", True),
        ("model.layers.62.mlp.gate.weight", True),
        ("model.layers.61.", True),
        ("model.layers.60.mlp.gate.weight", False),
        ("model.layers.6.eh_proj.weight", False),
        ("model.layers.061.eh_proj.weight", True),
        ("model.layers.x.eh_proj.weight", False),
        ("language_model.model.layers.61.eh_proj.weight", False),
        ("model.layers.99999999999999999999.eh_proj.weight", False),
        ("model.norm.weight", False),
    ],
)
def test_the_layers_number_tells_the_head_from_the_trunk(name: str, expected: bool) -> None:
    assert HeadSite(get_family("deepseek_v3"), 61).in_scope(name) is expected


def test_depths_are_counted_from_the_heads_first_layer() -> None:
    names = [
        f"model.layers.{n}.{part}" for n in (0, 60, 61, 62) for part in ("mlp.gate.weight", "input_layernorm.weight")
    ]
    site = HeadSite(get_family("deepseek_v3"), 61)
    assert (site.depth_numbers(names), site.depths_on_disk(names)) == ({0, 1}, 2)


# The layer: config and tensors agree, or nothing is loaded


@pytest.mark.parametrize("trunk", [1, 2, 5], ids=["pruned", "as released", "extended"])
@pytest.mark.parametrize("family", IN_STACK)
def test_a_head_is_found_behind_a_trunk_of_any_length(family: str, trunk: int, tmp_path: Path) -> None:
    """transformers' own loaders look for fixed numbers (61, 92, 46, 47, 78) and take a pruned model's head for its trunk."""
    base, tensors = checkpoint(tmp_path / "base", family, trunk)
    head = mz.load_head(base)
    assert head.site.first_layer == trunk
    assert {tensor.name for tensor in head.report.tensors} == set(layer(tensors, trunk))
    mz.export(head, base=base, out=tmp_path / "out")
    assert same(stored(tmp_path / "out"), tensors, tensors)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_hidden_layers": 1}, "is 1, so a head is expected to begin at 'model.layers.1.'"),
        ({"num_hidden_layers": 3}, "is 3, so a head is expected to begin at 'model.layers.3.'"),
        ({"num_hidden_layers": 61}, "is 61, so a head is expected to begin at 'model.layers.61.'"),
        ({"num_hidden_layers": None}, "'num_hidden_layers' is missing"),
    ],
)
@pytest.mark.parametrize("family", IN_STACK)
def test_a_config_that_points_elsewhere_is_refused_with_both_layers(
    family: str, fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config, tensors = make(plain_form(family))
    base = write_checkpoint(tmp_path, {**config, **fields}, tensors)
    with pytest.raises(HeadLayerError, match=re.escape(words)) as caught:
        mz.load_head(base)
    assert "the first is layer 2" in str(caught.value)


def test_a_missing_field_is_refused_like_a_null(tmp_path: Path) -> None:
    config, tensors = make(plain_form("deepseek_v3"))
    del config["num_hidden_layers"]
    with pytest.raises(HeadLayerError, match=r"'num_hidden_layers' is missing.*the first is layer 2"):
        mz.load_head(write_checkpoint(tmp_path, config, tensors))


@pytest.mark.parametrize("family", IN_STACK)
def test_a_trunk_longer_than_its_config_says_is_no_head(family: str, tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/pull/35548: the layers behind the declared ones are the trunk's own."""
    config, tensors = make(plain_form(family), num_hidden_layers=1)
    base = write_checkpoint(tmp_path, config, without(tensors, TRUNK))
    with pytest.raises(
        HeadNotFoundError, match=r"declares 1, and no 'model.layers.1.\*' with a head's fusion is on disk"
    ):
        mz.load_head(base)


@pytest.mark.parametrize("family", IN_STACK)
def test_a_checkpoint_without_its_last_layer_has_no_head(family: str, tmp_path: Path) -> None:
    """https://github.com/unslothai/unsloth/pull/11042: saved by a trainer that drops it, the count still declared."""
    config, tensors = make(plain_form(family))
    base = write_checkpoint(tmp_path, config, without(tensors, TRUNK))
    with pytest.raises(
        HeadNotFoundError, match=r"declares 1, and no 'model.layers.2.\*' with a head's fusion is on disk"
    ):
        mz.load_head(base)


@pytest.mark.parametrize("prefix", ["language_model.", "base_model.model.", "module."])
@pytest.mark.parametrize("family", IN_STACK)
def test_a_head_behind_a_foreign_prefix_is_named(family: str, prefix: str, tmp_path: Path) -> None:
    config, tensors = make(plain_form(family))
    renamed = {f"{prefix}{name}": value for name, value in tensors.items()}
    with pytest.raises(HeadNotFoundError) as caught:
        mz.load_head(write_checkpoint(tmp_path, config, renamed), family=family)
    assert f"tensors look like a head under another prefix, for example '{prefix}model.layers.2." in str(caught.value)


@pytest.mark.parametrize("number", [4, 30])
def test_a_layer_that_does_not_follow_is_refused(number: int, tmp_path: Path) -> None:
    config, tensors = make(plain_form("deepseek_v3"))
    tensors |= renumbered(layer(tensors, TRUNK), TRUNK, number)
    with pytest.raises(HeadCountError, match=rf"numbered from 2 without a gap, found \[2, {number}\]"):
        mz.load_head(write_checkpoint(tmp_path, config, tensors))


@pytest.mark.parametrize("family", IN_STACK)
def test_two_depths_are_two_layers(family: str, tmp_path: Path) -> None:
    config, tensors = make(plain_form(family), num_nextn_predict_layers=2)
    second = {name: value.flip(0) for name, value in layer(tensors, TRUNK).items()}
    tensors |= renumbered(second, TRUNK, TRUNK + 1)
    base = write_checkpoint(tmp_path / "base", config, tensors)
    head = mz.load_head(base)
    assert (head.num_depths, head.depth_policy) == (2, "distinct")
    weights = head.weights()
    assert torch.equal(weights["depths.1.eh_proj.weight"], tensors["model.layers.3.eh_proj.weight"])
    assert not torch.equal(weights["depths.0.eh_proj.weight"], weights["depths.1.eh_proj.weight"])
    mz.export(head, base=base, out=tmp_path / "out")
    assert same(stored(tmp_path / "out"), tensors, tensors)


@pytest.mark.parametrize(("declared", "on_disk"), [(2, 1), (1, 2), (0, 1)])
def test_a_declared_count_that_is_not_on_disk_is_refused(declared: int, on_disk: int, tmp_path: Path) -> None:
    config, tensors = make(plain_form("deepseek_v3"), num_nextn_predict_layers=declared)
    for extra in range(1, on_disk):
        tensors |= renumbered(layer(tensors, TRUNK), TRUNK, TRUNK + extra)
    words = f"'num_nextn_predict_layers' says {declared}, the tensors hold {on_disk}"
    with pytest.raises(HeadCountError, match=words):
        mz.load_head(write_checkpoint(tmp_path, config, tensors))


# Another base


def oracle(tensors: Tensors, old: int, new: int) -> Tensors:
    return renumbered(layer(tensors, old), old, new)


@pytest.mark.parametrize("experts", ["one_by_one", "packed"])
@pytest.mark.parametrize("trunk", [1, 5])
@pytest.mark.parametrize("family", IN_STACK)
def test_a_head_takes_the_layer_number_and_the_expert_form_of_the_base(
    family: str, trunk: int, experts: Any, tmp_path: Path
) -> None:
    """From layer 2, experts stored the other way."""
    other = "packed" if experts == "one_by_one" else "one_by_one"
    origin = write_checkpoint(tmp_path / "origin", *make(Form(family, other)))
    head = mz.load_head(origin)
    config, tensors = make(Form(family, experts), num_hidden_layers=trunk)
    expected = moved(tensors, trunk)
    spoilt = {name: torch.zeros_like(v) if name in layer(expected, trunk) else v for name, v in expected.items()}
    base = write_checkpoint(tmp_path / "base", config, spoilt, shards=2)
    mz.export(head, base=base, out=tmp_path / "out")
    out = stored(tmp_path / "out")
    assert out.keys() == expected.keys()
    assert same(out, expected, expected)


@pytest.mark.parametrize("family", IN_STACK)
def test_a_base_that_lost_its_head_gets_it_behind_its_trunk(family: str, tmp_path: Path) -> None:
    """https://github.com/unslothai/unsloth/pull/11042; experts in the form in which they came."""
    origin, tensors = checkpoint(tmp_path / "origin", family)
    config, _ = make(plain_form(family), num_hidden_layers=3)
    expected = moved(tensors, 3)
    base = write_checkpoint(tmp_path / "base", config, without(expected, 3))
    mz.export(mz.load_head(origin), base=base, out=tmp_path / "out")
    out = stored(tmp_path / "out")
    assert out.keys() == expected.keys()
    assert same(out, expected, expected)
    assert mz.load_head(tmp_path / "out").site.first_layer == 3


@pytest.mark.parametrize("family", IN_STACK)
def test_a_new_head_is_made_behind_the_trunk_and_stored_like_it(family: str, tmp_path: Path) -> None:
    """Save the router's bias, which is FP32 in every release."""
    config, tensors = make(plain_form(family))
    base = write_checkpoint(tmp_path / "base", config, without(tensors, TRUNK))
    head = mz.load_head(base, init="random")
    mz.export(head, base=base, out=tmp_path / "out")
    out = stored(tmp_path / "out")
    assert out.keys() == tensors.keys()
    exact = "model.layers.2.mlp.gate.e_score_correction_bias"
    assert [name for name, value in layer(out, TRUNK).items() if value.dtype == torch.float32] == [exact]
    assert {value.dtype for name, value in layer(out, TRUNK).items() if name != exact} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("fields", "error"),
    [({"num_hidden_layers": 3}, HeadLayerError), ({"hidden_size": 32}, MTPZooError)],
    ids=["points elsewhere", "another model"],
)
def test_a_base_that_does_not_fit_is_refused_and_nothing_is_written(
    fields: dict[str, Any], error: type[MTPZooError], tmp_path: Path
) -> None:
    origin, tensors = checkpoint(tmp_path / "origin", "glm4_moe_lite")
    base = write_checkpoint(tmp_path / "base", {**config_of("glm4_moe_lite"), **fields}, tensors)
    with pytest.raises(error):
        mz.export(train(mz.load_head(origin)), base=base, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_embedding_of_the_trunk_is_not_the_heads_copy(tmp_path: Path) -> None:
    """`model.embed_tokens` and `model.layers.2.embed_tokens` differ in one part of the name."""
    config, tensors = make(Form("deepseek_v3", "one_by_one", copies=True))
    tensors["model.layers.2.embed_tokens.weight"] = torch.zeros_like(tensors["model.embed_tokens.weight"])
    shared = mz.load_shared(write_checkpoint(tmp_path, config, tensors))
    embedding: Tensor = shared.embedding.weight  # pyright: ignore[reportAssignmentType]
    assert torch.equal(embedding, tensors["model.embed_tokens.weight"])
