"""The records of a conformance case: what is run for a family, on what, and how close two sides must come.

A case is data. It names a tiny configuration, writes out by hand the names and shapes of the head's tensors, and says where
each stage of the head is found inside the engines' modules. How it is run is the same for every family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from mtp_zoo.spec import Engine

if TYPE_CHECKING:
    from torch import Tensor

    from mtp_zoo_conformance.flips import Flip
    from mtp_zoo_conformance.inputs import Requests

Dtype = Literal["float32", "bfloat16"]
Shapes = Mapping[str, tuple[int, ...]]
Outputs = Mapping[str, "Tensor"]
Finish = Callable[[str, "Tensor"], "Tensor"]

STAGES = ("embedding_norm", "hidden_norm", "fusion", "attention", "mlp", "output_norm", "recycle", "logits")
"""Stages of a head in the order of its data flow; a difference is reported at the first that shows it."""

TAP = "tap"
"""The target's state that is handed to the head; compared where both sides run the target."""


def in_bf16(name: str, value: Tensor) -> Tensor:
    """A tensor as most published ones are stored."""
    del name
    return value.bfloat16()


@dataclass(frozen=True)
class Tolerance:
    """How far two sides may lie apart.

    Attributes:
        name: what the tolerance is called in records.
        absolute: largest absolute difference of one entry.
        reason: why this number.
    """

    name: str
    absolute: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class Twin:
    """Another form of a checkpoint that computes the same, for an engine that can't run the checkpoint's own form on a CPU.

    It is made on the way into the engine and is seen by nobody else.

    Attributes:
        config: fields to set in config.json.
        without_fields: regular expressions of fields to leave out of it.
        without_tensors: regular expressions of tensors to leave out.
        words: what was done and what it leaves unjudged, for the record.
    """

    config: Mapping[str, Any]
    without_fields: tuple[str, ...]
    without_tensors: tuple[str, ...]
    words: str


@dataclass(frozen=True, kw_only=True)
class EngineView:
    """What a family looks like inside one engine.

    Attributes:
        draft_class: class name of the engine's draft module.
        stages: stage -> path of the engine's submodule whose output it is; `recycle` and `logits` need none.
        leftovers: regular expressions of parameters that the engine takes from the target after loading, so that the
            checkpoint's head does not fill them.
        twin: the form in which the engine reads the checkpoints; None for their own.
        unjudged: part of the head -> why this engine can't judge it on a CPU. Never a pass: its cell says `not_judged`.
    """

    draft_class: str
    stages: Mapping[str, str]
    leftovers: tuple[str, ...] = ()
    twin: Twin | None = None
    unjudged: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One tiny checkpoint of a family.

    Attributes:
        name: unique in its case.
        config: content of config.json.
        prefix: of the language model's tensor names.
        dtype: what both sides compute in.
        head_shapes: names and shapes of the head's tensors where this variant stores them in another form than its case says.
        not_run: engine -> why it can't run this variant (on a CPU, or at all). Never a pass: the cell says `not_judged`.
        drop: engine -> config fields (dotted) to drop on the way into it, each for a fault of the engine; the record says so.
        no_target: engine -> why its target can't run this variant; the head is judged, its tap is not.
        copies: name of a tensor of the head -> name of the target's tensor that it repeats.
    """

    name: str
    config: Mapping[str, Any]
    prefix: str = "model."
    dtype: Dtype = "float32"
    head_shapes: Callable[[Mapping[str, Any]], Shapes] | None = None
    not_run: Mapping[Engine, str] = field(default_factory=dict)
    drop: Mapping[Engine, tuple[str, ...]] = field(default_factory=dict)
    no_target: Mapping[Engine, str] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The language model's part of a flat or nested config."""
        return self.config.get("text_config", self.config)


@dataclass(frozen=True, kw_only=True)
class ConformanceCase:
    """Everything that a family is judged on.

    Attributes:
        family: name of the registered family.
        variants: the checkpoints; the first is also the one whose conventions are flipped and that is served.
        target_class: transformers class of the target.
        head_shapes: text config -> native names and shapes of the head's tensors, written by hand.
        norm_centre: the value about which the head's norm weights lie: 0 for zero-centred norms, 1 for direct ones.
        finish: (native name, random FP32 values) -> a tensor as it is stored, in its scale and dtype; all BF16 by default.
        reference: (tensors, text config, requests) -> outputs of the head in plain torch, under the conventions that the
            library trains with. What an engine does otherwise, the engine itself judges.
        engines: the engines that serve the family.
        stages: stage -> canonical path of our submodule, behind `depths.0.`.
        flips: wrong conventions, each of which must be caught.
        inventories: folders of published inventories (under MTP_ZOO_INVENTORIES) that the key map must claim whole.
        mtp_model: config fields that transformers' `MtpModel` asks for and published configs lack; None where it does not
            know the family.
        tap: where engines take the state that they hand to the head, in front of the target's final norm or behind it; written
            by hand, so that what the library says is judged.
        output_projections: canonical names (behind `depths.0.block.`) of the matrices that, set to zero, leave the block's
            input as it is; and the same names in the target's layers. They build a head whose every draft is right.
    """

    family: str
    variants: tuple[Variant, ...]
    target_class: str
    head_shapes: Callable[[Mapping[str, Any]], Shapes]
    norm_centre: float
    reference: Callable[[Outputs, Mapping[str, Any], Requests], Outputs]
    engines: Mapping[Engine, EngineView]
    stages: Mapping[str, str]
    flips: tuple[Flip, ...]
    output_projections: tuple[str, ...]
    inventories: tuple[str, ...] = ()
    tap: Literal["pre_norm", "post_norm"] = "post_norm"
    mtp_model: Mapping[str, Any] | None = None
    finish: Finish = in_bf16

    def shapes_of(self, variant: Variant) -> Shapes:
        """Native names and shapes of a variant's head."""
        return (variant.head_shapes or self.head_shapes)(variant.text_config)
