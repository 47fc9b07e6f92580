"""The library's side of the serve tier: what it generates and counts with a served checkpoint, and how clear its choices are.

Drafts are counted in the precision that the engine computes in. How clear a choice is, is told in FP32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import mtp_zoo as mz
from mtp_zoo.acceptance import AcceptanceReport, speculate
from mtp_zoo.head import DraftHead
from mtp_zoo.spec import Engine
from mtp_zoo.training.target import load_target
from mtp_zoo_conformance.served import NEW_TOKENS, ServedCheckpoint


class Library:
    """One served checkpoint.

    Args:
        checkpoint: the checkpoint.
        family: its family.
    """

    def __init__(self, checkpoint: ServedCheckpoint, family: str) -> None:
        self.prompts, self.path, self.dtypes, self.family = (
            checkpoint.prompts,
            checkpoint.path,
            checkpoint.dtypes,
            family,
        )
        self._pairs: dict[torch.dtype, tuple[Any, DraftHead]] = {}
        self._reports: dict[tuple[object, ...], AcceptanceReport] = {}
        self.target, self.head = self._pair(torch.float32)

    def _pair(self, dtype: torch.dtype) -> tuple[Any, DraftHead]:
        """Target and head in a precision."""
        if dtype not in self._pairs:
            target = load_target(self.path, dtype=dtype)
            head = mz.load_head(self.path, target=target, family=self.family, dtype=dtype).eval()
            self._pairs[dtype] = (target, head)
        return self._pairs[dtype]

    def report(self, engine: Engine, k: int) -> AcceptanceReport:
        """What the draft/verify loop counts on the prompts, under an engine's conventions and in its precision."""
        dtype: torch.dtype = getattr(torch, self.dtypes[engine])
        target, head = self._pair(dtype)
        key = (k, dtype, head.spec.recycle.of(engine), head.spec.zero_first_embedding.of(engine))
        if key not in self._reports:
            head.engine = engine
            self._reports[key] = speculate(target, head, self.prompts, k=k, max_new_tokens=NEW_TOKENS, check=False)
        return self._reports[key]

    @torch.no_grad()
    def choices(self, prompt: int, output: Sequence[int]) -> tuple[list[int], list[float]]:
        """The target's choice at each place of an output, and by how much its logit leads the second best.

        One pass without a cache. An output is the target's plain greedy output if and only if it equals these choices.
        """
        best = self._logits(self.target, prompt, output).topk(2)
        return best.indices[:, 0].tolist(), (best.values[:, 0] - best.values[:, 1]).tolist()

    @torch.no_grad()
    def bf16_error(self, prompt: int, output: Sequence[int]) -> float:
        """Largest difference that BF16 makes to any of the target's logits along an output."""
        rough = self._logits(self._pair(torch.bfloat16)[0], prompt, output).float()
        return float((rough - self._logits(self.target, prompt, output)).abs().max())

    def _logits(self, target: Any, prompt: int, output: Sequence[int]) -> Tensor:
        """[tokens, vocab]: what each token of an output was chosen from."""
        ids = torch.tensor([[*self.prompts[prompt], *output]])
        return target(input_ids=ids, use_cache=False).logits[0, len(self.prompts[prompt]) - 1 : -1]

    @torch.no_grad()
    def draft_margin(self, engine: Engine, prompt: int, known: Sequence[int], depth: int) -> float:
        """By how much the head's draft of a depth leads its second best.

        Args:
            engine: whose conventions to follow.
            prompt: number of the prompt.
            known: output tokens up to and with the drafts before this one, which were right.
            depth: the draft's depth.
        """
        self.head.engine = engine
        tokens = mz.TokenBatch.all_tokens(torch.tensor([[*self.prompts[prompt], *known]]))
        states = self.head(tokens, mz.target_states(self.target, tokens, self.head.spec), depths=depth)
        slot = tokens.shape[1] - 1 - depth
        return _lead(self.head.logits(depth, states[-1].normed[0, slot]))


def _lead(logits: Tensor) -> float:
    first, second = logits.topk(2).values.tolist()
    return first - second
