"""Norms and gates of `torch.ops.sgl_kernel`, in plain torch, computed in float32 as the kernels do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .ledger import stand_in


def _rms(x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def _zero_centred(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (_rms(x, eps) * (1.0 + weight.float())).to(x.dtype)


@stand_in
def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    """Attention's output gate: x times sigmoid(gate), in place.

    Shapes: x and gate [N, heads * D], or any that hold as many entries.
    """
    x.mul_(torch.sigmoid(gate.reshape(x.shape).float()).to(x.dtype))


@stand_in
def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split of queries and output gate, and zero-centred RMS norms of queries and keys.

    Shapes: q_gate [N, heads * 2 * head_dim]: for each head its query, then its gate.

    Returns:
        queries [N * heads, head_dim], keys [N * kv_heads, head_dim], gate [N * heads, head_dim].
    """
    q, gate = q_gate.reshape(q_gate.shape[0], heads, 2 * head_dim).chunk(2, -1)
    normed_q = _zero_centred(q.reshape(-1, head_dim), q_weight, eps)
    normed_k = _zero_centred(k.reshape(-1, head_dim), k_weight, eps)
    return normed_q, normed_k, gate.reshape(-1, head_dim).contiguous()


@stand_in
def fused_rmsnorm_gated_cpu(x: Tensor, weight: Tensor, z: Tensor, eps: float) -> Tensor:
    """RMS norm with a direct weight, times silu(z): the output norm of linear attention."""
    return (_rms(x, eps) * weight.float() * F.silu(z.float())).to(x.dtype)
