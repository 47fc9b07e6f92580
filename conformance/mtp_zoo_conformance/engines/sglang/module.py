"""Jobs of kind "module": SGLang's own target and draft modules, without the scheduler around them.

Both are booted by the scheduler's own steps (`boot`). The draft's prefill is one ragged pass over all requests, given the
target's states as `_draft_extend_for_prefill` gives them; the chained steps are SGLang's own loop, `draft_forward`
(sglang/srt/speculative/eagle_worker_v2.py, 0.5.23): single tokens in decode mode over the draft's KV cache, the state of
each step handed to the next. On a CPU the attention is SGLang's `torch_native`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from batches import Layout, chain_batch, extend_batch
from boot import boot
from safetensors.torch import load_file, save_file
from settings import Job, keep_logs, logged, server_arguments, settings_in_words
from sglang.srt.layers.logits_processor import LogitsMetadata
from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput
from sglang.srt.speculative.spec_utils import draft_tp_context
from torch import Tensor, nn

CPU_BACKEND = "torch_native"


def run_module(job: Job) -> dict[str, Any]:
    """Run the draft module, and the target if `run_target`; writes `outputs.safetensors` in the job's folder.

    Inputs and outputs are those of the worker protocol: `prefill.*` [N,*], `step{i}.*` [B,*], `drafts` [B,K], `tap` [N,H].
    """
    keep_logs(job)
    inputs = load_file(job["inputs"])
    layout = Layout(tuple(inputs["seq_lens"].tolist()), room=job["steps"])
    requests = len(layout.lengths)
    arguments = server_arguments(
        job, cpu_backend=CPU_BACKEND, drafts=job["steps"], requests=requests + 1, kv_rows=layout.kv_rows
    )
    target, draft = boot(arguments)
    outputs: dict[str, Tensor] = {}
    with torch.no_grad():
        if job["run_target"]:
            outputs["tap"] = run_target(target.model_runner, layout, inputs["target_ids"])
        outputs |= run_draft(draft, layout, inputs, job["stages"])
    path = Path(job["folder"]) / "outputs.safetensors"
    save_file({name: value.contiguous().cpu() for name, value in outputs.items()}, path)
    return {
        **logged(draft=True),
        "backend": backends(draft.draft_runner.attn_backend)[0],  # a head's block is full attention
        "kernels": {"target_attention": backends(target.model_runner.attn_backend)},
        "settings": settings_in_words(job, cpu_backend=CPU_BACKEND),
    }


def backends(backend: Any) -> list[str]:
    """Class names of an attention backend, of both parts of a hybrid one."""
    parts = [getattr(backend, name, None) for name in ("full_attn_backend", "linear_attn_backend")]
    return [type(part).__name__ for part in parts if part is not None] or [type(backend).__name__]


def run_target(runner: Any, layout: Layout, ids: Tensor) -> Tensor:
    """The state [N,H] that SGLang's target hands to the draft."""
    layout.enter(runner)
    return runner.forward(extend_batch(runner, layout, ids)).logits_output.hidden_states.float().clone()


def run_draft(draft: Any, layout: Layout, inputs: dict[str, Tensor], stages: dict[str, str]) -> dict[str, Tensor]:
    """Prefill and chained steps; outputs of the protocol, all but `tap`."""
    runner, seen = draft.draft_runner, Hooks(draft.draft_runner.model, stages)
    layout.enter(runner)
    states = inputs["hidden_states"].to(runner.device, runner.dtype)
    spec_info = EagleDraftExtendInput(hidden_states=states, num_tokens_per_req=1, num_tokens_for_logprob_per_req=1)
    with as_draft(draft):
        batch = extend_batch(runner, layout, inputs["input_ids"], spec_info)
        found = runner.forward(batch).logits_output
        logits = seen.logits(batch, found.next_token_logits, layout.last)
        outputs = {"prefill.recycle": found.hidden_states, "prefill.logits": logits, **seen.take("prefill")}
        first = found.next_token_logits.argmax(-1)
        chain = chain_batch(runner, layout, first, found.hidden_states[layout.last].clone())
        drafts, steps = run_chain(draft, chain, seen)
    vocab = runner.model_config.vocab_size
    rows = {name: value[:, :vocab] if name.endswith(".logits") else value for name, value in (outputs | steps).items()}
    return {"drafts": drafts.clone()} | {name: value.float().clone() for name, value in rows.items()}


