"""What SGLang counts while it speculates, and where each number comes from (0.5.23).

    accepted            from the stream: its first chunk is the prefill's token, every other one a verify step with its accepted
                        drafts and one token more. Where `max_new_tokens` cuts the last step, the stream gives fewer tokens,
                        and SGLang counts the step whole: its accepted drafts are what the counters have beyond the others.
    verify_steps        `meta_info["spec_verify_ct"]`, counted by the scheduler for each verify pass of a request.
    drafted             `spec_num_proposed_drafts`: k for every verify pass.
    accepted (sum)      `spec_num_correct_drafts`.
    accepted_per_depth  from `spec_correct_drafts_histogram`: how many verify passes accepted exactly 0, 1, .. drafts; depth d
                        was accepted in all that accepted d or more.
The token that the prefill gives is no verify step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from job_server import CountingError

ATTEMPTS = 40
"""How often a prompt is asked until its stream shows every step. On a busy machine most streams join some; an attempt takes
about a second."""


@dataclass(frozen=True)
class Answer:
    """What came of one prompt.

    Attributes:
        tokens: the new tokens.
        accepted: accepted drafts of every verify step.
        meta: SGLang's counters, of the last chunk.
    """

    tokens: list[int]
    accepted: list[int]
    meta: dict[str, Any]


def ask(engine: Any, prompt: list[int], new_tokens: int, drafts: int) -> Answer:
    """Greedy tokens behind a prompt of a `sglang.Engine`, followed step by step.

    A chunk of the stream may hold two steps where this process was slow to read; then the prompt is asked once more.

    Raises:
        RuntimeError: SGLang gave fewer tokens than were asked for.
        CountingError: no attempt could be followed, or the stream contradicts SGLang's own counters.
    """
    sampling = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
    for _ in range(ATTEMPTS):
        lengths, chunk = [], {}
        for chunk in engine.generate(input_ids=prompt, sampling_params=sampling, stream=True):
            lengths.append(chunk["meta_info"]["completion_tokens"])  # the list of tokens itself grows on
        tokens, meta = list(chunk["output_ids"]), chunk["meta_info"]
        check_length(tokens, new_tokens, meta)
        if not drafts:
            return Answer(tokens, [], meta)
        whole = len(lengths) == 1 + meta.get("spec_verify_ct", 0)  # the prefill, and every verify step
        if whole and len(set(lengths)) == len(lengths):
            return Answer(tokens, accepted_drafts(lengths, meta), meta)
    raise CountingError(f"the stream joined verify steps in each of {ATTEMPTS} attempts")


def accepted_drafts(lengths: Sequence[int], meta: dict[str, Any]) -> list[int]:
    """Accepted drafts of every verify step.

    Args:
        lengths: number of tokens so far, behind the prefill and behind every verify step.
        meta: SGLang's counters of the whole answer.

    Raises:
        CountingError: the stream contradicts the counters.
    """
    gained = [after - before for before, after in pairwise(lengths)]
    accepted = [new - 1 for new in gained[:-1]]
    if gained:  # the last step may be cut
        accepted.append(meta["spec_num_correct_drafts"] - sum(accepted))
    histogram = meta.get("spec_correct_drafts_histogram", [])
    seen = [accepted.count(number) for number in range(len(histogram))]
    if lengths[0] != 1 or seen != list(histogram) or (gained and gained[-1] > accepted[-1] + 1):
        raise CountingError(f"the stream gave {gained} tokens in its steps, SGLang counted {meta}")
    return accepted


def check_length(tokens: Sequence[int], asked: int, meta: dict[str, Any]) -> None:
    """SGLang cuts an answer short without an error where its KV cache has too few pages.

    Raises:
        RuntimeError: there are not as many tokens as were asked for.
    """
    if len(tokens) != asked:
        raise RuntimeError(f"{asked} tokens were asked for, SGLang gave {len(tokens)}: {meta.get('finish_reason')}")


def counters(answers: list[Answer], drafts: int) -> dict[str, Any]:
    """SGLang's counters over all prompts."""
    metas = [answer.meta for answer in answers]

    def total(name: str) -> int:
        return sum(meta.get(name, 0) for meta in metas)

    histograms = [meta.get("spec_correct_drafts_histogram", []) for meta in metas]
    return {
        "verify_steps": total("spec_verify_ct"),
        "drafted": total("spec_num_proposed_drafts"),
        "accepted": total("spec_num_correct_drafts"),
        "accepted_per_depth": [sum(sum(steps[depth:]) for steps in histograms) for depth in range(1, drafts + 1)],
    }
