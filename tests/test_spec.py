"""HeadSpec: every convention is stated, and stated with a value that exists."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from mtp_zoo.errors import FamilyDefinitionError
from mtp_zoo.registry import get_family
from mtp_zoo.spec import HeadSpec, PerEngine

FIELDS: dict[str, Any] = {
    "fuse_order": "embed_hidden",
    "norm_weight": "zero_centered",
    "hidden_tap": "post_norm",
    "recycle": PerEngine.same("post_norm"),
    "depth_policy": "recycled",
    "position_rule": "hidden",
    "zero_first_embedding": PerEngine.same(False),
    "private_embedding": "absent",
    "private_head": "absent",
    "always_float": ("eh_proj.weight",),
}

VALUES = {
    "fuse_order": {"embed_hidden", "hidden_embed", "sum"},
    "norm_weight": {"direct", "zero_centered"},
    "hidden_tap": {"post_norm", "pre_norm", "streams"},
    "recycle": {"post_norm", "pre_norm", "streams"},
    "depth_policy": {"recycled", "distinct"},
    "position_rule": {"hidden", "token", "constant"},
    "private_embedding": {"ignored", "kept", "absent"},
    "private_head": {"ignored", "kept", "absent"},
}


def test_these_are_all_the_fields() -> None:
    assert {field.name for field in dataclasses.fields(HeadSpec)} == FIELDS.keys()


@pytest.mark.parametrize("field", FIELDS)
def test_a_convention_that_is_left_out_fails(field: str) -> None:
    with pytest.raises(TypeError, match=f"missing 1 required keyword-only argument: '{field}'"):
        HeadSpec(**{name: value for name, value in FIELDS.items() if name != field})


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in VALUES for value in sorted(VALUES[field])])
def test_every_listed_value_is_taken(field: str, value: str) -> None:
    given = PerEngine.same(value) if field == "recycle" else value
    assert getattr(HeadSpec(**{**FIELDS, field: given}), field) == given


@pytest.mark.parametrize("field", [field for field in VALUES if field != "recycle"])
@pytest.mark.parametrize("value", ["", "Post_norm", "other", None, 1])
def test_a_value_that_is_not_listed_is_refused(field: str, value: object) -> None:
    with pytest.raises(FamilyDefinitionError, match=f"{field}: expected one of .*, got {value!r}"):
        HeadSpec(**{**FIELDS, field: value})


@pytest.mark.parametrize("reader", ["vllm", "sglang", "train"])
@pytest.mark.parametrize("field", ["recycle", "zero_first_embedding"])
def test_a_value_that_is_wrong_for_one_reader_alone_is_refused(field: str, reader: str) -> None:
    value = dataclasses.replace(FIELDS[field], **{reader: "no"})
    with pytest.raises(FamilyDefinitionError, match=f"{field}.{reader}: expected one of .*, got 'no'"):
        HeadSpec(**{**FIELDS, field: value})


def test_one_error_holds_every_wrong_value() -> None:
    with pytest.raises(FamilyDefinitionError) as caught:
        HeadSpec(**{**FIELDS, "fuse_order": "both", "hidden_tap": "after", "recycle": PerEngine.same("never")})
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "fuse_order",
        "hidden_tap",
        "recycle.vllm",
        "recycle.sglang",
        "recycle.train",
    ]


def test_a_spec_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        HeadSpec(**FIELDS).fuse_order = "sum"  # type: ignore[misc]


def test_an_engines_own_convention_is_read_by_its_name() -> None:
    recycle = PerEngine(vllm="pre_norm", sglang="post_norm", train="post_norm")
    assert [recycle.of(engine) for engine in ("vllm", "sglang", None)] == ["pre_norm", "post_norm", "post_norm"]


def test_a_convention_is_described_by_engine_only_where_engines_differ() -> None:
    assert PerEngine.same("post_norm").describe() == "post_norm"
    assert PerEngine(vllm=True, sglang=False, train=False).describe() == {"vllm": True, "sglang": False, "train": False}


def test_a_spec_is_described_whole_and_by_engine_where_they_differ() -> None:
    told = get_family("glm4_moe").spec.describe()
    assert list(told) == [field.name for field in dataclasses.fields(HeadSpec)]
    assert told["recycle"] == {"vllm": "pre_norm", "sglang": "post_norm", "train": "post_norm"}
    assert told["hidden_tap"] == "post_norm"
    assert json.loads(json.dumps(told)) == told
