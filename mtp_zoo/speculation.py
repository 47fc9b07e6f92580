"""The draft/verify loop over a batch of prompts, of which each accepts as many drafts as are right for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mtp_zoo.drafting import drafter_of, window
from mtp_zoo.head import DraftHead
from mtp_zoo.verifier import Verifier


@dataclass
class Progress:
    """What one prompt has given so far: output tokens, and accepted drafts of every verify step."""

    output: list[int]
    accepted: list[int] = field(default_factory=list[int])

    def ended(self, max_new_tokens: int, eos: Sequence[int]) -> bool:
        """Whether it is long enough or has an end-of-sequence token."""
        return len(self.output) >= max_new_tokens or not set(self.output).isdisjoint(eos)


class SpeculativeBatch:
    """Prompts that are decoded together.

    Between steps, the target's cache holds all tokens of a row but the last, which is verified and known.

    Args:
        verifier: the target.
        head: attached to it.
        prompts: token ids.
        k: drafts a step.
    """

    def __init__(self, verifier: Verifier, head: DraftHead, prompts: Sequence[Sequence[int]], k: int) -> None:
        self.verifier, self.k = verifier, k
        read = verifier.prefill(prompts)
        self.drafter = drafter_of(head, k, len(prompts))
        self.counts = [len(prompt) for prompt in prompts]
        self.hidden = _left_aligned([one.hidden[0] for one in read])
        rows = [torch.tensor(prompt[1:], dtype=torch.int64, device=verifier.device) for prompt in prompts]
        self.unseen = _left_aligned([torch.cat([row, one.choices[0]]) for row, one in zip(rows, read, strict=True)])
        self.progress = [Progress(one.choices[0].tolist()) for one in read]
        self.running = list(range(len(prompts)))

    def run(self, max_new_tokens: int, eos: Sequence[int]) -> list[Progress]:
        """Step until every prompt has ended; one that has takes no further part."""
        while self._drop_ended(max_new_tokens, eos):
            self._step()
        return self.progress

    def _drop_ended(self, max_new_tokens: int, eos: Sequence[int]) -> bool:
        stay = [row for row, number in enumerate(self.running) if not self.progress[number].ended(max_new_tokens, eos)]
        if stay and len(stay) < len(self.running):
            self.verifier.select(stay)
            self.drafter.select(stay)
            self.hidden, self.unseen = self.hidden[stay], self.unseen[stay]
            self.counts = [self.counts[row] for row in stay]
        self.running = [self.running[row] for row in stay]
        return bool(stay)

    def _step(self) -> None:
        drafts = self.drafter.draft(self.unseen, self.hidden, self.counts)
        last = torch.tensor(self.counts, device=drafts.device) - 1
        verified = self.verifier.verify(torch.cat([window(self.unseen, last, 1), drafts], dim=1))
        right = drafts == verified.choices[:, : self.k]
        good = [int(count) for count in right.long().cumprod(1).sum(1).tolist()]
        self.counts = [count + 1 for count in good]
        self.verifier.keep(self.counts)
        new = max(self.counts)
        self.hidden, self.unseen = verified.hidden[:, :new], verified.choices[:, :new]
        for number, count, choices in zip(self.running, good, verified.choices.tolist(), strict=True):
            self.progress[number].accepted.append(count)
            self.progress[number].output += choices[: count + 1]


def _left_aligned(rows: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
