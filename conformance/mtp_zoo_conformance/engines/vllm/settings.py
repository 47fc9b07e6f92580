"""How a checkpoint is opened with vLLM, the same for its module alone and for the whole engine.

What is set, and why, is also said in words in every record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from twin import opened
from vllm.platforms import current_platform

Job = dict[str, Any]


def engine_arguments(job: Job, *, max_model_len: int, max_num_seqs: int, drafts: int) -> dict[str, Any]:
    """Keyword arguments of `EngineArgs` and `LLM`.

    Args:
        job: `checkpoint`, `dtype`, `device`, `drop`, `twin`.
        max_model_len: longest sequence, prompt and drafts together.
        max_num_seqs: most requests in a batch.
        drafts: tokens drafted a step, 0 for none.

    Raises:
        RuntimeError: the job asks for another device than the one vLLM was built for.
    """
    device = job.get("device")
    if device not in (None, current_platform.device_type):
        raise RuntimeError(f"the job asks for {device}, this vLLM runs on {current_platform.device_type}")
    arguments: dict[str, Any] = {
        "model": str(opened(job)),
        "skip_tokenizer_init": True,
        "dtype": job["dtype"],
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "language_model_only": True,
        "seed": 0,
    }
    if drafts:
        arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": drafts}
    if job.get("drop"):
        arguments["hf_overrides"] = dropping(job["drop"])
    if current_platform.is_cpu():
        arguments["compilation_config"] = {"custom_ops": ["none"]}
    return arguments


def settings_in_words(job: Job) -> list[str]:
    """What `engine_arguments` set that a server's default does not, and why."""
    words = [
        "enforce_eager: no compilation",
        "prefix caching off: hybrid models with speculation fail with it",
        "language_model_only: no vision tower",
    ]
    if current_platform.is_cpu():
        words.append("custom_ops none: the CPU's rotary kernel is wrong for 3-D queries (multi-head latent attention)")
    if job.get("twin"):
        words.append(job["twin"]["words"])
    return words + [f"config field dropped: {field}" for field in job.get("drop", ())]


def dropping(fields: Sequence[str]) -> Callable[[Any], Any]:
    """A callable for `hf_overrides` that drops dotted fields of the config, or of its `text_config`.

    Callable and not a dict, because vLLM 0.32 applies a callable to the draft's config too (vllm/config/speculative.py).
    """

    def drop(config: Any) -> Any:
        for part in (config, getattr(config, "text_config", None)):
            for field in fields:
                *path, name = field.split(".")
                _remove(_walk(part, path), name)
        return config

    return drop


def _walk(part: Any, path: Sequence[str]) -> Any:
    for name in path:
        part = part.get(name) if isinstance(part, dict) else getattr(part, name, None)
    return part


def _remove(part: Any, name: str) -> None:
    if isinstance(part, dict):
        part.pop(name, None)
    elif hasattr(part, name):
        delattr(part, name)
