"""Files, names and configurations that came apart: cases reported against other tools, through the whole library.

Cases of one module are tested beside it; the report's address is in the docstring there, as it is here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

import mtp_zoo as mz
from mtp_zoo.errors import HeadCountError, HeadNotFoundError, MTPZooError, ObjectiveError, SharedTensorError
from mtp_zoo.objective import MTPObjective
from mtp_zoo.registry import get_family, list_families
from mtp_zoo.rules import Skip
from tests.diagnosis.cases import FC, ONE, TWO, depths, reindexed, tensors, true_map, whole
from tests.exporting import HEAD, make_base, same, stored, train
from tests.heads import tiny_head
from tests.stored_forms import IN_STACK, Form, head_of, make, plain_form, site_of, write
from tests.tiny import tiny_config, write_checkpoint


def found(root: Path) -> dict[str, dict[str, Any]]:
    """Facts of every finding, by id."""
    return {finding.id: dict(finding.facts) for finding in mz.doctor(root).findings}


def test_a_tensor_that_the_index_puts_elsewhere_is_told_without_reading_it(tmp_path: Path) -> None:
    """https://github.com/huggingface/huggingface_hub/pull/4728"""
    facts = {"listed_in": ONE, "found_in": [TWO], "tensors": [FC]}
    assert found(reindexed(tmp_path / "a", {FC: ONE})) == {"MZ004": facts}
    nowhere = whole(tmp_path / "b", {FC: None})
    index = json.loads((nowhere / "model.safetensors.index.json").read_text())
    index["weight_map"] = true_map()
    (nowhere / "model.safetensors.index.json").write_text(json.dumps(index))
    facts = found(nowhere)
    assert facts.keys() == {"MZ005", "MZ201"}
    assert facts["MZ005"] == {"listed_in": TWO, "tensors": [FC]}
    assert facts["MZ201"]["tensors"].keys() == {FC}


@pytest.mark.parametrize(("file", "loads"), [(ONE, True), (TWO, False)])
def test_a_shard_that_was_not_downloaded_is_told_whoever_needs_it(file: str, loads: bool, tmp_path: Path) -> None:
    """https://github.com/sgl-project/sglang/pull/32279"""
    root = whole(tmp_path / "model")
    (root / file).unlink()
    facts = found(root)
    assert facts.keys() == {"MZ002"}
    assert facts["MZ002"]["file"] == file
    if loads:
        mz.load_head(root)
    else:
        with pytest.raises(MTPZooError, match=file):
            mz.load_head(root)


