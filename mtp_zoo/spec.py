"""HeadSpec: the conventions of a draft head that tensor shapes cannot show.

Two heads that differ only in one of these fields load from the same file without complaint; the wrong one merely drafts
badly. So no field has a default: the author of a family decides each one, and names the source in the family's docstring.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Generic, Literal, TypeVar, get_args

from mtp_zoo.arguments import TEXT, check_fields, instance, one_of, tuple_of
from mtp_zoo.errors import FamilyDefinitionError

Engine = Literal["vllm", "sglang"]
FuseOrder = Literal["embed_hidden", "hidden_embed", "sum"]
NormWeight = Literal["direct", "zero_centered"]
HiddenTap = Literal["post_norm", "pre_norm", "streams"]
Recycle = Literal["post_norm", "pre_norm", "streams"]
DepthPolicy = Literal["recycled", "distinct"]
PositionRule = Literal["hidden", "token", "constant"]
PrivateTensor = Literal["ignored", "kept", "absent"]

T = TypeVar("T")


@dataclass(frozen=True)
class PerEngine(Generic[T]):
    """A convention on which the serving engines may differ.

    `train` is what the library trains with unless the operator names the engine that will serve.
    """

    vllm: T
    sglang: T
    train: T

    @classmethod
    def same(cls, value: T) -> PerEngine[T]:
        """Both engines and training agree on `value`."""
        return cls(vllm=value, sglang=value, train=value)

    def of(self, engine: Engine | None) -> T:
        """The value under `engine`, or the training value for None."""
        return self.train if engine is None else getattr(self, engine)

    def describe(self) -> T | dict[str, T]:
        """`value` where all agree, else a mapping by engine (for `--json` output)."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return self.train if len(set(values.values())) == 1 else values


LITERALS = {
    "fuse_order": FuseOrder,
    "norm_weight": NormWeight,
    "hidden_tap": HiddenTap,
    "depth_policy": DepthPolicy,
    "position_rule": PositionRule,
    "private_embedding": PrivateTensor,
    "private_head": PrivateTensor,
}
PER_ENGINE = {"recycle": get_args(Recycle), "zero_first_embedding": (False, True)}


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """How a family's head is wired.

    Attributes:
        fuse_order: what `eh_proj` multiplies: [embedding, hidden], [hidden, embedding] concatenated, or their sum.
        norm_weight: whether an RMSNorm gains by its weight or by one plus its weight.
        hidden_tap: which target state enters depth 1: after the final norm, before it, or several residual streams.
        recycle: which state depth k hands to depth k+1.
        depth_policy: `recycled` (one block, applied k times over one cache) or `distinct` (a block and a cache a depth).
        position_rule: RoPE position of the slot that reads hidden state t and token t+1: `hidden` (t), `token` (t+1) or
            `constant` (not advanced while drafting).
        zero_first_embedding: whether the embedding input of position 0 is zeroed.
        private_embedding: what engines do with an embedding stored inside the head.
        private_head: what engines do with an lm_head stored inside the head.
        always_float: canonical head names (suffixes) that are never stored quantised: an export into an FP8 base writes
            them as floats.

    Raises:
        FamilyDefinitionError: a field holds a value outside its literal set.
    """

    fuse_order: FuseOrder
    norm_weight: NormWeight
    hidden_tap: HiddenTap
    recycle: PerEngine[Recycle]
    depth_policy: DepthPolicy
    position_rule: PositionRule
    zero_first_embedding: PerEngine[bool]
    private_embedding: PrivateTensor
    private_head: PrivateTensor
    always_float: tuple[str, ...]

    def __post_init__(self) -> None:
        check_fields(
            self,
            FamilyDefinitionError,
            recycle=instance("a PerEngine", PerEngine),
            zero_first_embedding=instance("a PerEngine", PerEngine),
            always_float=tuple_of(TEXT),
        )
        wrong = [
            f"{name}: expected one of {allowed}, got {value!r}"
            for name, value, allowed in self._stated()
            if not one_of(*allowed).accepts(value)
        ]
        if wrong:
            raise FamilyDefinitionError(
                "HeadSpec holds values outside their sets.", remedy="Use one of the listed values.", problems=wrong
            )

    def describe(self) -> dict[str, Any]:
        """Every convention by name; where engines differ, a mapping by engine (for `--json` output and provenance)."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: value.describe()
            if isinstance(value, PerEngine)
            else list(value)
            if isinstance(value, tuple)
            else value
            for name, value in values.items()
        }

    def _stated(self) -> Iterator[tuple[str, object, tuple[object, ...]]]:
        """Every convention with its value and the values that exist, engine by engine where engines may differ."""
        for name, kind in LITERALS.items():
            yield name, getattr(self, name), get_args(kind)
        for name, allowed in PER_ENGINE.items():
            for reader in fields(PerEngine):
                yield f"{name}.{reader.name}", getattr(getattr(self, name), reader.name), allowed
