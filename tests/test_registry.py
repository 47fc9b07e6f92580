"""The table of families, and whose head a checkpoint holds."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from mtp_zoo import registry
from mtp_zoo.errors import (
    DuplicateFamilyError,
    HeadCountError,
    HeadNotFoundError,
    MTPZooError,
    UnknownFamilyError,
    UnresolvedFamilyError,
)
from mtp_zoo.keymap import Rename
from mtp_zoo.modelconfig import ModelConfig
from mtp_zoo.registry import Family, get_family, list_families, register, resolve, resolve_family
from mtp_zoo.site import HeadSite
from tests.tiny import LAYER_TENSORS

COUNT = "mtp_num_hidden_layers"
OUTER = ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
TRUNK = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight")
ABSENT = object()


def head(depths: int = 1, prefix: str = "") -> list[str]:
    outer = [f"{prefix}mtp.{name}.weight" for name in OUTER if depths]
    return outer + [f"{prefix}mtp.layers.{d}.{name}" for d in range(depths) for name in LAYER_TENSORS]


def config(count: object = ABSENT, model_type: object = "qwen3_5_text", **fields: Any) -> ModelConfig:
    raw = {"model_type": model_type, **fields, **({} if count is ABSENT else {COUNT: count})}
    return ModelConfig(raw, Path("org/model/config.json"))


@pytest.fixture(autouse=True)
def _one_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table holds qwen3_5 alone, and is put back behind the test."""
    monkeypatch.setattr(registry, "_FAMILIES", {"qwen3_5": get_family("qwen3_5")})


def toy_family(name: str = "toy", scope: str = "toy.", **changes: Any) -> Family:
    """A family of two tensors, registered."""
    rules = (Rename(f"{scope}fc", "depths.0.eh_proj.weight"), Rename(f"{scope}{{d}}.w", "depths.{d}.w"))
    fields = {"model_types": (name,), "scope": (scope,), "layer": f"{scope}{{d}}.", "rules": rules, **changes}
    return register(dataclasses.replace(get_family("qwen3_5"), name=name, **fields))


# The table


def test_a_family_is_listed_by_name_and_found_by_it() -> None:
    zebra, ant = toy_family("zebra"), toy_family("ant", scope="ant.")
    assert [family.name for family in list_families()] == ["ant", "qwen3_5", "zebra"]
    assert get_family("zebra") is zebra
    assert get_family("ant") is ant


@pytest.mark.parametrize("wrong", ["qwen35", "qwen3.5", "Qwen3_5", "qwen3_5_moe"])
def test_an_unknown_name_is_answered_with_the_closest(wrong: str) -> None:
    with pytest.raises(UnknownFamilyError, match=f"No family is called '{re.escape(wrong)}'. Did you mean 'qwen3_5'?"):
        get_family(wrong)


def test_an_unknown_name_like_no_other_is_answered_with_the_list() -> None:
    with pytest.raises(UnknownFamilyError, match="Use one of: qwen3_5 ") as caught:
        get_family("llama")
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "model_types"),
    [
        ("qwen3_5", ("new",)),
        ("new", ("qwen3_5",)),
        ("new", ("fresh", "qwen3_5_text")),
        ("qwen3_5_text", ("new",)),
    ],
)
def test_a_name_or_model_type_that_is_taken_is_refused_and_nothing_is_registered(
    name: str, model_types: tuple[str, ...]
) -> None:
    before = list_families()
    with pytest.raises(DuplicateFamilyError, match="already belong to family 'qwen3_5'"):
        toy_family(name, model_types=model_types)
    assert list_families() == before


# Scope: which tensors are the head's


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mtp.fc.weight", True),
        ("mtp.anything", True),
        ("mtp", False),
        ("mtpx.fc.weight", False),
        ("model.layers.0.mlp.mtp_gate_dummy.weight", False),
        ("model.mtp.fc.weight", False),
        ("visual.blocks.0.attn.qkv.weight", False),
        ("model.visual.mtp.fc.weight", False),
    ],
)
def test_the_heads_scope_is_a_prefix_and_not_a_word(name: str, expected: bool) -> None:
    """https://github.com/sgl-project/sglang/pull/30456"""
    assert HeadSite(get_family("qwen3_5")).in_scope(name) is expected


