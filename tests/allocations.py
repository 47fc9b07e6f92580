"""How much tensor memory a piece of code holds at its worst moment."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of storages made inside the context, and takes them off when they are freed.

    Attributes:
        peak: most bytes alive at one moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._alive = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            # A DTensor has no memory of its own: its local part is seen by itself.
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and not leaf.is_meta:
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self._known:  # torch keeps one Python object for as long as a storage lives
            return
        self._known.add(id(storage))
        self._alive += storage.nbytes()
        self.peak = max(self.peak, self._alive)
        weakref.finalize(storage, self._freed, id(storage), storage.nbytes())

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self._alive -= nbytes
