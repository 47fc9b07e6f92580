"""Flips of a router with sigmoid scores and a bias, and of shared experts; see `flips`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mtp_zoo.head import DraftHead


def other_router_bias(head: DraftHead) -> None:
    """Choose experts by their scores alone, where the family adds a bias for the choice."""
    _router(head).e_score_correction_bias.zero_()


def shares_with_bias(head: DraftHead) -> None:
    """Weigh the chosen experts by scores with the bias, where the family adds it for the choice only."""
    router = _router(head)

    def weigh(_module: Any, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, _, chosen = output
        shares = (logits.sigmoid() + router.e_score_correction_bias).gather(1, chosen)
        shares = shares / shares.sum(-1, keepdim=True) * router.routed_scaling_factor
        return logits, shares, chosen

    router.register_forward_hook(weigh)


def unscaled_shares(head: DraftHead) -> None:
    """Leave the factor on the routed experts out."""
    _router(head).routed_scaling_factor = 1.0


def shares_without_norm(head: DraftHead) -> None:
    """Weigh the chosen experts by their scores as they are, where the family makes them add up to one."""
    _router(head).norm_topk_prob = False


def other_router_groups(head: DraftHead) -> None:
    """Choose among all experts, where the family chooses a group first."""
    router = _router(head)
    router.num_group, router.topk_group = 1, 1


def without_shared_experts(head: DraftHead) -> None:
    """Leave the shared experts out."""
    with torch.no_grad():
        head.get_parameter("depths.0.block.mlp.shared_experts.down_proj.weight").zero_()


def _router(head: DraftHead) -> Any:
    return head.get_submodule("depths.0.block.mlp.gate")
