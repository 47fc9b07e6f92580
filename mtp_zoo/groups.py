"""Groups of a head's tensors, by which an operator says what is trained.

Two kinds of tensor belong to no group and are never trained by gradient: the router's correction bias, which only balances
the choice of experts, and the indexer of sparse attention, which takes no part in dense attention.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias, get_args

Group: TypeAlias = Literal["fusion", "attention", "mlp", "experts", "router", "norms", "lm_head"]

GROUPS: tuple[Group, ...] = get_args(Group)

FROZEN = r"\.indexer\.|\.e_score_correction_bias$"

PATTERNS: tuple[tuple[Group, str], ...] = (
    ("norms", r"norm\.(weight|bias)$"),
    ("fusion", r"^depths\.\d+\.eh_proj\."),
    ("experts", r"\.mlp\.experts\."),
    ("router", r"\.mlp\.(gate|shared_expert_gate)\."),
    ("mlp", r"\.mlp\."),
    ("attention", r"\.self_attn\."),
    ("lm_head", r"^depths\.\d+\.lm_head\."),
)
"""The first that fits decides: a norm inside the attention is a norm."""


def group_of(name: str) -> Group | None:
    """The group of a canonical tensor name, or None for what is never trained.

    Example: `depths.0.block.self_attn.q_a_layernorm.weight` is in `norms`, `depths.0.block.self_attn.q_a_proj.weight` in
    `attention`, `depths.0.block.mlp.gate.e_score_correction_bias` in none.

    Raises:
        LookupError: a name of no known kind; the table must learn it.
    """
    if re.search(FROZEN, name):
        return None
    for group, pattern in PATTERNS:
        if re.search(pattern, name):
            return group
    raise LookupError(f"no group for the head tensor '{name}'")
