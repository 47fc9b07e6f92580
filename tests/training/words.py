"""A tokenizer small enough to write its token tables by hand: a word is a token, and so is a line break."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = (
    "user",
    "assistant",
    "system",
    "hi",
    "hello",
    "how",
    "are",
    "you",
    "fine",
    "thanks",
    "bye",
    "<think>",
    "</think>",
)
VOCABULARY = {word: number for number, word in enumerate(("<pad>", "<eos>", "<unk>", "<start>", "<end>", "\n", *WORDS))}

CHATML = (
    "{% for message in messages %}<start>{{ message.role }}\n{{ message.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
"""The shape of most templates; says nothing about what the assistant wrote."""

CHATML_BLOCKS = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<start>assistant\n"
    "{% generation %}{{ message.content }}<end>\n{% endgeneration %}"
    "{% else %}<start>{{ message.role }}\n{{ message.content }}<end>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
"""The same text, with blocks that hold the end-of-turn token and the line break behind it."""

CHATML_BARE_BLOCKS = CHATML_BLOCKS.replace("<end>\n{% endgeneration %}", "{% endgeneration %}<end>\n")
"""The same text, with blocks that leave the end-of-turn token out."""

THINKING = (
    "{% for message in messages %}<start>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think>\n</think>\n{% endif %}"
    "{{ message.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n<think>\n{% endif %}"
)
"""Thoughts are shown in the last turn and dropped from the ones before, as thinking models do."""


def make_tokenizer(template: str | None = None, *, vocab_size: int | None = None) -> PreTrainedTokenizerFast:
    """A word-level tokenizer over `VOCABULARY`, padded with unused words to `vocab_size` entries."""
    vocabulary = dict(VOCABULARY)
    for number in range(len(vocabulary), vocab_size or 0):
        vocabulary[f"w{number}"] = number
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|[^\s]+"), behavior="removed", invert=True)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<start>", "<end>"],
    )
    fast.chat_template = template
    return fast


def save_tokenizer(directory: Path, template: str | None = None, *, vocab_size: int | None = None) -> None:
    """Write the tokenizer's files next to a checkpoint's."""
    make_tokenizer(template, vocab_size=vocab_size).save_pretrained(directory)


def words(ids: list[int]) -> list[str]:
    """The tokens of these ids, as written in `VOCABULARY`."""
    names = {number: word for word, number in VOCABULARY.items()}
    return [names[number] for number in ids]
