"""Hidden states of a frozen target, at the tap that a head reads."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mtp_zoo.arguments import checked, having, instance
from mtp_zoo.batch import PADDING, TokenBatch
from mtp_zoo.corrections import corrected
from mtp_zoo.errors import FamilyDefinitionError, ObjectiveError
from mtp_zoo.shared import language_model
from mtp_zoo.spec import HeadSpec

TAP = "mtp_zoo_tap"
"""Attribute of a tensor that says at which tap its states were taken."""


@checked(
    "Computing target states",
    target=having("a transformers model", "get_input_embeddings", "config"),
    tokens=instance("a TokenBatch", TokenBatch),
    spec=instance("a HeadSpec", HeadSpec),
)
@torch.no_grad()
def target_states(target: Any, tokens: TokenBatch, spec: HeadSpec) -> Float[Tensor, "batch seq hidden"]:
    """The target's state of every token, under the family's tap; zero on padding. The result remembers its tap.

    Rows of one document without padding in front go through the target as they are. Others are taken apart and every
    document runs alone, from its own position 0: attention masks do not isolate the recurrent layers of hybrid targets,
    and packed attention without a block mask leaks from one document into the next.

    Args:
        target: a transformers causal language model. Norms of latent attention run with the epsilon that engines use, see
            `mtp_zoo.corrections.corrected`; the model stays as it is.
        tokens: the batch.
        spec: the head's conventions.

    Raises:
        FamilyDefinitionError: the family reads several residual streams.
    """
    if spec.hidden_tap == "streams":
        raise FamilyDefinitionError(
            "Computing target states: the family reads several residual streams, a plain forward pass gives one state.",
            remedy="Collect the streams with a hook of the family's own.",
        )
    model = language_model(target)
    with corrected(target), norm_switched_off(model) if spec.hidden_tap == "pre_norm" else nullcontext():
        return with_tap(_states(model, tokens), spec.hidden_tap)


def with_tap(states: Tensor, tap: str | None) -> Tensor:
    """Note on a tensor at which tap its states were taken; what is computed from it carries no note."""
    setattr(states, TAP, tap)
    return states


def tap_of(states: Tensor) -> str | None:
    """The tap at which states were taken, or None where nothing says so."""
    return getattr(states, TAP, None)


def check_tap(states: Tensor, spec: HeadSpec) -> None:
    """Refuse states that were taken at another tap than the head reads; those without a note pass.

    Raises:
        ObjectiveError: the taps differ.
    """
    if torch.compiler.is_compiling() or tap_of(states) in {None, spec.hidden_tap}:
        return
    raise ObjectiveError(
        f"Computing the loss: expected target states at the head's tap '{spec.hidden_tap}', got states at '{tap_of(states)}'.",
        remedy="Compute them with target_states(target, tokens, head.spec).",
    )


@contextmanager
def norm_switched_off(model: Any) -> Generator[None]:
    """Let the final norm pass its input through, so that the last hidden state is the one in front of it."""
    handle = model.norm.register_forward_hook(lambda _module, inputs, _output: inputs[0])
    try:
        yield
    finally:
        handle.remove()


def _states(model: Any, tokens: TokenBatch) -> Tensor:
    if all(segment.start == 0 and segment.stop == tokens.shape[1] for segment in tokens.segments):
        padding = tokens.doc_ids == PADDING
        # A padding token may have an embedding of NaN, which recurrent layers carry within a chunk: the first token stands in.
        ids = torch.where(padding, tokens.input_ids[:, :1], tokens.input_ids)
        states = model(input_ids=ids, use_cache=False).last_hidden_state
        return states.masked_fill(padding[..., None], 0)
    return _by_document(model, tokens)


def _by_document(model: Any, tokens: TokenBatch) -> Tensor:
    hidden = model.config.get_text_config().hidden_size
    out = torch.zeros(*tokens.shape, hidden, device=tokens.input_ids.device, dtype=model.dtype)
    for group in _batches(_document_spans(tokens), budget=tokens.input_ids.numel()):
        longest = max(stop - start for _, start, stop in group)
        ids = tokens.input_ids.new_empty(len(group), longest)
        for line, (row, start, stop) in enumerate(group):
            ids[line] = tokens.input_ids[row, start]
            ids[line, : stop - start] = tokens.input_ids[row, start:stop]
        states = model(input_ids=ids, use_cache=False).last_hidden_state
        for line, (row, start, stop) in enumerate(group):
            out[row, start:stop] = states[line, : stop - start]
    return out


def _document_spans(tokens: TokenBatch) -> list[tuple[int, int, int]]:
    """(row, start, stop) of every document without its padding, longest first."""
    real = tokens.host.doc_ids != PADDING
    spans = [
        (row, segment.start, segment.start + int(real[row, segment.start : segment.stop].sum()))
        for segment in tokens.segments
        for row in segment.rows
    ]
    return sorted(spans, key=lambda span: span[1] - span[2])


def _batches(spans: list[tuple[int, int, int]], budget: int) -> Iterator[list[tuple[int, int, int]]]:
    """Groups whose padded size stays within `budget` tokens, the size of the batch they came from."""
    group: list[tuple[int, int, int]] = []
    for span in spans:
        longest = (group or [span])[0]
        if group and (len(group) + 1) * (longest[2] - longest[1]) > budget:
            yield group
            group = []
        group.append(span)
    if group:
        yield group
