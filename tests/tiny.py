"""Tiny Qwen3.5-shaped checkpoints with random weights, for tests: a few hundred kilobytes each, made in milliseconds.

Names and shapes of the trunk come from transformers' own module, so a fixture can't drift from what users have.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HEAD_DIM = 32

LAYER_TENSORS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)
"""The tensors of one depth's block, behind `mtp.layers.{d}.`; they are those of a full-attention trunk layer."""


def tiny_config(
    *,
    nested: bool = False,
    tied: bool = True,
    depths: int | None = 1,
    vocab: int = 128,
    hidden: int = 64,
    **overrides: Any,
) -> dict[str, Any]:
    """A complete config.json: two trunk layers (linear, full attention), flat or nested as vision-language models are.

    Args:
        nested: put the language model's fields under `text_config`.
        depths: value of `mtp_num_hidden_layers`; None leaves the field out.
        overrides: fields of the language model to add or replace.
    """
    text: dict[str, Any] = {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "full_attention_interval": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-06,
        "initializer_range": 0.02,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
        },
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "use_cache": True,
    }
    if depths is not None:
        text["mtp_num_hidden_layers"] = depths
    text.update(overrides)
    if not nested:
        return {"architectures": ["Qwen3_5ForCausalLM"], **text}
    vision = {
        "model_type": "qwen3_5_vision",
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "num_position_embeddings": 16,
        "out_hidden_size": hidden,
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": text["dtype"],
        "tie_word_embeddings": tied,
        "image_token_id": vocab - 4,
        "video_token_id": vocab - 3,
        "vision_start_token_id": vocab - 2,
        "vision_end_token_id": vocab - 1,
        "text_config": text,
        "vision_config": vision,
    }


def text_config(config: Mapping[str, Any]) -> Any:
    """transformers' `Qwen3_5TextConfig` of a flat or nested config dict."""
    from transformers import Qwen3_5TextConfig

    text = dict(config.get("text_config", config))
    text.pop("architectures", None)
    return Qwen3_5TextConfig(**text)


def tiny_tensors(
    config: Mapping[str, Any], *, prefix: str = "model.", head_depths: int = 1, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Random BF16 tensors of the whole checkpoint, trunk first, head (`mtp.*`) last.

    Args:
        prefix: of the language model's names, `model.language_model.` in vision-language checkpoints. `lm_head.weight`,
            there where embeddings are untied, has none.
        head_depths: how many `mtp.layers.{d}` to make: 4 + 11 * head_depths tensors; 0 leaves the head out.
    """
    shapes = _trunk_shapes(config, prefix)
    if head_depths:
        shapes |= _head_shapes(config, prefix, head_depths)
    generator = torch.Generator().manual_seed(seed)
    return {name: _random(name, shape, generator) for name, shape in shapes.items()}


def _trunk_shapes(config: Mapping[str, Any], prefix: str) -> dict[str, tuple[int, ...]]:
    from transformers import Qwen3_5ForCausalLM

    text = text_config(config)
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(text)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if text.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return {re.sub(r"^model\.", prefix, name): shape for name, shape in shapes.items()}


def _head_shapes(config: Mapping[str, Any], prefix: str, depths: int) -> dict[str, tuple[int, ...]]:
    text = text_config(config)
    trunk = _trunk_shapes(config, prefix)
    full = f"{prefix}layers.{text.layer_types.index('full_attention')}."
    hidden = text.hidden_size
    outer = {
        "fc": (hidden, 2 * hidden),
        "norm": (hidden,),
        "pre_fc_norm_embedding": (hidden,),
        "pre_fc_norm_hidden": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {f"mtp.{name}.weight": shape for name, shape in outer.items()}
    for depth in range(depths):
        shapes |= {f"mtp.layers.{depth}.{name}": trunk[full + name] for name in LAYER_TENSORS}
    return shapes


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Matrices keep the scale of their input; vectors (zero-centred norms, biases, decays) are far from trivial."""
    scale = 1 / math.sqrt(shape[-1]) if len(shape) > 1 else 0.2
    centre = 1.0 if name.endswith("linear_attn.norm.weight") else 0.0  # the one norm that is not zero-centred
    return (torch.randn(shape, generator=generator) * scale + centre).to(torch.bfloat16)


def write_checkpoint(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    shards: int | Mapping[str, Sequence[str]] = 1,
    index: Mapping[str, str] | bool | None = None,
) -> Path:
    """Write config.json, safetensors files and, where there is more than one file, the index; return `directory`.

    Args:
        shards: a number of files with equal counts of tensors in the order given (1 is `model.safetensors`), or which
            file holds which names.
        index: None writes a true index where there are several files; True always, False never; a mapping is written
            as the weight_map, true or not.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    layout = shards if isinstance(shards, Mapping) else _even(list(tensors), shards)
    for file, names in layout.items():
        path = directory / file
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensors[name].contiguous() for name in names}, path, metadata={"format": "pt"})
    if index is None:
        index = len(layout) > 1
    if index is not False:
        true_map = {name: file for file, names in layout.items() for name in names}
        write_index(directory, true_map if index is True else index, sum(t.nbytes for t in tensors.values()))
    return directory


def write_index(directory: Path, weight_map: Mapping[str, str], total_size: int = 0) -> None:
    """Write `model.safetensors.index.json`."""
    content = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _even(names: list[str], shards: int) -> dict[str, list[str]]:
    if shards == 1:
        return {"model.safetensors": names}
    size = math.ceil(len(names) / shards)
    return {
        f"model-{number + 1:05d}-of-{shards:05d}.safetensors": names[number * size : (number + 1) * size]
        for number in range(shards)
    }
