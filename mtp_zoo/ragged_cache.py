"""A KV cache whose rows hold different numbers of tokens, around a transformers cache whose rows do not.

Rows are aligned on the right: of L columns, row i uses the last `lengths[i]`. New tokens are appended to all rows at once,
and `keep` then says how many of them stay in each row, which is how rejected drafts and padding leave the cache:

    lengths 3 2    columns . a b | d e f      keep 2, 1      a b d e    lengths 4 2
                           . . c | g h i                     . . c g

Distances between columns of a row are distances between its tokens, so that sliding windows are right. States of recurrent
layers have no columns: they can't drop a token again, see `restore_states`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

COLUMNS = {"keys": (0, -2), "values": (0, -2), "indexer_keys": (0, 1), "indexer_position_ids": (1, 2)}
"""The tensors of a cache layer that grow by a column a token: their axis of rows, and of columns."""


class RaggedCache:
    """Cache of `rows` sequences, all of them empty.

    Args:
        config: the transformers config of the layers that use it.
        rows: number of sequences.

    Attributes:
        layers: the transformers cache, to be handed to a model.
        lengths: tokens that each row holds.
    """

    def __init__(self, config: Any, rows: int) -> None:
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

        self.layers = DynamicCache(config=config)
        # A layer that drops what no window reaches could not take back what a rejected draft pushed out.
        self.layers.layers = [
            DynamicLayer() if isinstance(layer, DynamicSlidingWindowLayer) else layer for layer in self.layers.layers
        ]
        self.lengths = [0] * rows

    @property
    def width(self) -> int:
        """Columns, the length of the longest row."""
        return max(self.lengths, default=0)

    def positions(self, new: int, device: torch.device) -> Tensor:
        """[rows, new]: positions of the next tokens."""
        return torch.tensor(self.lengths, device=device)[:, None] + torch.arange(new, device=device)

    def filled(self, new: int, device: torch.device) -> Tensor | None:
        """[rows, width + new], bool: which columns hold tokens once `new` are appended; None where all do."""
        if min(self.lengths) == self.width:
            return None
        empty = self.width - torch.tensor(self.lengths, device=device)
        return torch.arange(self.width + new, device=device) >= empty[:, None]

    def keep(self, new: int, counts: Sequence[int]) -> None:
        """Of `new` tokens that a forward pass has appended to every row, keep the first `counts[i]` in row i."""
        old, before = self.width, self.lengths
        self.lengths = [length + count for length, count in zip(before, counts, strict=True)]
        if min(counts) == new:
            return

        def kept(name: str, value: Tensor) -> Tensor:
            rows, columns = COLUMNS[name]
            lengths = torch.tensor([before, self.lengths], device=value.device)[:, :, None]
            rank = torch.arange(self.width, device=value.device) - (self.width - lengths[1])
            # A row's tokens lie in one piece, also across the border of old and new; empty columns repeat some token.
            index = (rank + old - lengths[0]).clamp(min=0)
            lines = torch.arange(len(index), device=value.device)[:, None]
            axes = (rows, columns), (0, 1)
            return value.movedim(*axes)[lines, index].movedim(*reversed(axes))

        self._change(lambda name, value: kept(name, value) if name in COLUMNS else value)

    def snapshot(self) -> RaggedCache:
        """A cache that stays as it is while this one goes on.

        Keys and values are replaced by longer ones, so that a reference keeps them; states are written in place.
        """
        twin = self._twin()
        twin._change(lambda name, value: value if name in COLUMNS else value.clone())
        return twin

    def select(self, rows: Sequence[int]) -> RaggedCache:
        """A cache of some rows."""
        twin, width = self._twin(), self.width
        twin.lengths = [self.lengths[row] for row in rows]
        drop = width - twin.width

        def selected(name: str, value: Tensor) -> Tensor:
            axis, columns = COLUMNS.get(name, (0, None))
            value = value.index_select(axis, torch.tensor(rows, device=value.device))
            return value if columns is None else value.narrow(columns, drop, width - drop)

        twin._change(selected)
        return twin

    @classmethod
    def join(cls, parts: Sequence[RaggedCache]) -> RaggedCache:
        """One cache of the rows of several, in their order."""
        joined = parts[0]._twin()
        joined.lengths = [length for part in parts for length in part.lengths]
        layers = [part.layers.layers for part in parts]
        for number, layer in enumerate(joined.layers.layers):
            others = [_tensors(each[number]) for each in layers]
            for key in others[0]:
                _put(layer, key, _joined(key[0], [each[key] for each in others], joined.width))
        return joined

    @property
    def recurrent(self) -> bool:
        """Whether some layer holds a state that can't drop a token again."""
        return any(name not in COLUMNS for layer in self.layers.layers for name, _ in _tensors(layer))

    def restore_states(self, rows: Sequence[int], other: RaggedCache) -> None:
        """Give some rows the recurrent states that they have in `other`, a cache of these rows."""
        for layer, source in zip(self.layers.layers, other.layers.layers, strict=True):
            held = _tensors(layer)
            for key, value in _tensors(source).items():
                if key[0] not in COLUMNS:
                    held[key][list(rows)] = value

    def _twin(self) -> RaggedCache:
        twin = copy.copy(self)
        twin.layers = copy.copy(self.layers)
        twin.layers.layers = [copy.copy(layer) for layer in self.layers.layers]
        for layer in twin.layers.layers:
            for name, value in vars(layer).items():
                if isinstance(value, dict):
                    setattr(layer, name, dict(value))
        return twin

    def _change(self, change: Callable[[str, Tensor], Tensor]) -> None:
        for layer in self.layers.layers:
            for key, value in _tensors(layer).items():
                _put(layer, key, change(key[0], value))


def _tensors(layer: Any) -> dict[tuple[str, Any], Tensor]:
    """The tensors of a cache layer, by attribute and, where that is a mapping, by its key."""
    found: dict[tuple[str, Any], Tensor] = {}
    for name, value in vars(layer).items():
        entries = value.items() if isinstance(value, dict) else [(None, value)]
        found |= {(name, key): each for key, each in entries if isinstance(each, Tensor)}
    return found


def _put(layer: Any, key: tuple[str, Any], value: Tensor) -> None:
    name, entry = key
    if entry is None:
        setattr(layer, name, value)
    else:
        getattr(layer, name)[entry] = value


def _joined(name: str, values: Sequence[Tensor], width: int) -> Tensor:
    if name not in COLUMNS:
        return torch.cat(list(values))
    rows, columns = COLUMNS[name]
    wide = []
    for value in values:
        missing = list(value.shape)
        missing[columns] = width - value.shape[columns]
        wide.append(torch.cat([value.new_zeros(missing), value], dim=columns))
    return torch.cat(wide, dim=rows)