@pytest.mark.parametrize("family", IN_STACK)
def test_a_layer_that_a_quantisation_tool_dropped_is_neither_served_nor_made_up(family: str, tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/pull/35548"""
    config, stored_tensors = make(plain_form(family))
    head = set(head_of(family, stored_tensors))
    kept = {name: value for name, value in stored_tensors.items() if name not in head}
    root = write_checkpoint(tmp_path / "model", config, kept)
    layer = site_of(family).first_layer
    assert found(root)["MZ102"]["declared"] == 1
    with pytest.raises(HeadNotFoundError, match=rf"model\.layers\.{layer}\."):
        mz.load_head(root)
    first, second = (mz.load_head(root, init="random", seed=1) for _ in range(2))
    assert same(first.state_dict(), second.state_dict(), first.state_dict())
    assert set(first.report.initialised) == set(first.weights())


@pytest.mark.parametrize("family", IN_STACK)
@pytest.mark.parametrize("copies", [True, False])
def test_every_parameter_of_a_draft_has_a_source_in_an_export(family: str, copies: bool, tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/pull/43459: embedding and lm_head only at the top, and the draft looked inside."""
    base = write(tmp_path / "base", Form(family, plain_form(family).experts, copies=copies))
    mz.export(mz.load_head(base), base, tmp_path / "out")
    names = set(stored(tmp_path / "out"))
    rules = get_family(family).rules
    layer = str(site_of(family).first_layer)
    copied = [rule.native.replace("{n}", layer) for rule in rules if isinstance(rule, Skip) and rule.copy_of]
    top = {"embedding": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}
    assert set(top.values()) <= names
    assert names.issuperset(copied) is copies
    assert mz.load_head(tmp_path / "out").report.initialised == ()
    assert found(tmp_path / "out") == {}


def test_a_base_whose_tensors_are_still_mapped_is_updated_in_its_own_place(tmp_path: Path) -> None:
    """https://github.com/bghira/SimpleTuner/pull/2714 and https://github.com/huggingface/transformers/issues/37713"""
    base = make_base(tmp_path / "base")
    before = stored(base)
    with safe_open(base / "model-00003-of-00003.safetensors", framework="pt") as mapped:
        views = {name: mapped.get_tensor(name) for name in HEAD[5:]}
        head = train(mz.load_head(base))
        mz.export(head, base, in_place=True)
        assert same(views, before, views)
    after = stored(base)
    assert same(after, before, [name for name in before if not name.startswith("mtp.")])
    assert same(mz.load_head(base).state_dict(), head.state_dict(), head.state_dict())
    mz.rollback(base)
    assert same(stored(base), before, before)


def test_an_lm_head_that_is_declared_and_absent_is_not_tied_in_silence(tmp_path: Path) -> None:
    """https://github.com/QwenLM/Qwen3-VL-Embedding/issues/89"""
    root = write_checkpoint(tmp_path / "model", tiny_config(tied=False), tensors())
    assert "tie_word_embeddings is false" in found(root)["MZ107"]["reason"]
    with pytest.raises(SharedTensorError, match="tie_word_embeddings is false"):
        mz.load_shared(root)


OUTCOMES = {
    ("absent", 0): (HeadNotFoundError, {"MZ109"}),
    ("absent", 1): (None, {"MZ103"}),
    ("absent", 3): (None, {"MZ103"}),
    (None, 0): (HeadNotFoundError, {"MZ109"}),
    (None, 1): (None, {"MZ103"}),
    (None, 3): (None, {"MZ103"}),
    (0, 0): (HeadNotFoundError, {"MZ109"}),
    (0, 1): (HeadCountError, {"MZ103"}),
    (0, 3): (HeadCountError, {"MZ103"}),
    (1, 0): (HeadNotFoundError, {"MZ102"}),
    (1, 1): (None, set[str]()),
    (1, 3): (HeadCountError, {"MZ104"}),
    (3, 0): (HeadNotFoundError, {"MZ102"}),
    (3, 1): (HeadCountError, {"MZ104"}),
    (3, 3): (None, set[str]()),
}
"""Depths declared, depths on disk -> what a load does, what doctor finds; a load that ends well makes nothing up."""


@pytest.mark.parametrize(("declared", "on_disk"), OUTCOMES, ids=str)
def test_config_and_tensors_disagree_in_every_way(declared: Any, on_disk: int, tmp_path: Path) -> None:
    """https://github.com/ggml-org/llama.cpp/pull/26942"""
    root = depths(tmp_path / "model", declared=None if declared == "absent" else declared, stored=on_disk)
    if declared is None:
        config = json.loads((root / "config.json").read_text())
        (root / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": None}))
    error, findings = OUTCOMES[declared, on_disk]
    assert found(root).keys() == findings
    if error is not None:
        with pytest.raises(error):
            mz.load_head(root)
        return
    head = mz.load_head(root)
    assert (head.num_depths, head.report.initialised) == (on_disk, ())


def test_a_fine_tune_that_dropped_the_head_is_told_and_gets_one_back(tmp_path: Path) -> None:
    """https://github.com/unslothai/unsloth/pull/11042"""
    base, tuned = whole(tmp_path / "base"), depths(tmp_path / "tuned", declared=1, stored=0)
    facts = {"family": "qwen3_5", "field": "mtp_num_hidden_layers", "declared": 1}
    assert found(tuned) == {"MZ102": facts}
    mz.export(train(mz.load_head(base)), tuned, tmp_path / "out")
    assert found(tmp_path / "out") == {}
    assert stored(tmp_path / "out").keys() == tensors().keys()


def test_an_objective_without_depths_is_refused_when_it_is_made() -> None:
    """https://github.com/PaddlePaddle/PaddleFormers/pull/3637: variables that only a depth would have set"""
    with pytest.raises(ObjectiveError, match="depths"):
        MTPObjective(tiny_head(), depths=0, loss="ce")


LISTS = ("layer_types", "mlp_layer_types", "indexer_types", "compress_ratios", "moe_layer_freq")
"""Fields with one value a layer of the trunk, in the configs of one release or another."""


@pytest.mark.parametrize("family", [family.name for family in list_families()])
def test_lists_that_end_with_the_trunk_do_not_stop_the_layer_behind_it(family: str, tmp_path: Path) -> None:
    """https://github.com/NVIDIA-NeMo/Automodel/pull/2191: layer N + k was looked up in a list of N"""
    config, values = make(plain_form(family))
    trunk = config["num_hidden_layers"]
    lists = {name: list(config[name])[:trunk] for name in LISTS if isinstance(config.get(name), list)}
    lists["compress_ratios"] = [1] * trunk
    root = write_checkpoint(tmp_path / "model", {**config, **lists}, values)
    head = mz.load_head(root)
    assert head.num_depths == 1
    assert found(root) == {}
