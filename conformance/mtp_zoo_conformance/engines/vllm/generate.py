"""Jobs of kind "generate": greedy decoding with the whole vLLM engine, with or without the checkpoint's own head as drafter.

The counters are the engine's own, read with `LLM.get_metrics()` (vllm/v1/spec_decode/metrics.py, 0.32.0), which the scheduler
feeds (`update_from_output` in vllm/v1/core/sched/scheduler.py):

    vllm:spec_decode_num_drafts                   verify_steps        verify passes, one a request and step
    vllm:spec_decode_num_draft_tokens             drafted             drafted tokens that were verified
    vllm:spec_decode_num_accepted_tokens          accepted            drafted tokens that the target kept
    vllm:spec_decode_num_accepted_tokens_per_pos  accepted_per_depth  the same for each depth

A prompt's prefill gives one token and counts nowhere. The scheduler counts a step before it cuts the output at
`max_new_tokens`: the last step counts whole, also where its tokens run over.
"""

from __future__ import annotations

from typing import Any

from canary import Canary
from job_server import CountingError
from settings import Job, engine_arguments, settings_in_words
from vllm import LLM, SamplingParams
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

COUNTERS = {
    "verify_steps": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
    "accepted_per_depth": "vllm:spec_decode_num_accepted_tokens_per_pos",
}


def run_generate(job: Job) -> dict[str, Any]:
    """Decode the prompts one after the other, `k` drafts a step; returns tokens, accepted drafts of every step, counters.

    Raises:
        CountingError: the tokens that a step gave do not fit what the engine counted for it.
    """
    k, tokens = job["k"], job["max_new_tokens"]
    canary = Canary()
    longest = max(len(prompt) for prompt in job["prompts"]) + tokens + k + 1  # room for the last step's drafts
    arguments = engine_arguments(job, max_model_len=longest, max_num_seqs=1, drafts=k)
    engine = LLM(**arguments, disable_log_stats=False)
    results = [decode(engine, prompt, tokens, name=str(number)) for number, prompt in enumerate(job["prompts"])]
    classes = list(canary.unfilled)  # the target is loaded first
    return {
        "target_class": classes[0],
        "draft_class": classes[-1] if k else None,
        "backend": ", ".join(backends(engine)),
        "unfilled": canary.unfilled[classes[-1]] if k else [],
        "target_unfilled": canary.unfilled[classes[0]],
        "settings": settings_in_words(job),
        "outputs": [output for output, _ in results],
        "accepted": [accepted for _, accepted in results],
        "counters": counters(engine),
    }


def decode(engine: LLM, prompt: list[int], max_new_tokens: int, *, name: str) -> tuple[list[int], list[int]]:
    """One prompt, step by step: its tokens, and how many drafts each of its verify steps kept."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, ignore_eos=True, detokenize=False)
    engine.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    output: list[int] = []
    accepted: list[int] = []
    before = counters(engine)
    while engine.llm_engine.has_unfinished_requests():
        finished = engine.llm_engine.step()
        after = counters(engine)
        given = [list(one.outputs[0].token_ids) for one in finished]
        new = len(given[0]) - len(output) if given else 0
        if after["verify_steps"] > before["verify_steps"]:
            accepted.append(after["accepted"] - before["accepted"])
            check_step(new, accepted[-1], cut=len(output) + new == max_new_tokens)
        output = given[0] if given else output
        before = after
    return output, accepted


def check_step(new: int, accepted: int, *, cut: bool) -> None:
    """A verify step gives its accepted drafts and one token of the target's; the last step's are cut at the limit."""
    if new != accepted + 1 and not (cut and new <= accepted):
        raise CountingError(f"a step gave {new} tokens, but the engine counts {accepted} accepted drafts for it")


def counters(engine: LLM) -> dict[str, Any]:
    """The engine's counters so far; zeros where it doesn't speculate."""
    found = {metric.name: metric for metric in engine.get_metrics()}
    counts: dict[str, Any] = dict.fromkeys(COUNTERS, 0)
    counts["accepted_per_depth"] = []
    for name, metric in COUNTERS.items():
        if metric in found:
            counts[name] = getattr(found[metric], "values", None) or getattr(found[metric], "value", 0)
    return counts


def backends(engine: LLM) -> list[str]:
    """Names of the attention backends of all layers."""
    layers = get_layers_from_vllm_config(engine.llm_engine.vllm_config, AttentionLayerBase)
    return sorted({layer.get_attn_backend().get_name() for layer in layers.values()})
