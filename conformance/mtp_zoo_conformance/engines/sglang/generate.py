"""Jobs of kind "generate": the whole SGLang engine, greedy, with its speculative decoding (NEXTN, a chain of k drafts).

What is counted, and where it comes from (SGLang 0.5.23):
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

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import sglang
import shim
from settings import Job, keep_logs, logged, on_cpu, server_arguments, settings_in_words

CPU_BACKEND = "intel_amx"
"""SGLang's only attention backend on a CPU that verifies drafts."""

ATTEMPTS = 5


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


def run_generate(job: Job) -> dict[str, Any]:
    """Generate behind each prompt, one after the other, in one engine."""
    keep_logs(job)
    drafts, new_tokens = job["k"], job["max_new_tokens"]
    longest = max(len(prompt) for prompt in job["prompts"]) + new_tokens + 2 * (drafts + 1)
    arguments = server_arguments(job, cpu_backend=CPU_BACKEND, drafts=drafts, requests=2, kv_rows=2 * longest)
    with opened(arguments) as engine:
        answers = [ask(engine, prompt, new_tokens, drafts) for prompt in job["prompts"]]
        backend = engine.server_args.attention_backend
    return {
        **logged(draft=drafts > 0),
        "backend": backend,
        "settings": settings_in_words(job, cpu_backend=CPU_BACKEND),
        "outputs": [answer.tokens for answer in answers],
        "accepted": [answer.accepted for answer in answers],
        "counters": counters(answers, drafts),
    }


@contextmanager
def opened(arguments: dict[str, Any]) -> Iterator[sglang.Engine]:
    """An engine, shut down at the end.

    On a CPU its processes are forked from this one, which has imported SGLang, where SGLang would spawn them anew: that
    takes seconds and not half a minute. Nothing here has threads yet.
    """
    if shim.in_force():
        shim.keep_intel_amx()
    if on_cpu():
        multiprocessing.set_start_method("fork", force=True)
        multiprocessing.set_start_method = lambda *_args, **_kwargs: None  # SGLang would set "spawn"
    engine = sglang.Engine(**arguments)
    try:
        yield engine
    finally:
        engine.shutdown()


def ask(engine: sglang.Engine, prompt: list[int], new_tokens: int, drafts: int) -> Answer:
    """Greedy tokens behind a prompt, followed step by step.

    A chunk of the stream may hold two steps where this process was slow to read; then the prompt is asked once more.

    Raises:
        RuntimeError: no attempt could be followed, or the stream contradicts SGLang's own counters.
    """
    sampling = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
    for _ in range(ATTEMPTS):
        lengths, chunk = [], {}
        for chunk in engine.generate(input_ids=prompt, sampling_params=sampling, stream=True):
            lengths.append(len(chunk["output_ids"]))  # the list itself grows on
        tokens, meta = list(chunk["output_ids"]), chunk["meta_info"]
        if not drafts:
            return Answer(tokens, [], meta)
        if len(lengths) == 1 + meta.get("spec_verify_ct", 0):  # the prefill, and every verify step
            return Answer(tokens, accepted_drafts(lengths, meta), meta)
    raise RuntimeError(f"the stream joined verify steps in each of {ATTEMPTS} attempts")


def accepted_drafts(lengths: Sequence[int], meta: dict[str, Any]) -> list[int]:
    """Accepted drafts of every verify step.

    Args:
        lengths: number of tokens so far, behind the prefill and behind every verify step.
        meta: SGLang's counters of the whole answer.

    Raises:
        RuntimeError: the stream contradicts the counters.
    """
    gained = [after - before for before, after in pairwise(lengths)]
    accepted = [new - 1 for new in gained[:-1]]
    if gained:  # the last step may be cut
        accepted.append(meta["spec_num_correct_drafts"] - sum(accepted))
    histogram = meta.get("spec_correct_drafts_histogram", [])
    seen = [accepted.count(number) for number in range(len(histogram))]
    if lengths[0] != 1 or seen != list(histogram) or (gained and gained[-1] > accepted[-1] + 1):
        raise RuntimeError(f"the stream gave {gained} tokens in its steps, SGLang counted {meta}")
    return accepted


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