def test_the_heads_names_are_a_positive_list() -> None:
    """https://github.com/huggingface/transformers/pull/45638: what the trunk does not expect is not all the head's."""
    traps = ["visual.merger.weight", "model.layers.0.mlp.mtp_gate_dummy.weight", "model.rotary_emb.inv_freq"]
    found = resolve([*traps, *TRUNK, *head()], config(1))
    assert found.names == tuple(sorted(head()))
    assert len(found.names) == 15


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], set()),
        (["mtp.fc.weight", "mtp.norm.weight"], set()),
        (["mtp.layers.0.a"], {0}),
        (["mtp.layers.0.a", "mtp.layers.10.a", "mtp.layers.2.b.c"], {0, 2, 10}),
        (["mtp.layers.x.a", "mtp.layers.1", "mtp.layers.-1.a", "mtp.layers.\u0663.a", "x.mtp.layers.4.a"], set()),
        (["mtp.layers." + "9" * 5000 + ".a"], set()),
    ],
)
def test_depths_are_told_by_the_numbers_of_their_blocks(names: list[str], expected: set[int]) -> None:
    site = HeadSite(get_family("qwen3_5"))
    assert site.depth_numbers(names) == expected
    assert site.depths_on_disk(names) == len(expected)


# Config and tensors on the number of depths

OUTCOMES: dict[tuple[Any, int], tuple[type[MTPZooError] | None, str]] = {
    (ABSENT, 0): (HeadNotFoundError, "its config declares none, and none of its 15 tensors (mtp.*) is on disk"),
    (ABSENT, 1): (None, f"config.json does not declare '{COUNT}' although 1 depth(s) are on disk."),
    (ABSENT, 3): (None, f"config.json does not declare '{COUNT}' although 3 depth(s) are on disk."),
    (None, 0): (HeadNotFoundError, "its config declares none, and none of its 15 tensors (mtp.*) is on disk"),
    (None, 1): (None, f"config.json does not declare '{COUNT}' although 1 depth(s) are on disk."),
    (None, 3): (None, f"config.json does not declare '{COUNT}' although 3 depth(s) are on disk."),
    (0, 0): (HeadNotFoundError, "its config declares none, and none of its 15 tensors (mtp.*) is on disk"),
    (0, 1): (HeadCountError, f"'{COUNT}' says 0, the tensors hold 1"),
    (0, 3): (HeadCountError, f"'{COUNT}' says 0, the tensors hold 3"),
    (1, 0): (HeadNotFoundError, f"'{COUNT}' declares 1, and none of its 15 tensors (mtp.*) is on disk"),
    (1, 1): (None, ""),
    (1, 3): (HeadCountError, f"'{COUNT}' says 1, the tensors hold 3"),
    (3, 0): (HeadNotFoundError, f"'{COUNT}' declares 3, and none of its 37 tensors (mtp.*) is on disk"),
    (3, 1): (HeadCountError, f"'{COUNT}' says 3, the tensors hold 1"),
    (3, 3): (None, ""),
}


@pytest.mark.parametrize(("declared", "found"), OUTCOMES, ids=lambda value: "absent" if value is ABSENT else str(value))
def test_the_count_in_the_config_against_the_depths_on_disk(declared: object, found: int) -> None:
    """https://github.com/ggml-org/llama.cpp/pull/26942"""
    kind, words = OUTCOMES[declared, found]
    names = [*TRUNK, *head(found)]
    if kind is not None:
        with pytest.raises(kind) as caught:
            resolve(names, config(declared))
        assert words in caught.value.message
        assert "org/model" in caught.value.message
        return
    resolution = resolve(names, config(declared))
    assert (resolution.depths, resolution.names) == (found, tuple(sorted(head(found))))
    assert resolution.notices == ((words,) if words else ())


@pytest.mark.parametrize("numbers", [(1,), (0, 2), (999_999_999,)], ids=str)
def test_depths_with_a_gap_are_refused_at_once(numbers: tuple[int, ...]) -> None:
    names = [f"mtp.layers.{number}.{name}" for number in numbers for name in LAYER_TENSORS]
    expected = re.escape(f"numbered from 0 without a gap, found {list(numbers)}")
    for count in (ABSENT, len(numbers), max(numbers) + 1):
        with pytest.raises(HeadCountError, match=expected):
            resolve(names, config(count))


def test_a_family_without_a_count_field_counts_tensors_alone() -> None:
    toy_family(count_field=None)
    resolution = resolve(["toy.fc", "toy.0.w", "toy.1.w"], config(7, model_type="toy"))
    assert (resolution.depths, resolution.notices) == (2, ())
    with pytest.raises(HeadNotFoundError, match=r"its config declares none, and none of its 2 tensors \(toy\.\*\)"):
        resolve(TRUNK, config(7, model_type="toy"))


