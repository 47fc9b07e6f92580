from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mtp_zoo.errors import ChatTemplateError
from mtp_zoo.training.chat import ChatEncoder, Encoded
from tests.training.words import CHATML, CHATML_BARE_BLOCKS, CHATML_BLOCKS, THINKING, make_tokenizer, words

TWO_TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello you"},
    {"role": "user", "content": "how are you"},
    {"role": "assistant", "content": "fine"},
]

TWO_TURNS_TABLE = [
    ("<start>", 0), ("user", 0), ("\n", 0), ("hi", 0), ("<end>", 0), ("\n", 0),
    ("<start>", 0), ("assistant", 0), ("\n", 0), ("hello", 1), ("you", 1), ("<end>", 1), ("\n", 0),
    ("<start>", 0), ("user", 0), ("\n", 0), ("how", 0), ("are", 0), ("you", 0), ("<end>", 0), ("\n", 0),
    ("<start>", 0), ("assistant", 0), ("\n", 0), ("fine", 1), ("<end>", 1), ("\n", 0),
]  # fmt: skip


def encode(template: str, messages: list[dict[str, Any]]) -> list[Encoded]:
    return ChatEncoder(make_tokenizer(template)).encode(messages)


def table(document: Encoded) -> list[tuple[str, int]]:
    ids, learn = document
    return list(zip(words(ids.tolist()), learn.astype(int).tolist(), strict=True))


@pytest.mark.parametrize("template", [CHATML, CHATML_BLOCKS, CHATML_BARE_BLOCKS])
def test_the_answer_and_its_end_are_learnt_and_nothing_else(template: str) -> None:
    """Prompt and padding were trained: https://github.com/modelscope/ms-swift/pull/8192"""
    (document,) = encode(template, TWO_TURNS)
    assert table(document) == TWO_TURNS_TABLE


@pytest.mark.parametrize("template", [CHATML, CHATML_BLOCKS])
def test_a_mask_that_is_one_token_off_is_not_the_table(template: str) -> None:
    """The flip: a mask given shifted by one token learns the header's line break and drops the end of turn."""
    ((ids, learn),) = encode(template, TWO_TURNS)
    assert table((ids, np.roll(learn, -1))) != TWO_TURNS_TABLE
    assert table((ids, np.roll(learn, 1))) != TWO_TURNS_TABLE
    ends = [word for word, learnt in table((ids, np.roll(learn, -1))) if learnt and word == "<end>"]
    assert not ends


def test_a_user_who_writes_the_assistants_header_is_not_learnt() -> None:
    messages = [
        {"role": "user", "content": "hi <start>assistant\nhello <end>"},
        {"role": "assistant", "content": "fine"},
    ]
    (document,) = encode(CHATML, messages)
    assert [word for word, learnt in table(document) if learnt] == ["fine", "<end>"]


def test_what_follows_the_last_answer_is_left_out() -> None:
    (longer,) = encode(CHATML, [*TWO_TURNS, {"role": "user", "content": "thanks"}])
    assert table(longer) == TWO_TURNS_TABLE


def test_a_conversation_without_an_assistant_gives_no_document() -> None:
    assert encode(CHATML, TWO_TURNS[:1]) == []


def test_thoughts_dropped_from_past_turns_make_a_document_a_turn() -> None:
    """The second turn is rendered without the thoughts of the first, as a server renders it."""
    first, second = encode(THINKING, TWO_TURNS)
    assert [word for word, learnt in table(first) if learnt] == ["</think>", "\n", "hello", "you", "<end>"]
    assert [word for word, learnt in table(second) if learnt] == ["</think>", "\n", "fine", "<end>"]
    assert [word for word, _ in table(second)].count("<think>") == 1


def test_an_empty_answer_still_learns_to_stop() -> None:
    (document,) = encode(CHATML, [TWO_TURNS[0], {"role": "assistant", "content": ""}])
    assert [word for word, learnt in table(document) if learnt] == ["<end>"]


def test_a_template_without_an_end_token_learns_the_whole_answer() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}\n{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant\n{% endif %}"
    )
    (document,) = encode(template, TWO_TURNS[:2])
    assert table(document) == [
        ("user", 0), ("\n", 0), ("hi", 0), ("\n", 0),
        ("assistant", 0), ("\n", 0), ("hello", 1), ("you", 1), ("\n", 1),
    ]  # fmt: skip


def test_messages_without_a_template_are_refused() -> None:
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        ChatEncoder(make_tokenizer(None))


def test_a_template_that_rewrites_its_prompt_is_refused() -> None:
    """The header of the generation prompt is not what precedes the answer, so a difference means nothing."""
    template = CHATML.replace("{% if add_generation_prompt %}<start>assistant\n", "{% if add_generation_prompt %}hi\n")
    with pytest.raises(ChatTemplateError, match="expected message 1 to continue its generation prompt") as caught:
        encode(template, TWO_TURNS)
    assert "{% generation %}" in caught.value.remedy


def test_a_template_that_refuses_the_messages_says_why() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        encode(template, TWO_TURNS)
