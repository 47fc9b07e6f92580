"""Chat messages to token ids, and which of them the assistant wrote.

The learnt part of a turn starts behind the generation prompt and ends with the end-of-turn token. The line break that
many templates put behind that token is written by the template, so it is not learnt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from mtp_zoo.errors import ChatTemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

Encoded: TypeAlias = tuple[NDArray[np.int32], NDArray[np.bool_]]
"""Token ids of one document [tokens], and which of them are to be learnt [tokens]."""

Message: TypeAlias = dict[str, Any]


class ChatEncoder:
    """Renders conversations with the tokenizer's chat template and marks what the assistant wrote.

    A template with `{% generation %}` blocks says itself which characters those are. Of any other, the characters of
    message i are what rendering messages[:i+1] adds to rendering messages[:i] with the generation prompt.

    Example (`<s>` and `<e>` are special tokens, the template is `<s>role\\ncontent<e>\\n`):

        text    <s> user \\n hi <e> \\n <s> assistant \\n hello <e> \\n
        learnt   0   0   0  0   0  0   0      0      0    1    1   0

    Raises:
        ChatTemplateError: the tokenizer has no chat template, or can't say which characters a token covers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.chat_template is None:
            raise ChatTemplateError(
                "Rendering chat messages: the tokenizer has no chat template.",
                remedy="Add chat_template.jinja next to the tokenizer's files, or give plain text instead of messages.",
            )
        if not tokenizer.is_fast:
            raise ChatTemplateError(
                f"Rendering chat messages: {type(tokenizer).__name__} does not say which characters a token covers.",
                remedy="Use a tokenizer with a tokenizer.json.",
            )
        self.tokenizer = tokenizer
        self.special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}

    def encode(self, messages: Sequence[Message], **options: Any) -> list[Encoded]:
        """Token ids and learn masks of one conversation.

        Args:
            messages: the conversation.
            options: what the template is rendered with beside them: `tools`, `documents`, and its own variables.

        What follows the last assistant message is left out: nothing learns from it. Most templates give one document.
        Where a template renders past turns differently from the current one (thinking models drop old thoughts), every
        turn that does not continue the text before it starts a document of its own, rendered as a server would then.

        Raises:
            ChatTemplateError: the template refuses the messages, or adds more than a suffix to the generation prompt.
        """
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            return []
        try:
            if self._has_blocks(options):
                return [self._encode_blocks(messages[: turns[-1] + 1], options)]
            return [self._encode_spans(text, spans) for text, spans in self._rows(messages, turns, options)]
        except (TemplateError, ValueError, TypeError) as error:
            raise _refused(error) from error

    def _has_blocks(self, options: Mapping[str, Any]) -> bool:
        """Of several named templates, transformers picks the one for tools where there are some."""
        return bool(GENERATION_BLOCK.search(self.tokenizer.get_chat_template(tools=options.get("tools"))))

    def prompt(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Token ids of the messages and the generation prompt behind them: what a server feeds a model that is to answer.

        Raises:
            ChatTemplateError: the template refuses the messages.
        """
        try:
            text = self._render(messages, options, add_generation_prompt=True)
        except (TemplateError, ValueError, TypeError) as error:
            raise _refused(error) from error
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _encode_blocks(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Encoded:
        rendered: Any = self.tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **options
        )
        return self._close_turns(rendered["input_ids"], np.array(rendered["assistant_masks"], dtype=bool))

    def _rows(
        self, messages: Sequence[Message], turns: Sequence[int], options: Mapping[str, Any]
    ) -> list[tuple[str, list[tuple[int, int]]]]:
        """Rendered texts, each with the character spans that the assistant wrote."""
        rows: list[tuple[str, list[tuple[int, int]]]] = []
        for turn in turns:
            prompt = self._render(messages[:turn], options, add_generation_prompt=True)
            text = self._render(messages[: turn + 1], options, add_generation_prompt=False)
            if not text.startswith(prompt):
                raise ChatTemplateError(
                    f"Rendering chat messages: expected message {turn} to continue its generation prompt "
                    f"{_tail(prompt)!r}, got {_tail(text[: len(prompt)])!r}.",
                    remedy="Add {% generation %} blocks to the chat template.",
                )
            spans = rows.pop()[1] if rows and text.startswith(rows[-1][0]) else []
            rows.append((text, [*spans, (len(prompt), len(text))]))
        return rows

    def _render(self, messages: Sequence[Message], options: Mapping[str, Any], *, add_generation_prompt: bool) -> str:
        rendered = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **options
        )
        return str(rendered)

    def _encode_spans(self, text: str, spans: Sequence[tuple[int, int]]) -> Encoded:
        """A token is learnt where it overlaps a span, as in transformers' own assistant masks."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        start, stop = np.array(encoded["offset_mapping"]).reshape(-1, 2).T
        learn = np.zeros(len(start), dtype=bool)
        for first, last in spans:
            learn |= (start < last) & (stop > first)
        return self._close_turns(encoded["input_ids"], learn)

    def _close_turns(self, ids: Sequence[int], learn: NDArray[np.bool_]) -> Encoded:
        """Let every learnt stretch end with its end-of-turn token.

        A special token in the stretch with nothing but white space behind it is that token. Otherwise it is the special
        token that follows the last stretch, if one does; the other stretches end with the same one.
        """
        edges = np.flatnonzero(np.diff(learn, prepend=False, append=False)).reshape(-1, 2)
        closed = np.zeros_like(learn)
        last = int(edges[-1, 1]) if len(edges) else len(ids)
        follower = ids[last] if last < len(ids) and ids[last] in self.special else None
        for first, stop in edges.tolist():
            closed[first : self._turn_end(ids, first, stop, follower)] = True
        return np.array(ids, dtype=np.int32), closed

    def _turn_end(self, ids: Sequence[int], first: int, stop: int, follower: int | None) -> int:
        for slot in range(stop - 1, first - 1, -1):
            if ids[slot] in self.special:
                return slot + 1
            if str(self.tokenizer.decode([ids[slot]])).strip():
                break
        return stop + 1 if stop < len(ids) and ids[stop] == follower else stop


def _refused(error: Exception) -> ChatTemplateError:
    return ChatTemplateError(
        f"Rendering chat messages: the template refuses them ({error}).",
        remedy="Give the roles and the order that the template expects.",
    )


def _tail(text: str, length: int = 60) -> str:
    return text if len(text) <= length else "..." + text[-length:]