# No head


def test_a_config_that_declares_a_head_over_tensors_without_one_is_a_contradiction() -> None:
    """https://github.com/unslothai/unsloth/pull/11042: fine-tunes saved by transformers."""
    with pytest.raises(HeadNotFoundError) as caught:
        resolve(TRUNK, config(1))
    assert str(caught.value) == (
        f"Looking for the qwen3_5 head of org/model: '{COUNT}' declares 1, and none of its 15 tensors (mtp.*) is on "
        "disk.\n"
        "Remedy: Take the head from the original checkpoint (training tools drop it on save), or ask for a new one with "
        'init="random".'
    )


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model.", "a.b.c.d."])
def test_a_head_under_another_prefix_is_named(prefix: str) -> None:
    with pytest.raises(HeadNotFoundError) as caught:
        resolve([*TRUNK, *head(prefix=prefix)], config(1))
    example = f"15 tensors look like a head under another prefix, for example '{prefix}mtp.fc.weight'."
    assert example in caught.value.message


def test_a_trunk_tensor_with_mtp_in_its_name_is_not_taken_for_a_lost_head() -> None:
    with pytest.raises(HeadNotFoundError) as caught:
        resolve(["model.layers.0.mtp.gate_dummy.weight", "model.layers.0.mlp.mtp_gate_dummy.weight"], config(1))
    assert "another prefix" not in caught.value.message


# Whose head: tensors first


def test_tensors_and_model_type_that_agree_decide() -> None:
    toy_family("other", scope="other.")
    assert resolve_family([*TRUNK, *head()], config()).name == "qwen3_5"
    assert resolve_family([*TRUNK, *head()], config(model_type="qwen3_5", text_config={})).name == "qwen3_5"


def test_tensors_alone_decide_where_the_config_has_no_type() -> None:
    assert resolve_family(head(), config(model_type=None)).name == "qwen3_5"


def test_the_type_decides_where_the_head_is_gone_or_damaged() -> None:
    for names in (TRUNK, [*TRUNK, *head()[:3]], [*head(), "mtp.fc.weight_scale_inv"]):
        assert resolve_family(names, config()).name == "qwen3_5"


def test_among_families_of_one_scope_the_type_decides() -> None:
    qwen3_5 = get_family("qwen3_5")
    twin = toy_family("twin", scope="mtp.", layer=qwen3_5.layer, rules=qwen3_5.rules)
    assert resolve_family(head(), config(model_type="twin")) is twin
    assert resolve_family(head(), config()) is qwen3_5
    with pytest.raises(UnresolvedFamilyError, match=r"its tensors fit \['qwen3_5', 'twin'\], .* model_type \[\]"):
        resolve_family(head(), config(model_type=None))


def test_the_language_models_own_type_outranks_that_of_the_whole() -> None:
    toy_family("a_whole", scope="a.")
    nested = config(model_type="a_whole", text_config={"model_type": "qwen3_5_text"})
    assert resolve_family(TRUNK, nested).name == "qwen3_5"


@pytest.mark.parametrize(
    ("names", "model_type", "shown"),
    [
        (head(), "llama", r"its tensors fit \['qwen3_5'\], its config says model_type \['llama'\]"),
        (head(), "toy", r"its tensors fit \['qwen3_5'\], its config says model_type \['toy'\]"),
        (["toy.fc", "toy.0.w"], "qwen3_5", r"its tensors fit \['toy'\], its config says model_type \['qwen3_5'\]"),
        (TRUNK, "llama", r"its tensors fit no family, its config says model_type \['llama'\]"),
        (TRUNK, None, r"its tensors fit no family, its config says model_type \[\]"),
        (["toy.fc", *head()], None, r"its tensors fit \['qwen3_5', 'toy'\], its config says model_type \[\]"),
    ],
)
def test_tensors_that_contradict_the_type_are_refused_and_both_are_shown(
    names: list[str], model_type: str | None, shown: str
) -> None:
    toy_family()
    with pytest.raises(UnresolvedFamilyError, match=shown) as caught:
        resolve(names, config(1, model_type=model_type))
    assert "qwen3_5, toy" in caught.value.remedy


def test_a_caller_who_names_the_family_is_not_second_guessed() -> None:
    toy = toy_family()
    resolution = resolve(["toy.fc", "toy.0.w", *head()], config(1, model_type="llama"), family=toy)
    assert (resolution.family, resolution.depths, resolution.names) == (toy, 1, ("toy.0.w", "toy.fc"))
