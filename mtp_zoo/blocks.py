"""Trainable blocks: transformers' own decoder layers, built from the target's config.

The library writes no attention and no MLP of its own. A family names the classes (`BlockSource`); this file builds one
layer of the right kind from the checkpoint's config and calls it the same way in every supported transformers release.
Importing this file loads neither torch nor transformers.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from mtp_zoo.errors import ModelConfigError
from mtp_zoo.modelconfig import ModelConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

ATTENTION = "mtp_chain"
"""Name under which `chain_attention` is registered with transformers."""

EXPERTS = "grouped_mm"
"""transformers' experts in one grouped product for all of them, without a loop in Python; layers without experts ignore it."""

NOT_FOR_THE_BLOCK = ("quantization_config", "architectures", "torch_dtype", "dtype", "layer_types", "num_hidden_layers")
"""Config entries that describe the trunk or its storage; the block is a plain trainable layer of one type."""


@dataclass(frozen=True, kw_only=True)
class BlockSource:
    """Where a family's block comes from.

    Attributes:
        module: transformers model folder (`transformers.models.<module>`).
        config, layer, norm, rotary, pretrained: class names in it.
        layer_type: entry of `layer_types` that the block has, whatever the trunk's layers are; None where the family's
            layers are of one type.
        fixed: config entries that the block has whatever the trunk's first layer is (a sparse MLP, an indexer of its own).
        corrections: what to set right in a layer, see `mtp_zoo.corrections`.
        context_field: config field that says up to which context the block's attention is exact; None: it always is.
    """

    module: str
    config: str
    layer: str
    norm: str
    rotary: str
    pretrained: str
    layer_type: str | None
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    corrections: tuple[Callable[[Any, Any], None], ...] = ()
    context_field: str | None = None

    def load_class(self, name: str, kind: str = "modeling") -> Any:
        """The class `name` of transformers.models.<module>.<kind>_<module>."""
        return getattr(importlib.import_module(f"transformers.models.{self.module}.{kind}_{self.module}"), name)

    def build_config(self, config: ModelConfig) -> Any:
        """The transformers config under which `layer(config, 0)` is the family's block.

        Raises:
            ModelConfigError: RoPE settings are missing or contradict each other, a size is impossible, or transformers
                refuses a value.
        """
        config.refuse_impossible_sizes()
        text = {key: value for key, value in config.text.items() if key not in NOT_FOR_THE_BLOCK}
        text["rope_parameters"] = _rope_parameters(text, self.layer_type, config)
        text.pop("rope_scaling", None)
        made = self.load_class(self.config, "configuration")
        with _config_errors(config):
            built = made(**{**text, **self._of_one_layer()})
        built._attn_implementation = ATTENTION
        built._experts_implementation = EXPERTS
        return built

    def _of_one_layer(self) -> dict[str, Any]:
        types = {} if self.layer_type is None else {"layer_types": [self.layer_type]}
        return {"num_hidden_layers": 1, **types, **self.fixed}

    def build(self, config: ModelConfig) -> BlockFactory:
        """What makes this family's layers and norms for one checkpoint.

        Raises:
            ModelConfigError: see `build_config`; also where a layer can't be made from the config.
        """
        import torch

        factory = BlockFactory(self, self.build_config(config))
        with _config_errors(config), torch.device("meta"):
            factory.layer()
            factory.rotary()
        return factory


