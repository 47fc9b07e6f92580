"""The head of DeepSeek-V3 and GLM in plain torch: fusion, one decoder layer with experts, norm.

Sources: DeepSeek-V3's report (arXiv 2412.19437, sections 2.1 and 2.2) and released modeling_deepseek.py; vLLM 0.32.0
models/deepseek_mtp.py, deepseek_v2.py, glm4_moe_mtp.py, glm4_moe.py; SGLang 0.5.23 models/deepseek_nextn.py, glm4_moe_nextn.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import silu

from mtp_zoo_conformance.reference.chain import HasRequests, run_chain
from mtp_zoo_conformance.reference.rotary import rotary_of

Recycle = Literal["post_norm", "pre_norm"]


@dataclass(frozen=True)
class Layer:
    """The head's tensors, by the names behind `model.layers.N.`, and the config."""

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMS norm over the last dimension; gains by the weight."""
        scale = (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.tensors[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Matrix, and bias where there is one."""
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", torch.zeros(1))

    def swiglu(self, x: Tensor, name: str) -> Tensor:
        """One expert, or the shared experts."""
        inner = silu(self.linear(x, f"{name}.gate_proj")) * self.linear(x, f"{name}.up_proj")
        return self.linear(inner, f"{name}.down_proj")


Attention = Callable[[Layer, Tensor, Tensor], Tensor]
"""(layer, input [slots, hidden], positions [slots]) -> output [slots, hidden]."""


def latent_reference(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    requests: HasRequests,
    *,
    recycle: Recycle = "post_norm",
    zero_first_embedding: bool = False,
) -> dict[str, Tensor]:
    """Run a head with latent attention; see `_run`. An indexer is not run: right while no context is longer than its top k."""
    return _run(tensors, config, requests, latent_attention, recycle, zero_first_embedding)


def grouped_reference(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    requests: HasRequests,
    *,
    recycle: Recycle = "post_norm",
    zero_first_embedding: bool = False,
) -> dict[str, Tensor]:
    """Run a head with grouped queries; see `_run`."""
    return _run(tensors, config, requests, grouped_attention, recycle, zero_first_embedding)


def _run(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    requests: HasRequests,
    attention: Attention,
    recycle: Recycle,
    zero_first_embedding: bool,
) -> dict[str, Tensor]:
    """Run the head of a checkpoint on the requests, FP32.

    Args:
        tensors: the whole checkpoint under its native names.
        config: its configuration.
        requests: the inputs.
        attention: that of the family.
        recycle: whether the next step reads the state behind or before `shared_head.norm`.
        zero_first_embedding: whether the embedding at position 0 is replaced by zeros.
    """
    weights = {name: value.float() for name, value in tensors.items()}
    prefix = f"model.layers.{config['num_hidden_layers']}."
    own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    embedding = weights["model.embed_tokens.weight"]
    lm_head = weights.get("lm_head.weight", embedding)
    layer = Layer(own, config)

    def once(ids: Tensor, states: Tensor, positions: Tensor) -> dict[str, Tensor]:
        embeddings = embedding[ids]
        if zero_first_embedding:
            embeddings = torch.where(positions[:, None] == 0, 0, embeddings)
        stages, last = _stages(layer, attention, embeddings, states, positions)
        recycled = stages["output_norm"] if recycle == "post_norm" else last
        return {**stages, "recycle": recycled, "logits": stages["output_norm"] @ lm_head.T}

    return run_chain(once, requests)


