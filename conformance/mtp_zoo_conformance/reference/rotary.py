"""Rotary embeddings in plain torch: pairs of neighbours or of halves, and YaRN's change of frequencies and of scale.

YaRN: arXiv 2309.00071, section 3.2, with DeepSeek-V3's `mscale` (released modeling_deepseek.py: yarn_find_correction_range,
yarn_linear_ramp_mask, yarn_get_mscale).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """How a family rotates.

    Attributes:
        frequencies: angle of each pair at position 1, [pairs], FP64.
        neighbours: whether entries 2i and 2i + 1 turn together; otherwise i and i + half.
        gain: factor on both parts of the rotation.
        score_gain: factor on the attention scores.
    """

    frequencies: Tensor
    neighbours: bool
    gain: float = 1.0
    score_gain: float = 1.0

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate the first entries of [slots, heads, size]; the rest passes."""
        size = 2 * len(self.frequencies)
        angles = positions[:, None] * self.frequencies
        cos, sin = ((self.gain * part).float()[:, None] for part in (angles.cos(), angles.sin()))
        turned, rest = x[..., :size], x[..., size:]
        if self.neighbours:
            a, b = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        else:
            a, b = turned.chunk(2, dim=-1)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        return torch.cat([turned, rest], dim=-1)


def rotary_of(config: Mapping[str, Any], size: int, *, neighbours: bool) -> Rotary:
    """The rotation of `size` entries that a config describes, in the form of released files: `rope_theta` beside the rest or in
    `rope_parameters`, and `rope_scaling` for YaRN."""
    theta = float(config.get("rope_parameters", config)["rope_theta"])
    plain = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    yarn = config.get("rope_scaling")
    if not yarn:
        return Rotary(plain, neighbours)
    all_dims = _mscale(yarn["factor"], yarn["mscale_all_dim"])
    gain = _mscale(yarn["factor"], yarn["mscale"]) / all_dims
    return Rotary(_stretched(plain, theta, size, yarn), neighbours, gain, all_dims**2)


def _stretched(plain: Tensor, theta: float, size: int, yarn: Mapping[str, Any]) -> Tensor:
    """Slow frequencies are divided by the factor, fast ones kept, those between mixed."""

    def pair_that_turns(times: float) -> float:
        length = yarn["original_max_position_embeddings"] / (times * 2 * math.pi)
        return size * math.log(length) / (2 * math.log(theta))

    first = max(math.floor(pair_that_turns(yarn["beta_fast"])), 0)
    last = min(math.ceil(pair_that_turns(yarn["beta_slow"])), size - 1)
    divided = ((torch.arange(len(plain), dtype=torch.float64) - first) / (last - first)).clamp(0, 1)
    return plain * (1 - divided) + plain / yarn["factor"] * divided


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0
