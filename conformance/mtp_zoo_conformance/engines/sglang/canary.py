"""Finds parameters that a checkpoint left unfilled.

SGLang's loaders skip keys that are missing or misnamed with a warning at most (sglang/srt/models/qwen3_5_mtp.py, 0.5.23). So
every parameter is NaN before SGLang's own load, and what still has a NaN behind it was not filled. Some are expected: a
draft takes the target's embedding and output matrix after its load.

The file named by the environment variable `LOG` gets a line for each model, in the order of their loads: the target, then
the draft. Processes that SGLang spawns inherit it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

LOG = "MTP_ZOO_CANARY_LOG"
LOADER = "sglang.srt.model_loader.loader"


@dataclass(frozen=True)
class Load:
    """One load of a model.

    Attributes:
        model: its class.
        parameters: number of entries.
        unfilled: names of parameters that have a NaN left.
    """

    model: str
    parameters: int
    unfilled: list[str]


def watch(loader_module: Any) -> None:
    """Wrap the load of SGLang's default loader; does nothing while `LOG` is not set."""
    cls = loader_module.DefaultModelLoader
    load = cls.load_weights_only

    def load_weights_only(model: Any, *args: Any, **kwargs: Any) -> Any:
        path = os.environ.get(LOG)
        if path is None:
            return load(model, *args, **kwargs)
        parameters = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.fill_(float("nan"))
        result = load(model, *args, **kwargs)
        unfilled = sorted(name for name, p in parameters.items() if bool(p.detach().float().isnan().any()))
        found = Load(type(model).__name__, sum(p.numel() for p in model.parameters()), unfilled)
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(vars(found)) + "\n")
        return result

    cls.load_weights_only = staticmethod(load_weights_only)


def loads(path: str | os.PathLike[str]) -> list[Load]:
    """What was loaded, in order."""
    file = Path(path)
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [Load(**json.loads(line)) for line in lines]