def _stages(
    layer: Layer, attention: Attention, embeddings: Tensor, states: Tensor, positions: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Stages of one pass over one request, and the state before the last norm."""
    stages = {"embedding_norm": layer.norm(embeddings, "enorm"), "hidden_norm": layer.norm(states, "hnorm")}
    x = stages["fusion"] = layer.linear(torch.cat([stages["embedding_norm"], stages["hidden_norm"]], -1), "eh_proj")
    stages["attention"] = attention(layer, layer.norm(x, "input_layernorm"), positions)
    x = x + stages["attention"]
    stages["mlp"] = experts(layer, layer.norm(x, "post_attention_layernorm"))
    x = x + stages["mlp"]
    stages["output_norm"] = layer.norm(x, "shared_head.norm")
    return stages, x


def latent_attention(layer: Layer, x: Tensor, positions: Tensor) -> Tensor:
    """Queries, keys and values expanded from latents; one rotated key for all heads."""
    config = layer.config
    heads, rope, nope = config["num_attention_heads"], config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    rotate = rotary_of(config, rope, neighbours=True)
    queries = layer.linear(
        layer.norm(layer.linear(x, "self_attn.q_a_proj"), "self_attn.q_a_layernorm"), "self_attn.q_b_proj"
    )
    plain, turned = queries.unflatten(-1, (heads, -1)).split([nope, rope], dim=-1)
    latents, key = layer.linear(x, "self_attn.kv_a_proj_with_mqa").split([config["kv_lora_rank"], rope], dim=-1)
    expanded = layer.linear(layer.norm(latents, "self_attn.kv_a_layernorm"), "self_attn.kv_b_proj")
    keys, values = expanded.unflatten(-1, (heads, -1)).split([nope, config["v_head_dim"]], dim=-1)
    key = rotate(key[:, None], positions).expand(-1, heads, -1)
    query, key = torch.cat([plain, rotate(turned, positions)], -1), torch.cat([keys, key], -1)
    mixed = attend(query, key, values, positions, rotate.score_gain / (nope + rope) ** 0.5)
    return layer.linear(mixed, "self_attn.o_proj")


def grouped_attention(layer: Layer, x: Tensor, positions: Tensor) -> Tensor:
    """Neighbouring queries share a key head; a part of each head is rotated, behind the norms where there are some."""
    config = layer.config
    size, groups = config["head_dim"], config["num_attention_heads"] // config["num_key_value_heads"]
    rotate = rotary_of(config, int(size * config["partial_rotary_factor"]), neighbours=False)
    query, key, value = (layer.linear(x, f"self_attn.{name}_proj").unflatten(-1, (-1, size)) for name in "qkv")
    if config["use_qk_norm"]:
        query, key = layer.norm(query, "self_attn.q_norm"), layer.norm(key, "self_attn.k_norm")
    query, key = rotate(query, positions), rotate(key, positions)
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return layer.linear(attend(query, key, value, positions, size**-0.5), "self_attn.o_proj")


def attend(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Causal attention over [slots, heads, size]; the heads come back one behind the other."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    future = positions[None, :] > positions[:, None]
    chances = scores.masked_fill(future, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", chances, value).flatten(-2)


def experts(layer: Layer, x: Tensor) -> Tensor:
    """Shared experts and the chosen ones: chosen by score and bias, weighed by score."""
    routed = [_routed(layer, row) for row in x]
    return layer.swiglu(x, "mlp.shared_experts") + torch.stack(routed)


def _routed(layer: Layer, x: Tensor) -> Tensor:
    """The chosen experts' part for one slot."""
    config = layer.config
    scores = layer.linear(x, "mlp.gate").sigmoid()
    groups = (scores + layer.tensors["mlp.gate.e_score_correction_bias"]).unflatten(-1, (config["n_group"], -1))
    kept = groups.topk(2, dim=-1).values.sum(-1).topk(config["topk_group"]).indices
    allowed = torch.full_like(groups, -torch.inf)
    allowed[kept] = groups[kept]
    chosen = allowed.flatten().topk(config["num_experts_per_tok"]).indices
    shares = scores[chosen] / scores[chosen].sum() if config["norm_topk_prob"] else scores[chosen]
    parts = [share * layer.swiglu(x, f"mlp.experts.{n}") for n, share in zip(chosen.tolist(), shares, strict=True)]
    return config["routed_scaling_factor"] * torch.stack(parts).sum(0)
