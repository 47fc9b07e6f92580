"""What the attention of a rollout remembers from depth to depth."""

from __future__ import annotations

from torch import Tensor


class KeyStore:
    """Rotated keys and values of every (layer, depth) of one rollout.

    Writes are idempotent, so that the recomputation under gradient checkpointing neither appends nor sees later depths. No
    dataclass, nor is any view of it: FSDP2 copies every dataclass that a module is called with, and writes would be lost.
    """

    def __init__(self) -> None:
        self._pairs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def through(self, layer: int, step: int, own: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of depths 1..step (1-based), the last of them `own`, which is stored."""
        self._pairs.setdefault((layer, step), own)
        return [*(self._pairs[layer, depth] for depth in range(1, step)), own]
