"""The requests that both sides run: ragged, so that a mix-up between requests shows, and made from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

LENGTHS = (7, 19, 33)
STEPS = 4
"""Applications of the head: the prefill and three chained steps."""


@dataclass(frozen=True)
class Requests:
    """Requests laid one behind the other, without padding.

    Attributes:
        input_ids: token whose embedding the head reads in each slot.
        hidden_states: target state of each slot, FP32.
        target_ids: tokens for the target itself.
        seq_lens: slots of each request; its positions are 0, 1, ...
        steps: how often the head is applied; the first is the prefill.

    Example: seq_lens (2, 3) and steps 3. The prefill fills slots 0-1 and 0-2. Step 2 puts each request's own first draft
    at positions 2 and 3, step 3 its second draft at 3 and 4.
    """

    input_ids: Int[Tensor, " slots"]
    hidden_states: Float[Tensor, "slots hidden"]
    target_ids: Int[Tensor, " slots"]
    seq_lens: tuple[int, ...]
    steps: int

    @classmethod
    def random(cls, *, vocab: int, hidden: int, seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> Requests:
        """Requests of the given lengths with random tokens and states."""
        generator = torch.Generator().manual_seed(seed)
        slots = sum(lengths)
        return cls(
            input_ids=torch.randint(vocab, (slots,), generator=generator),
            hidden_states=torch.randn(slots, hidden, generator=generator),
            target_ids=torch.randint(vocab, (slots,), generator=generator),
            seq_lens=lengths,
            steps=STEPS,
        )

    @property
    def spans(self) -> tuple[slice, ...]:
        """Where each request lies."""
        ends = [0]
        for length in self.seq_lens:
            ends.append(ends[-1] + length)
        return tuple(slice(start, stop) for start, stop in pairwise(ends))

    @property
    def last(self) -> list[int]:
        """The last slot of each request."""
        return [span.stop - 1 for span in self.spans]

    def where(self, row: int) -> str:
        """The request and position of a slot, in words."""
        number = next(n for n, span in enumerate(self.spans) if row < span.stop)
        return f"request {number}, position {row - self.spans[number].start}"

    def save(self, path: Path) -> Path:
        """Write the file that workers read."""
        from safetensors.torch import save_file

        tensors = {name: getattr(self, name) for name in ("input_ids", "hidden_states", "target_ids")}
        save_file({**tensors, "seq_lens": torch.tensor(self.seq_lens)}, path)
        return path
