"""Which numbers of a quantised tensor share a scale, in which shapes scales are stored, and what they are called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SCALE_SUFFIXES = ("_scale_inv", "_scale")
"""What the name of a scale has behind that of its tensor: `X.weight_scale_inv`, `X.weight_scale`, `gate_up_proj_scale_inv`."""

SCALE_DTYPES = ("F32", "BF16", "F8_E8M0")
"""Stored dtypes of a scale, in safetensors' spelling."""


def scaled_name(name: str) -> str | None:
    """The tensor that a scale of that name would belong to; None where it is no name of a scale."""
    return next((name[: -len(suffix)] for suffix in SCALE_SUFFIXES if name.endswith(suffix)), None)


@dataclass(frozen=True, slots=True)
class Scheme:
    """What one scale covers.

    Attributes:
        kind: a block of each matrix, a row, or the whole.
        block: rows and columns of a block; only of the kind `block`.
    """

    kind: Literal["block", "channel", "tensor"]
    block: tuple[int, int] | None = None

    def covered(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns that share a scale in a weight [.., R, C]."""
        rows, columns = max(shape[-2], 1), max(shape[-1], 1)
        if self.kind == "block":
            assert self.block is not None
            return self.block
        return (1 if self.kind == "channel" else rows, columns)

    def grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape [.., rows of scales, columns of scales] of the scales of a weight [.., R, C]."""
        rows, columns = self.covered(shape)
        return (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))

    def misfit(self, shape: tuple[int, ...], scale: tuple[int, ...]) -> str | None:
        """What is wrong with a scale of that shape beside a weight of that shape, in words, or None."""
        if len(shape) < 2:
            return f"only matrices have {self.kind} scales, the weight is {list(shape)}"
        expected = self.shapes(shape)
        if scale in expected:
            return None
        wanted = " or ".join(str(list(one)) for one in expected)
        of = f"blocks of {self.block[0]} x {self.block[1]}" if self.block else f"one scale a {self.kind}"
        return f"a weight {list(shape)} with {of} needs a scale of {wanted}, found {list(scale)}"

    def shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shapes in which the scales of a weight [.., R, C] may be stored."""
        grid = self.grid(shape)
        if self.kind == "block":
            return (grid,)
        if self.kind == "channel":
            return (grid, grid[:-1])
        return tuple(dict.fromkeys(((), (1,), (1, 1), grid, shape[:-2])))
