"""The MTP layer of Qwen3-Next and Qwen3.5 in plain torch, dense and with experts.

Sources: vLLM 0.32.0 models/qwen3_5_mtp.py and models/qwen3_next.py (attention with an output gate, sparse MLP), SGLang 0.5.23
models/qwen3_5_mtp.py and models/qwen2_moe.py; both read the same checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from mtp_zoo_conformance.reference.chain import HasRequests, run_chain


def reference(tensors: Mapping[str, Tensor], config: Mapping[str, Any], requests: HasRequests) -> dict[str, Tensor]:
    """Run the head of a checkpoint on the requests, FP32.

    Args:
        tensors: the whole checkpoint under its native names; the language model's prefix is found by its embedding.
        config: the language model's configuration.
        requests: the inputs.
    """
    weights = {name: value.float() for name, value in tensors.items()}
    embedding = next(value for name, value in weights.items() if name.endswith("embed_tokens.weight"))
    lm_head = weights.get("lm_head.weight", embedding)

    def layer(ids: Tensor, states: Tensor, positions: Tensor) -> dict[str, Tensor]:
        stages = mtp_layer(weights, config, embedding[ids], states, positions)
        return {**stages, "recycle": stages["output_norm"], "logits": stages["output_norm"] @ lm_head.T}

    return run_chain(layer, requests)


def mtp_layer(
    weights: Mapping[str, Tensor], config: Mapping[str, Any], embeddings: Tensor, states: Tensor, positions: Tensor
) -> dict[str, Tensor]:
    """Stages of one pass over one request; embeddings and states are [slots, hidden], positions [slots]."""

    def norm(x: Tensor, name: str) -> Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt()
        return x * scale * (1 + weights[f"mtp.{name}.weight"])

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"mtp.{name}.weight"].T

    def attention(x: Tensor) -> Tensor:
        heads, size = config["num_attention_heads"], config["head_dim"]
        groups = heads // config["num_key_value_heads"]
        query, gate = linear(x, "layers.0.self_attn.q_proj").unflatten(-1, (heads, 2, size)).unbind(-2)
        key = linear(x, "layers.0.self_attn.k_proj").unflatten(-1, (-1, size))
        value = linear(x, "layers.0.self_attn.v_proj").unflatten(-1, (-1, size))
        query = rotate(norm(query, "layers.0.self_attn.q_norm"), positions, config)
        key = rotate(norm(key, "layers.0.self_attn.k_norm"), positions, config)
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / size**0.5
        future = positions[None, :] > positions[:, None]
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), value)
        return linear((mixed * gate.sigmoid()).flatten(-2), "layers.0.self_attn.o_proj")

    def swiglu(x: Tensor, name: str) -> Tensor:
        inner = silu(linear(x, f"{name}.gate_proj")) * linear(x, f"{name}.up_proj")
        return linear(inner, f"{name}.down_proj")

    def mlp(x: Tensor) -> Tensor:
        if "mtp.layers.0.mlp.gate.weight" not in weights:
            return swiglu(x, "layers.0.mlp")
        shared = linear(x, "layers.0.mlp.shared_expert_gate").sigmoid() * swiglu(x, "layers.0.mlp.shared_expert")
        chances, chosen = linear(x, "layers.0.mlp.gate").softmax(-1).topk(config["num_experts_per_tok"], dim=-1)
        shares = chances / chances.sum(-1, keepdim=True)
        routed = [
            torch.stack([share * expert(row, int(number)) for share, number in zip(*choice, strict=True)]).sum(0)
            for row, *choice in zip(x, shares, chosen, strict=True)
        ]
        return shared + torch.stack(routed)

    def expert(x: Tensor, number: int) -> Tensor:
        packed = weights.get("mtp.layers.0.mlp.experts.gate_up_proj")
        if packed is None:
            return swiglu(x, f"layers.0.mlp.experts.{number}")
        gate, up = (packed[number] @ x).chunk(2)
        return weights["mtp.layers.0.mlp.experts.down_proj"][number] @ (silu(gate) * up)

    stages = {
        "embedding_norm": norm(embeddings, "pre_fc_norm_embedding"),
        "hidden_norm": norm(states, "pre_fc_norm_hidden"),
    }
    x = stages["fusion"] = linear(torch.cat([stages["embedding_norm"], stages["hidden_norm"]], dim=-1), "fc")
    stages["attention"] = attention(norm(x, "layers.0.input_layernorm"))
    x = x + stages["attention"]
    stages["mlp"] = mlp(norm(x, "layers.0.post_attention_layernorm"))
    stages["output_norm"] = norm(x + stages["mlp"], "norm")
    return stages


def rotate(x: Tensor, positions: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Rotary embedding of the first part of each head of [slots, heads, size]; entry i turns with entry i + half."""
    rope = config.get("rope_parameters", config)  # Qwen3-Next has both numbers beside the rest
    size = int(x.shape[-1] * rope["partial_rotary_factor"])
    angles = positions[:, None] * rope["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    cos, sin = (part.float()[:, None] for part in (angles.cos(), angles.sin()))
    (a, b), rest = x[..., :size].chunk(2, dim=-1), x[..., size:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
