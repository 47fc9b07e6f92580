"""config.json as checkpoints write it: flat or nested, with fields in one place, in two, or in none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtp_zoo.errors import ModelConfigError
from mtp_zoo.modelconfig import ModelConfig

FIELD = "mtp_num_hidden_layers"
ABSENT = object()


def config(raw: dict[str, Any]) -> ModelConfig:
    return ModelConfig(raw, Path("org/model/config.json"))


def nested(inner: object, outer: object = ABSENT, field: str = FIELD) -> ModelConfig:
    return config({**with_field(outer, field), "text_config": with_field(inner, field)})


def with_field(value: object, field: str) -> dict[str, Any]:
    return {} if value is ABSENT else {field: value}


# Reading the file


def test_a_flat_and_a_nested_file_are_read(tmp_path: Path) -> None:
    for raw in ({"model_type": "a"}, {"text_config": {"model_type": "a_text"}}):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        read = ModelConfig.read(tmp_path)
        assert read.raw == raw
        assert read.path == tmp_path / "config.json"
        assert read.is_nested is ("text_config" in raw)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it can't be read as JSON"),
        (b"{", "it can't be read as JSON"),
        (b"\xff\xfe{}", "it can't be read as JSON"),
        (b"[" * 100_000, "it can't be read as JSON"),
        (b"[]", "expected an object, got list"),
        (b"null", "expected an object, got NoneType"),
        (b'{"text_config": null}', "expected 'text_config' to be an object, got NoneType"),
        (b'{"text_config": [1]}', "expected 'text_config' to be an object, got list"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelConfigError, match=message) as caught:
        ModelConfig.read(tmp_path)
    assert str(tmp_path / "config.json") in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"config\.json does not exist"):
        ModelConfig.read(tmp_path)


def test_a_directory_of_that_name_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelConfigError, match=r"it is not a regular file"):
        ModelConfig.read(tmp_path)


# The language model's view


def test_the_text_view_of_a_flat_config_is_the_config() -> None:
    assert config({"hidden_size": 3, "dtype": "float16"}).text == {"hidden_size": 3, "dtype": "float16"}


def test_the_text_view_of_a_nested_config_takes_dtype_and_tie_flag_from_outside_where_it_has_none() -> None:
    raw = {"hidden_size": 9, "dtype": "float16", "tie_word_embeddings": True, "text_config": {"hidden_size": 3}}
    assert config(raw).text == {"hidden_size": 3, "dtype": "float16", "tie_word_embeddings": True}
    raw["text_config"] = {"dtype": "bfloat16"}
    assert config(raw).text == {"dtype": "bfloat16", "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({}, ()),
        ({"model_type": None}, ()),
        ({"model_type": "a"}, ("a",)),
        ({"model_type": "a", "text_config": {}}, ("a",)),
        ({"model_type": "a", "text_config": {"model_type": "a_text"}}, ("a_text", "a")),
        ({"model_type": "a", "text_config": {"model_type": "a"}}, ("a",)),
    ],
)
def test_the_language_models_own_type_comes_first(raw: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert config(raw).model_types == expected


# Counts


@pytest.mark.parametrize(("value", "expected"), [(ABSENT, None), (None, None), (0, 0), (1, 1), (3, 3)])
def test_an_absent_or_null_count_is_none_and_zero_is_zero(value: object, expected: int | None) -> None:
    """https://github.com/NVIDIA/Model-Optimizer/pull/1532"""
    assert config(with_field(value, FIELD)).count(FIELD) == expected
    assert nested(value).count(FIELD) == expected
    assert nested(ABSENT, outer=value).count(FIELD) == expected


@pytest.mark.parametrize("value", ["1", 1.0, -1, True, [1], {}], ids=repr)
def test_a_count_of_the_wrong_kind_is_refused_in_the_place_where_it_is(value: object) -> None:
    """https://github.com/NVIDIA/Model-Optimizer/pull/1532"""
    with pytest.raises(ModelConfigError) as caught:
        config({FIELD: value}).count(FIELD)
    assert f"expected '{FIELD}' to be an integer >= 0 or null, got {value!r}" in caught.value.message
    with pytest.raises(ModelConfigError) as caught:
        nested(value).count(FIELD)
    assert f"expected 'text_config.{FIELD}' to be an integer >= 0 or null" in caught.value.message
    assert "org/model/config.json" in caught.value.message


