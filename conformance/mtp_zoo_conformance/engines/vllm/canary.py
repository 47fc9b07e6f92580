"""Finds parameters that a checkpoint left unfilled.

vLLM's own check exempts linear layers, experts, embeddings and the output matrix, and counts a fused parameter as loaded
once one of its parts is (vllm/model_executor/model_loader/default_loader.py, 0.32.0). A forgotten `q_proj` would run on
uninitialised memory. So every parameter is NaN before vLLM's own load, and what still has a NaN after it was not filled.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.model_loader.default_loader import DefaultModelLoader


class Canary:
    """Watches every load of this process from its making on.

    Attributes:
        unfilled: class name of the loaded model -> names of its parameters that have a NaN left.
        parameters: class name of the loaded model -> how many numbers it holds. vLLM empties some after the load.
    """

    def __init__(self) -> None:
        self.unfilled: dict[str, list[str]] = {}
        self.parameters: dict[str, int] = {}
        load = DefaultModelLoader.load_weights

        def load_weights(loader: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
            for parameter in parameters.values():
                parameter.data.fill_(float("nan"))
            result = load(loader, model, *args, **kwargs)
            self.parameters[type(model).__name__] = sum(parameter.numel() for parameter in model.parameters())
            self.unfilled[type(model).__name__] = sorted(
                n for n, p in parameters.items() if p.data.float().isnan().any()
            )
            return result

        DefaultModelLoader.load_weights = load_weights