def run_chain(draft: Any, batch: Any, seen: Hooks) -> tuple[Tensor, dict[str, Tensor]]:
    """SGLang's draft loop from the second step on; returns drafts [B,K] and every step's outputs."""
    outputs: dict[str, Tensor] = {}
    if draft.speculative_num_steps > 1:
        draft.draft_attn_backend.init_forward_metadata(batch)
        batch.mark_forward_metadata_ready()

    def keep(number: int, found: Any) -> None:
        step = f"step{number}"
        outputs.update(
            {f"{step}.recycle": found.hidden_states.clone(), f"{step}.logits": found.next_token_logits.clone()}
        )
        outputs.update(seen.take(step))

    with watched(draft.draft_runner, keep):
        drafts = draft.draft_forward(batch)[2]
    return drafts, outputs


@contextmanager
def watched(runner: Any, keep: Callable[[int, Any], None]) -> Iterator[None]:
    """Hand every pass's number, from 2 on, and its output to `keep`."""
    forward, number = runner.forward, 1

    def watching(*args: Any, **kwargs: Any) -> Any:
        nonlocal number
        result = forward(*args, **kwargs)
        number += 1
        keep(number, result.logits_output)
        return result

    runner.forward = watching
    try:
        yield
    finally:
        del runner.forward


@contextmanager
def as_draft(draft: Any) -> Iterator[None]:
    """The context in which SGLang calls its draft (`forward_batch_generation`)."""
    with (
        draft_tp_context(draft.parallel_layout),
        speculative_moe_backend_context(),
        speculative_moe_a2a_backend_context(),
    ):
        yield


class Hooks:
    """Keeps what submodules of the draft give, and what reaches its output matrix.

    Args:
        model: the draft.
        stages: stage -> path of the submodule whose output is kept.
    """

    def __init__(self, model: nn.Module, stages: dict[str, str]) -> None:
        self._stages = stages
        self._seen: dict[str, list[Tensor]] = {}
        self._processor = model.get_submodule("logits_processor")
        self._projected: tuple[Tensor, Any] | None = None
        self._processor.register_forward_pre_hook(self._keep_projected)
        for stage, path in stages.items():
            model.get_submodule(path).register_forward_hook(self._keeper(stage))

    def _keeper(self, stage: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            self._seen.setdefault(stage, []).append(tensor.float().clone())  # SGLang goes on writing in place

        return hook

    def _keep_projected(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        self._projected = (args[1].clone(), args[2])

    def take(self, step: str) -> dict[str, Tensor]:
        """What was kept since the last call, under the step's name.

        Raises:
            RuntimeError: a submodule did not run exactly once.
        """
        counts = {path: len(self._seen.get(stage, ())) for stage, path in self._stages.items()}
        if wrong := [f"{path} ({count} times)" for path, count in counts.items() if count != 1]:
            raise RuntimeError(f"{step}: not seen exactly once in a pass: {', '.join(wrong)}")
        taken = {f"{step}.{stage}": tensors[0] for stage, tensors in self._seen.items()}
        self._seen.clear()
        return taken

    def logits(self, batch: Any, own: Tensor, last: list[int]) -> Tensor:
        """Logits [N,V] of all rows of a prefill, through the draft's own output matrix and logits processor.

        In a prefill SGLang computes those of each request's last row alone, `own` [B,V]; ours must be the same there.

        Raises:
            RuntimeError: they are not.
        """
        assert self._projected is not None
        states, head = self._projected
        metadata = LogitsMetadata.from_forward_batch(batch)
        # one row at a time, as SGLang would compute it for that row
        rows = [self._processor._get_logits(states[i : i + 1], head, metadata) for i in range(len(states))]
        logits = torch.cat(rows)
        if not bool(own.isfinite().all()):
            return logits  # the canary says what was not filled
        bound = 32 * torch.finfo(states.dtype).eps * float(own.abs().max())
        difference = float((logits[last].float() - own.float()).abs().max())
        if not difference <= bound:
            raise RuntimeError(
                f"logits of the last rows differ from SGLang's own by {difference:.2e}, allowed {bound:.2e}"
            )
        return logits
