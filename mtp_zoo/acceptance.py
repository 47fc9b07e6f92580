"""How many drafted tokens a target accepts, under greedy decoding.

speculate  the loop that a server runs, with real KV caches on target and head: draft k tokens, verify them in one target pass,
           keep the leading ones that equal the target's own choice, and one token of the target's. Several prompts may run
           together; each accepts as many drafts as are right for it, and the counts are those of one prompt at a time.
replay     the same counts without the loop. Under greedy verification a draft only matters where all drafts before it were
           right, and there the drafted tokens are the target's own. So one pass of the head's rollout over the target's
           greedy output tells what every verify step would have accepted.

Both count alike. For a verify step that starts behind token x[t+1], with k = 3 drafts for x[t+2], x[t+3], x[t+4], of which
the first two are right: drafted 3, accepted 2, tokens 3 (two drafts and the target's own x[t+4]), verify steps 1.

Both run target and head in evaluation mode, with the target's embedding and lm_head lent to the head, and leave both as they
found them, also where they raise: the training flag of every submodule, what was attached to the head, and the epsilon of
latent norms.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from mtp_zoo.acceptance_report import LONGEST_LOOP, AcceptanceReport, PromptResult, ends_in_loop
from mtp_zoo.arguments import FLAG, LIST, TARGET, Rule, checked, instance, is_whole, whole
from mtp_zoo.batch import TokenBatch
from mtp_zoo.corrections import corrected
from mtp_zoo.errors import AcceptanceError
from mtp_zoo.head import DraftHead
from mtp_zoo.progress import progress
from mtp_zoo.speculation import Progress, SpeculativeBatch
from mtp_zoo.targets import target_states
from mtp_zoo.verifier import Verifier, equal_lengths

REPLAY_BATCH = 64
"""Prompts a pass of `replay`; its states are held at once, its logits a row at a time."""


IDS = Rule(
    "a list or tuple of token ids",
    lambda value: LIST.accepts(value) and all(is_whole(each) and each >= 0 for each in value),
)
ARGUMENTS = {
    "target": TARGET,
    "head": instance("a DraftHead", DraftHead),
    "prompts": Rule(
        "a list of prompts, each a list of at least one token id",
        lambda value: LIST.accepts(value) and bool(value) and all(bool(each) and IDS.accepts(each) for each in value),
    ),
    "k": whole(least=1),
    "max_new_tokens": whole(least=1),
    "eos": IDS,
}


@checked("Measuring acceptance", error=AcceptanceError, **ARGUMENTS, check=FLAG, batch_size=whole(least=1))
@torch.no_grad()
def speculate(
    target: Any,
    head: DraftHead,
    prompts: Sequence[Sequence[int]],
    *,
    k: int,
    max_new_tokens: int,
    eos: Sequence[int] = (),
    check: bool = True,
    batch_size: int = 1,
) -> AcceptanceReport:
    """Run the draft/verify loop on every prompt.

    Args:
        target: transformers causal language model.
        head: its head.
        prompts: token ids, at least one each.
        k: drafts a verify step.
        max_new_tokens: tokens to generate, the prefill's own included; the last step may overshoot and is then cut.
        eos: ids that end an output.
        check: also decode plainly, for `lossless`.
        batch_size: prompts that run together, of any lengths. The counts do not depend on it, but where two logits tie to
            within rounding.

    Raises:
        AcceptanceError: no prompts, an empty prompt, or a k, length or batch size below 1.
    """
    results: list[PromptResult] = []
    with progress("Drafting and verifying", total=len(prompts)) as advance, _evaluating(target, head) as verifier:
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            done = SpeculativeBatch(verifier, head, batch, k).run(max_new_tokens, eos)
            plain = _plain(verifier, batch, max_new_tokens) if check else None
            for row, one in enumerate(done):
                results.append(_result(one, None if plain is None else plain[row], max_new_tokens, eos))
                advance()
    return AcceptanceReport(k, tuple(results))


@checked("Measuring acceptance", error=AcceptanceError, **ARGUMENTS)
@torch.no_grad()
def replay(
    target: Any,
    head: DraftHead,
    prompts: Sequence[Sequence[int]],
    *,
    k: int,
    max_new_tokens: int,
    eos: Sequence[int] = (),
) -> AcceptanceReport:
    """What `speculate` would count, from the target's greedy outputs and one rollout over them.

    Prompts of equal length share passes. The arguments are those of `speculate`; its numeric ties are not reproduced.
    """
    results: dict[int, PromptResult] = {}
    with progress("Replaying drafts", total=len(prompts)) as advance, _evaluating(target, head) as verifier:
        for group in _passes(prompts):
            outputs = verifier.greedy([prompts[i] for i in group], max_new_tokens + k)
            hits = _leading_hits(target, head, [[*prompts[i], *out] for i, out in zip(group, outputs, strict=True)], k)
            for row, number in enumerate(group):
                accepted = _walk(hits[row], len(prompts[number]), outputs[row], max_new_tokens, eos)
                results[number] = PromptResult(accepted, _cut(outputs[row], max_new_tokens, eos))
                advance()
    return AcceptanceReport(k, tuple(results[number] for number in range(len(prompts))))


@contextmanager
def _evaluating(target: Any, head: DraftHead) -> Generator[Verifier]:
    """Target and head as a server runs them, and as they were afterwards."""
    flags = [(module, module.training) for model in (target, head) for module in model.modules()]
    with ExitStack() as stack:
        stack.callback(_set_training, flags)
        stack.enter_context(corrected(target))
        stack.enter_context(head.borrowing(target))
        target.eval()
        head.eval()
        yield Verifier(target, head.shared, head.spec.hidden_tap)


def _set_training(flags: Sequence[tuple[torch.nn.Module, bool]]) -> None:
    for module, training in flags:
        module.training = training


def _result(done: Progress, plain: Sequence[int] | None, max_new_tokens: int, eos: Sequence[int]) -> PromptResult:
    outputs = [None if tokens is None else _cut(tokens, max_new_tokens, eos) for tokens in (done.output, plain)]
    assert outputs[0] is not None
    return PromptResult(tuple(done.accepted), outputs[0], outputs[1])


def _plain(verifier: Verifier, prompts: Sequence[Sequence[int]], steps: int) -> list[list[int]]:
    """Plain greedy decoding; prompts of equal length share passes."""
    out: dict[int, list[int]] = {}
    for group in equal_lengths(prompts).values():
        out |= zip(group, verifier.greedy([prompts[number] for number in group], steps), strict=True)
    return [out[number] for number in range(len(prompts))]


def _leading_hits(target: Any, head: DraftHead, rows: Sequence[Sequence[int]], k: int) -> list[list[int]]:
    """For every slot of every row: how many leading depths would draft the tokens that follow."""
    device = head.shared.lm_head_weight.device
    tokens = TokenBatch.all_tokens(torch.tensor([list(row) for row in rows], device=device))
    states = head(tokens, target_states(target, tokens, head.spec), depths=k)
    leading = torch.zeros(tokens.shape, dtype=torch.int64, device=device)
    alive = torch.ones(tokens.shape, dtype=torch.bool, device=device)
    for depth, state in enumerate(states, start=1):
        choices = torch.stack([head.logits(depth, row).argmax(-1) for row in state.normed])
        alive &= choices == tokens.slots(depth).labels
        leading += alive
    return leading.tolist()


def _walk(
    hits: list[int], prompt_length: int, output: list[int], max_new_tokens: int, eos: Sequence[int]
) -> tuple[int, ...]:
    """Accepted drafts of each verify step. `known` counts output tokens; the step behind them drafts from slot `known` - 2."""
    accepted: list[int] = []
    known = 1
    while known < max_new_tokens and not set(output[:known]) & set(eos):
        accepted.append(hits[prompt_length + known - 2])
        known += accepted[-1] + 1
    return tuple(accepted)


def _passes(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Prompt numbers in groups of equal length, at most `REPLAY_BATCH` each."""
    return [
        group[start : start + REPLAY_BATCH]
        for group in equal_lengths(prompts).values()
        for start in range(0, len(group), REPLAY_BATCH)
    ]


def _cut(tokens: Sequence[int], length: int, eos: Sequence[int]) -> tuple[int, ...]:
    """At most `length` tokens, up to and with the first end-of-sequence."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in eos), len(tokens))
    return tuple(tokens[: min(end, length)])


__all__ = [
    "LONGEST_LOOP",
    "AcceptanceReport",
    "PromptResult",
    "ends_in_loop",
    "replay",
    "speculate",
]