@contextmanager
def _config_errors(config: ModelConfig) -> Generator[None, None, None]:
    """Whatever transformers raises about a config, in words that name the file."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (ArithmeticError, LookupError, RuntimeError, StrictDataclassError, TypeError, ValueError) as error:
        raise ModelConfigError(
            f"Building the block of {config.path}: transformers refuses the config ({type(error).__name__}: {error}).",
            remedy="Correct the named field in config.json.",
        ) from error


@dataclass(frozen=True)
class BlockFactory:
    """Makes the modules of one head. Modules come out uninitialised where they are made on the meta device.

    Attributes:
        source: the class names.
        config: the block's transformers config.
    """

    source: BlockSource
    config: Any

    def layer(self) -> nn.Module:
        """One decoder layer."""
        layer = self.source.load_class(self.source.layer)(self.config, 0)
        for correct in self.source.corrections:
            correct(layer, self.config)
        return layer

    @cached_property
    def context_limit(self) -> int | None:
        """Longest context, in tokens, for which the layer's attention is what engines serve; None: any."""
        return None if self.source.context_field is None else getattr(self.config, self.source.context_field)

    @cached_property
    def float_names(self) -> tuple[str, ...]:
        """Ends of tensor names that transformers keeps in FP32 when it casts the model (routers of sigmoid scores)."""
        kept = self.source.load_class(self.source.pretrained)._keep_in_fp32_modules_strict
        return tuple(f".{name}" for name in sorted(kept or ()))

    def norm(self) -> nn.Module:
        """One RMSNorm over the hidden size, of the family's weight convention."""
        return self.source.load_class(self.source.norm)(self.config.hidden_size, eps=self.config.rms_norm_eps)

    def rotary(self) -> nn.Module:
        """The rotary embedding, on the CPU; its frequencies stay FP32 whatever the head is cast to."""
        import torch

        from mtp_zoo.rotary import FloatRotary

        with torch.device("cpu"):  # frequencies are computed, not loaded: made on the meta device they would be lost
            return FloatRotary(self.source.load_class(self.source.rotary)(self.config))

    def initialise(self, module: nn.Module) -> None:
        """Random weights by transformers' own rule for this model."""
        import torch

        pretrained = self.source.load_class(self.source.pretrained)
        stub = pretrained.__new__(pretrained)
        torch.nn.Module.__init__(stub)
        stub.config = self.config
        with torch.no_grad():
            for part in module.modules():
                pretrained._init_weights(stub, part)

    @cached_property
    def cache_keyword(self) -> str:
        """How the layer calls its KV cache: `cache`, or `past_key_values` before transformers 5.20."""
        names = inspect.signature(inspect.unwrap(self.source.load_class(self.source.layer).forward)).parameters
        return "cache" if "cache" in names else "past_key_values"

    def run(
        self,
        layer: nn.Module,
        hidden: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        position_ids: torch.Tensor,
        *,
        cache: object = None,
        mask: torch.Tensor | None = None,
        **attention: object,
    ) -> torch.Tensor:
        """Run one layer on [batch, seq, hidden]; `attention` reaches the registered attention function."""
        extra = {} if cache is None else {self.cache_keyword: cache}
        if mask is None and self.context_limit is not None:
            mask = hidden.new_zeros(
                1, 1, 1, 1
            )  # sparse layers cut their indexer's part out of the mask before they call it
        out = layer(
            hidden,
            position_embeddings=position_embeddings,
            position_ids=position_ids,
            attention_mask=mask,
            **extra,
            **attention,
        )
        return out[0] if isinstance(out, tuple) else out


def _rope_parameters(text: Mapping[str, Any], layer_type: str | None, config: ModelConfig) -> dict[str, Any]:
    """RoPE settings from wherever config.json keeps them: rope_parameters (plain or by layer type), its older name
    rope_scaling, or top-level fields. Places that disagree are an error: readers differ in which one they take.

    A missing base frequency is an error too: transformers would take 10,000, and every position would be wrong.
    """
    rope: dict[str, Any] = {}
    for place, settings in _rope_places(text, layer_type).items():
        if not isinstance(settings, dict):
            raise _rope_error(config, f"expected {place} to be an object, got {settings!r}")
        for key, value in cast("dict[str, Any]", settings).items():
            key = "rope_type" if key == "type" else key
            if value is not None and rope.setdefault(key, value) != value:
                raise _rope_error(config, f"{key} is {rope[key]!r} in one place and {value!r} in {place}")
    theta = rope.get("rope_theta")
    if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not 0 < theta < float("inf"):
        raise _rope_error(config, f"expected rope_theta > 0 in rope_parameters or beside it, got {theta!r}")
    part = rope.get("partial_rotary_factor", 1.0)
    if isinstance(part, bool) or not isinstance(part, (int, float)) or not 0 < part <= 1:
        raise _rope_error(config, f"expected 0 < partial_rotary_factor <= 1, got {part!r}")
    return {"rope_type": "default", **copy.deepcopy(rope)}


def _rope_places(text: Mapping[str, Any], layer_type: str | None) -> dict[str, Any]:
    beside = {key: text[key] for key in ("rope_theta", "partial_rotary_factor") if key in text}
    given = {place: text[place] for place in ("rope_parameters", "rope_scaling") if text.get(place) is not None}
    inner = {
        place: settings.get(layer_type, settings) if isinstance(settings, dict) and layer_type else settings
        for place, settings in given.items()
    }
    return {**inner, "the config itself": beside}


def _rope_error(config: ModelConfig, found: str) -> ModelConfigError:
    return ModelConfigError(
        f"Building the block of {config.path}: {found}.",
        remedy="Give the RoPE settings that the model was trained with, in one place.",
    )
