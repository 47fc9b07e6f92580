"""Jobs of kind "generate": the whole SGLang engine, greedy, with its speculative decoding (NEXTN, a chain of k drafts).

What is counted, and where it comes from: see `counts`.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sglang
import shim
from batches import PAGE
from counts import ask, counters
from settings import Job, keep_logs, logged, on_cpu, server_arguments, settings_in_words

CPU_BACKEND = "intel_amx"
"""SGLang's only attention backend on a CPU that verifies drafts."""

FORKED = "SGLang's processes are forked from one that has imported it, not spawned"


def run_generate(job: Job) -> dict[str, Any]:
    """Generate behind each prompt, one after the other, in one engine."""
    keep_logs(job)
    drafts, new_tokens = job["k"], job["max_new_tokens"]
    longest = max(len(prompt) for prompt in job["prompts"]) + new_tokens + 2 * (drafts + 1)
    pages = -(-longest // PAGE) + 1  # of a request; SGLang admits none that would take the last one
    arguments = server_arguments(job, cpu_backend=CPU_BACKEND, drafts=drafts, requests=2, kv_rows=2 * pages * PAGE)
    with opened(arguments) as engine:
        answers = [ask(engine, prompt, new_tokens, drafts) for prompt in job["prompts"]]
        backend = engine.server_args.attention_backend
    return {
        **logged(draft=drafts > 0),
        "backend": backend,
        "settings": settings_in_words(job, cpu_backend=CPU_BACKEND) + ([FORKED] if on_cpu() else []),
        "outputs": [answer.tokens for answer in answers],
        "accepted": [answer.accepted for answer in answers],
        "counters": counters(answers, drafts),
    }


@contextmanager
def opened(arguments: dict[str, Any]) -> Iterator[sglang.Engine]:
    """An engine, shut down at the end.

    On a CPU its processes are forked from this one, which has imported SGLang and has no threads yet. SGLang would spawn
    them, and each would import it anew: half a minute for every engine.
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
