"""What the library needs of a draft head, and what a depth of one gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

from mtp_zoo.spec import DepthPolicy, Engine, HeadSpec

if TYPE_CHECKING:
    from mtp_zoo.shared import SharedTensors


@dataclass(frozen=True)
class DepthState:
    """What one depth gives: `normed` goes to the lm_head, `recycled` to the next depth. Both [batch, seq, hidden]."""

    normed: Tensor
    recycled: Tensor


@runtime_checkable
class DraftModule(Protocol):
    """What rollouts, the objective and the draft loop need of a head; anything that has it can take part."""

    spec: HeadSpec
    engine: Engine | None

    @property
    def num_depths(self) -> int:
        """Number of depths with weights of their own."""
        ...

    @property
    def depth_policy(self) -> DepthPolicy:
        """How depths chain."""
        ...

    @property
    def shared(self) -> SharedTensors:
        """The target's embedding and lm_head."""
        ...

    def run_depth(
        self, depth: int, embeddings: Tensor, hidden: Tensor, position_ids: Tensor, **attention: Any
    ) -> DepthState:
        """One application of a depth."""
        ...

    def own_lm_head(self, depth: int) -> Tensor | None:
        """The output projection of a depth's own; None where it uses the target's."""
        ...

    def logits(self, depth: int, states: Tensor) -> Tensor:
        """What a depth drafts from."""
        ...