@pytest.mark.parametrize(("inner", "outer", "expected"), [(1, 1, 1), (None, 1, 1), (1, None, 1), (None, None, None)])
def test_two_places_that_agree_are_one(inner: object, outer: object, expected: int | None) -> None:
    assert nested(inner, outer).count(FIELD) == expected


def test_two_places_that_disagree_are_refused() -> None:
    with pytest.raises(ModelConfigError, match=f"'{FIELD}' is 1 in text_config and 3 outside it"):
        nested(1, 3).count(FIELD)


# Tied embeddings


@pytest.mark.parametrize(("value", "expected"), [(ABSENT, False), (None, False), (False, False), (True, True)])
def test_embeddings_are_tied_only_where_the_config_says_so(value: object, expected: bool) -> None:
    field = "tie_word_embeddings"
    assert config(with_field(value, field)).tied is expected
    assert nested(value, field=field).tied is expected
    assert nested(ABSENT, outer=value, field=field).tied is expected


@pytest.mark.parametrize("value", ["true", 1, 0])
def test_a_tie_flag_that_is_no_boolean_is_refused(value: object) -> None:
    with pytest.raises(ModelConfigError, match="expected 'tie_word_embeddings' to be true, false or null"):
        assert config({"tie_word_embeddings": value}).tied


@pytest.mark.parametrize(("inner", "outer"), [(True, False), (False, True)])
def test_tie_flags_that_disagree_are_refused(inner: bool, outer: bool) -> None:
    """https://github.com/QwenLM/Qwen3-VL-Embedding/issues/89: the readers take different ones."""
    with pytest.raises(ModelConfigError, match=f"is {inner} in text_config and {outer} outside it"):
        assert nested(inner, outer, "tie_word_embeddings").tied


# Writing


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"a": 1}, {"a": 1, FIELD: 2}),
        ({FIELD: 1}, {FIELD: 2}),
        ({FIELD: None}, {FIELD: 2}),
        ({"text_config": {}}, {"text_config": {FIELD: 2}}),
        ({"text_config": {FIELD: 1}}, {"text_config": {FIELD: 2}}),
        ({FIELD: 1, "text_config": {}}, {FIELD: 2, "text_config": {}}),
        ({FIELD: 1, "text_config": {FIELD: 1}}, {FIELD: 2, "text_config": {FIELD: 2}}),
        ({FIELD: 1, "text_config": {FIELD: None}}, {FIELD: 2, "text_config": {FIELD: 2}}),
    ],
)
def test_a_field_is_written_where_it_was_and_what_is_written_reads_back(
    raw: dict[str, Any], expected: dict[str, Any]
) -> None:
    """https://github.com/arcee-ai/mergekit/pull/686: a flat config gets no text_config."""
    before = json.dumps(raw)
    patched = config(raw).with_value(FIELD, 2)
    assert patched == expected
    assert config(patched).count(FIELD) == 2
    assert json.dumps(raw) == before


def test_numbers_that_json_has_not_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    """transformers writes an infinite limit as an object; the file keeps it."""
    spelled = {"__float__": "Infinity"}
    raw = {
        "model_type": "x",
        "limit": spelled,
        "rope_parameters": {"low": [{"__float__": "-Infinity"}]},
        "own": {"__float__": 1},
    }
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    config = ModelConfig.read(tmp_path)
    assert config.text["limit"] == float("inf")
    assert config.text["rope_parameters"] == {"low": [float("-inf")]}
    assert config.text["own"] == {"__float__": 1}
    assert config.raw == raw
    assert config.with_value("more", 1)["limit"] == spelled
    nested = ModelConfig({"text_config": raw, "dtype": "bfloat16"}, tmp_path / "config.json")
    assert nested.text["limit"] == float("inf")
