"""What chat records carry beside their messages is rendered as a server renders it, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtp_zoo.errors import DataError
from mtp_zoo.training.chat import ChatEncoder
from mtp_zoo.training.config import DataConfig
from mtp_zoo.training.data import load_rows, render_prompt
from mtp_zoo.training.records import template_options
from tests.training.words import make_tokenizer, words

TEMPLATE = (
    "{% if tools %}<start>system\nyou {% for tool in tools %}{{ tool.function.name }} {% endfor %}<end>\n{% endif %}"
    "{% for message in messages %}<start>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think> {{ message.reasoning_content }} </think> {% endif %}"
    "{{ message.content or '' }}{% for call in message.tool_calls %} {{ call.function.name }}{% endfor %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% if not thinking|default(true) %}<think> </think> {% endif %}{% endif %}"
)
"""A template with tools, a variable of its own, thoughts, and calls, as those of Qwen3.5 have."""

TOOL = {"type": "function", "function": {"name": "bye", "parameters": {}}}

ASKED = [{"role": "user", "content": "hi"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "fine"}]


def learnt(messages: list[dict[str, Any]], **options: Any) -> tuple[str, str]:
    """The words of the only document, and those that are trained on."""
    ((ids, mask),) = ChatEncoder(make_tokenizer(TEMPLATE)).encode(messages, **options)
    told = words(ids.tolist())
    return " ".join(told), " ".join(word for word, on in zip(told, mask, strict=True) if on)


def test_tools_are_rendered_in_front_and_are_not_trained_on() -> None:
    text, trained = learnt(ANSWERED, tools=[TOOL])
    assert text.startswith("<start> system \n you bye <end> \n <start> user")
    assert trained == "fine <end>"
    assert not learnt(ANSWERED)[0].startswith("<start> system")


def test_calls_and_thoughts_are_trained_on() -> None:
    call = {"type": "function", "function": {"name": "bye", "arguments": {}}}
    assert learnt([*ASKED, {"role": "assistant", "tool_calls": [call]}])[1] == "bye <end>"
    assert learnt([*ASKED, {"role": "assistant", "reasoning_content": "how", "content": "fine"}])[1] == (
        "<think> how </think> fine <end>"
    )


def test_a_prompt_is_rendered_with_the_templates_own_variables() -> None:
    tokenizer = make_tokenizer(TEMPLATE)
    plain, without = (render_prompt(tokenizer, ASKED, options) for options in (None, {"thinking": False}))
    assert words(without)[len(plain) :] == ["<think>", "</think>"]
    assert words(render_prompt(tokenizer, ASKED, {"tools": [TOOL]}))[:5] == ["<start>", "system", "\n", "you", "bye"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"tools": None}, {}),
        ({"tools": [TOOL]}, {"tools": [TOOL]}),
        ({"tools": json.dumps([TOOL])}, {"tools": [TOOL]}),
        ({"chat_template_kwargs": {"thinking": False}, "source": "web"}, {"thinking": False}),
    ],
)
def test_the_fields_that_a_record_is_rendered_with(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert template_options({"messages": ANSWERED, **fields}) == expected


def write(folder: Path, *records: dict[str, Any]) -> DataConfig:
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return DataConfig(path=path, messages_field="messages", max_length=64, pack=False)


def test_records_of_a_file_are_rendered_with_their_own(tmp_path: Path) -> None:
    config = write(tmp_path, {"messages": ANSWERED}, {"messages": ANSWERED, "tools": [TOOL]})
    rows, _ = load_rows(config, make_tokenizer(TEMPLATE), seed=0)
    plain, tooled = (words(rows.batch([row]).input_ids[0].tolist()) for row in (0, 1))
    assert "bye" not in plain
    assert "bye" in tooled


@pytest.mark.parametrize(
    ("fields", "piece"),
    [
        ({"functions": [TOOL]}, r"fields \['functions'\] would change the rendered text"),
        ({"chat_template": "{{ messages }}"}, r"fields \['chat_template'\] would change"),
        ({"tools": {"name": "bye"}}, "tools: expected a list, got dict"),
        ({"tools": "bye"}, "tools: expected a list, got str"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs: expected a dict, got list"),
        ({"chat_template_kwargs": {"tokenize": False}}, r"chat_template_kwargs: \['tokenize'\] are set by the reader"),
    ],
)
def test_fields_that_are_not_honoured_are_refused_by_name(fields: dict[str, Any], piece: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=piece):
        load_rows(write(tmp_path, {"messages": ANSWERED, **fields}), make_tokenizer(TEMPLATE), seed=0)
