"""Tiny checkpoints without a head, as the tools write them that lose it: names, dtypes, shapes and files, values made up.

Sources of the forms:
    compressed-tensors   0.17.0, what its ModelCompressor makes of a linear, and writes into config.json
    modelopt             nvidia-modelopt 0.47.0, torch/export/convert_hf_config.py and unified_export_hf.py
    gptq                 GPTQModel 7.7.0, nn_modules/qlinear and models/writer.py: settings in two files
    awq                  AutoAWQ 0.2.9, modules/linear/gemm.py and models/base.py: an FP16 model, no list
    fp8                  the published Qwen3.8-27B-FP8, and transformers' FineGrainedFP8Config
What transformers and PEFT save is made by them: `save_pretrained`.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.tiny import write_checkpoint

GROUP = 16
LINEAR = re.compile(r"(.*\.layers\.[0-9]+\.(?:self_attn|mlp)\.(?:\w+\.)*\w+_proj)\.weight")
"""The linears of a trunk that tools quantise; group 1 is the module."""

Parts = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Receiver:
    """One tool's form.

    Attributes:
        name: what tests call it.
        parts: from the rows and columns of a linear, dtype and shape of what is stored in its place, by ending.
        settings: from the float linears of the trunk, `quantization_config` of config.json.
        files: from the same, other files.
        floats: dtype of what is not quantised.
    """

    name: str
    parts: Callable[[int, int], Parts]
    settings: Callable[[list[str]], dict[str, Any]]
    files: Callable[[list[str]], Mapping[str, Any]] = field(default=lambda _: {})
    floats: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return self.name

    def write(self, root: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
        """A trunk in this form.

        Args:
            root: directory to make.
            config: of the model before it was quantised.
            tensors: its trunk, as floats.
        """
        kept = {n: t.to(self.floats) if t.dtype == torch.bfloat16 else t for n, t in tensors.items()}
        for name in filter(LINEAR.fullmatch, tensors):
            module, shape = name.removesuffix("weight"), kept.pop(name).shape
            kept |= {f"{module}{end}": _bytes(f"{module}{end}", *part) for end, part in self.parts(*shape).items()}
        listed = ["lm_head", *_float_linears(tensors)]
        changed = {**config, "quantization_config": self.settings(listed), "dtype": str(self.floats)[6:]}
        write_checkpoint(root, changed, kept, shards=2)
        for file, content in self.files(listed).items():
            (root / file).write_text(json.dumps(content, indent=4))
        return root


def _float_linears(tensors: Mapping[str, Tensor]) -> Iterable[str]:
    return (
        n.removesuffix(".weight") for n in tensors if "_attn.in_proj" in n or n.endswith("linear_attn.out_proj.weight")
    )


def _bytes(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Random bytes, the same ones for one name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def _compressed(kind: str, scheme: Mapping[str, Any]) -> Callable[[list[str]], dict[str, Any]]:
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": None, "output_activations": None}
    fixed = {
        "config_groups": {"group_0": {**group, "format": kind}},
        "format": kind,
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.17.0",
    }
    return lambda listed: {**fixed, "ignore": listed}


W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True, "dynamic": False}
F8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
F4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": GROUP, "symmetric": True}

PRODUCER = {"name": "modelopt", "version": "0.47.0"}


def _modelopt_file(algorithm: str, listed: list[str]) -> dict[str, Any]:
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": listed}
    return {"hf_quant_config.json": {"producer": PRODUCER, "quantization": quantization}}


def _modelopt(algorithm: str, bits: Mapping[str, Any]) -> Callable[[list[str]], dict[str, Any]]:
    one = {"dynamic": False, "type": "float", **bits}
    groups = {"group_0": {"input_activations": one, "weights": one, "targets": ["Linear"]}}
    fixed = {"config_groups": groups, "quant_algo": algorithm, "producer": PRODUCER, "quant_method": "modelopt"}
    return lambda listed: {**fixed, "ignore": listed}


GPTQ = {
    "bits": 4,
    "dynamic": None,
    "group_size": GROUP,
    "desc_act": False,
    "lm_head": False,
    "method": "gptq",
    "quant_method": "gptq",
    "format": "gptq",
    "checkpoint_format": "gptq",
    "pack_dtype": "int32",
    "meta": {"quantizer": ["gptqmodel:7.7.0"]},
    "sym": True,
}
AWQ = {"quant_method": "awq", "zero_point": True, "group_size": GROUP, "bits": 4, "version": "gemm"}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}

RECEIVERS = (
    Receiver(
        "compressed-w4a16",
        lambda rows, columns: {
            "weight_packed": (torch.int32, (rows, columns // 8)),
            "weight_scale": (torch.bfloat16, (rows, columns // GROUP)),
            "weight_shape": (torch.int64, (2,)),
        },
        _compressed("pack-quantized", W4),
    ),
    Receiver(
        "compressed-fp8",
        lambda rows, columns: {"weight": (E4M3, (rows, columns)), "weight_scale": (torch.bfloat16, (rows, 1))},
        _compressed("float-quantized", F8),
    ),
    Receiver(
        "compressed-nvfp4",
        lambda rows, columns: {
            "weight_packed": (torch.uint8, (rows, columns // 2)),
            "weight_scale": (E4M3, (rows, columns // GROUP)),
            "weight_global_scale": (torch.float32, (1,)),
            "input_global_scale": (torch.float32, (1,)),
        },
        _compressed("nvfp4-pack-quantized", F4),
    ),
    Receiver(
        "modelopt-nvfp4",
        lambda rows, columns: {
            "weight": (torch.uint8, (rows, columns // 2)),
            "weight_scale": (E4M3, (rows, columns // GROUP)),
            "weight_scale_2": (torch.float32, ()),
            "input_scale": (torch.float32, ()),
        },
        _modelopt("NVFP4", {"num_bits": 4, "group_size": GROUP}),
        lambda listed: _modelopt_file("NVFP4", listed),
    ),
    Receiver(
        "modelopt-fp8",
        lambda rows, columns: {
            "weight": (E4M3, (rows, columns)),
            "weight_scale": (torch.float32, ()),
            "input_scale": (torch.float32, ()),
        },
        _modelopt("FP8", {"num_bits": 8}),
        lambda listed: _modelopt_file("FP8", listed),
    ),
    Receiver(
        "gptq",
        lambda rows, columns: {
            "qweight": (torch.int32, (columns // 8, rows)),
            "qzeros": (torch.int32, (columns // GROUP, rows // 8)),
            "scales": (torch.float16, (columns // GROUP, rows)),
            "g_idx": (torch.int32, (columns,)),
        },
        lambda _: dict(GPTQ),
        lambda _: {"quantize_config.json": GPTQ},
    ),
    Receiver(
        "awq",
        lambda rows, columns: {
            "qweight": (torch.int32, (columns, rows // 8)),
            "qzeros": (torch.int32, (columns // GROUP, rows // 8)),
            "scales": (torch.float16, (columns // GROUP, rows)),
        },
        lambda _: {**AWQ, "modules_to_not_convert": None},
        floats=torch.float16,
    ),
    Receiver(
        "fp8-blocks",
        lambda rows, columns: {
            "weight": (E4M3, (rows, columns)),
            "weight_scale_inv": (torch.float32, (math.ceil(rows / 32), math.ceil(columns / 32))),
        },
        lambda listed: {**BLOCKS, "modules_to_not_convert": listed},
    ),
)
"""One a form, all without a head."""


def save_pretrained(
    source: Path, root: Path, *, architecture: str = "AutoModelForCausalLM", lora: bool = False
) -> Path:
    """What transformers writes of a checkpoint that it has loaded, or PEFT of one that it has merged an adapter into."""
    import transformers

    model: Any = getattr(transformers, architecture).from_pretrained(source, dtype=torch.bfloat16)
    if lora:
        import peft

        adapted: Any = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.5)
        model = adapted.merge_and_unload()
    model.save_pretrained(root)
    return root
