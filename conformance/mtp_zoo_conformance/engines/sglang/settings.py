"""How a checkpoint is opened with SGLang, the same for its modules alone and for the whole engine.

What is set, and why, is also said in words in every record.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import canary
import torch
from dropped import without_fields
from shim import ledger

Job = dict[str, Any]

RESERVED = 64
"""KV rows beside those that requests need: SGLang keeps the first ones for padding."""


def on_cpu() -> bool:
    """Whether this worker's SGLang runs on the CPU: `worker.py` says so where there is no accelerator."""
    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"


def server_arguments(job: Job, *, cpu_backend: str, drafts: int, requests: int, kv_rows: int) -> dict[str, Any]:
    """Keyword arguments of `ServerArgs` and `sglang.Engine`.

    Args:
        job: `checkpoint`, `dtype`, `device`, `drop`, `folder`.
        cpu_backend: attention backend on a CPU; elsewhere SGLang chooses.
        drafts: tokens drafted a step, 0 for none.
        requests: most requests in a batch.
        kv_rows: tokens that the KV cache holds.

    Raises:
        RuntimeError: the job asks for another device than the worker has.
    """
    device = "cpu" if on_cpu() else str(torch.accelerator.current_accelerator())
    if job.get("device") not in (None, device):
        raise RuntimeError(f"the job asks for {job['device']}, this SGLang runs on {device}")
    arguments: dict[str, Any] = {
        "model_path": str(without_fields(job)),
        "dtype": job["dtype"],
        "device": device,
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "max_running_requests": requests,
        "max_total_tokens": kv_rows + RESERVED,
        "random_seed": 0,
        "log_level": "warning",
    }
    if on_cpu():
        arguments |= {"attention_backend": cpu_backend, "mem_fraction_static": 0.1}
        os.environ["SGLANG_MAMBA_CONV_DTYPE"] = job["dtype"]
    if drafts:
        arguments |= {
            "speculative_algorithm": "NEXTN",
            "speculative_num_steps": drafts,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": drafts + 1,
        }
    return arguments


def settings_in_words(job: Job, *, cpu_backend: str) -> list[str]:
    """What `server_arguments` set that a server's default does not, and why."""
    words = ["no radix cache, no CUDA graphs, no overlapped scheduling: every pass is computed, one after the other"]
    if on_cpu():
        words.append(f"attention backend {cpu_backend}")
        words.append("torch.compile off")
        words.append(f"convolution windows of linear attention in {job['dtype']}, as the rest")
    return words + [f"config field dropped: {field}" for field in job.get("drop", ())]


def keep_logs(job: Job) -> None:
    """Name the files in which this job, and every process that it starts, writes down loads and stand-ins."""
    for variable, name in ((ledger.LOG, "shims.log"), (canary.LOG, "loads.log")):
        path = Path(job["folder"]) / name
        path.unlink(missing_ok=True)
        os.environ[variable] = str(path)


def logged(*, draft: bool) -> dict[str, Any]:
    """The part of a record that those files tell: the target is loaded first, the draft last."""
    found = canary.loads(os.environ[canary.LOG])
    target, head = found[0], found[-1] if draft else None
    return {
        "draft_class": head.model if head else None,
        "target_class": target.model,
        "parameters": head.parameters if head else 0,
        "unfilled": head.unfilled if head else [],
        "target_unfilled": target.unfilled,
        "shims": ledger.used(os.environ[ledger.LOG]),
    }
