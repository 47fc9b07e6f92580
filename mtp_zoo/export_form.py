"""How each tensor of a head is stored in the checkpoint that it is exported into: as floats, or in the base's FP8 form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mtp_zoo.checkpoint import CheckpointIndex, stored_dtype, torch_dtype
from mtp_zoo.errors import ExportError, UnsupportedQuantizationError
from mtp_zoo.keymap import FLOAT_DTYPES, Binding, Skip, claims
from mtp_zoo.quantization import QuantizedTensor, pair, scheme_name
from mtp_zoo.scaling import scaled_name
from mtp_zoo.site import HeadSite

if TYPE_CHECKING:
    from mtp_zoo.head import DraftHead


@dataclass(frozen=True, slots=True)
class HeadTensor:
    """One tensor of the new head, as it will be stored."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class HeadForm:
    """The new head, as it will be stored.

    Attributes:
        tensors: in the order of their bytes; a scale behind its tensor.
        quantized: the base's tensors whose FP8 form the head takes, by name.
    """

    tensors: tuple[HeadTensor, ...]
    quantized: Mapping[str, QuantizedTensor]

    @property
    def floats(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that is stored as floats."""
        scales = {tensor.scale.name for tensor in self.quantized.values()}
        return {t.name: t.shape for t in self.tensors if t.name not in self.quantized and t.name not in scales}


def is_left_alone(site: HeadSite, name: str) -> bool:
    """Whether the family leaves a tensor in its scope where it is, or the tensor that `name` is the scale of."""
    skips = [rule for rule in site.family.rules if isinstance(rule, Skip)]
    return any(claims(rule, one) for one in {name, scaled_name(name) or name} for rule in skips)


def quantized_base(index: CheckpointIndex, site: HeadSite, dtype: torch.dtype | None) -> Mapping[str, QuantizedTensor]:
    """The FP8 tensors of the base's own head; none where the new head is stored as `dtype`.

    Raises:
        UnsupportedQuantizationError: the head is quantised in another form.
        ScaleMismatchError: tensors and scales do not belong together.
    """
    if dtype is not None:
        return {}
    old = [e for name, e in index.entries.items() if site.in_scope(name) and not is_left_alone(site, name)]
    try:
        return pair(old, index.config, "head to be replaced").quantized
    except UnsupportedQuantizationError as error:
        raise UnsupportedQuantizationError(
            f"Exporting into {index.root}: its own head is stored as {scheme_name(index.config)}, which can't be written.",
            remedy="Store the head as floats (dtype=torch.bfloat16), or export into the BF16 release of the same model.",
            problems=error.problems,
        ) from error


def head_form(
    head: DraftHead,
    bindings: Sequence[Binding],
    index: CheckpointIndex,
    quantized: Mapping[str, QuantizedTensor],
    dtype: torch.dtype | None,
) -> HeadForm:
    """The form of every native tensor: `dtype` if given, else the base's, else that of the head's own checkpoint.

    What the spec calls always float is never stored as FP8; what must not be rounded keeps its dtype.

    Raises:
        ExportError: `dtype` is no float dtype, or a quantised tensor of the base has another shape than the head's.
    """
    if dtype is not None and stored_dtype(dtype) not in FLOAT_DTYPES:
        raise ExportError(
            f"Exporting as {dtype}: expected one of {FLOAT_DTYPES}.", remedy="Name a float dtype, or none."
        )
    always = head.spec.always_float
    taken = {
        name: quantized[name]
        for binding in bindings
        if not any(part.endswith(always) for part in binding.heads)
        for name in binding.natives
        if name in quantized
    }
    _refuse_misshapen(bindings, taken)
    return HeadForm(tuple(_tensors(head, bindings, index, taken, dtype)), taken)


def _refuse_misshapen(bindings: Sequence[Binding], taken: Mapping[str, QuantizedTensor]) -> None:
    needed = {name: shape for binding in bindings for name, shape in binding.natives.items()}
    wrong = [
        f"{name} in {tensor.weight.file}: the head has {list(needed[name])}, the base {list(tensor.shape)}"
        for name, tensor in taken.items()
        if needed[name] != tensor.shape
    ]
    if wrong:
        raise ExportError(
            "Storing the head in the base's FP8 form: its tensors have other shapes than the base's.",
            remedy="Restore the base from the original checkpoint, or store the head as floats (dtype=torch.bfloat16).",
            problems=wrong,
        )


def _tensors(
    head: DraftHead,
    bindings: Sequence[Binding],
    index: CheckpointIndex,
    taken: Mapping[str, QuantizedTensor],
    dtype: torch.dtype | None,
) -> Iterator[HeadTensor]:
    for binding in bindings:
        part = next(iter(binding.heads))
        for name, shape in binding.natives.items():
            if name in taken:
                for entry in (taken[name].weight, taken[name].scale):
                    yield HeadTensor(entry.name, entry.dtype, entry.shape, entry.nbytes)
                continue
            own = index.entries.get(name)
            brought = head.origin.dtypes[part]
            found = own.dtype if own and own.dtype in FLOAT_DTYPES else brought
            stored = stored_dtype(dtype) if dtype and head.rounds(part) else found
            if not head.rounds(part):  # never lower than it was stored anywhere, nor than what is asked for
                widest = torch.promote_types(torch_dtype(stored), torch_dtype(brought))
                wider = dtype is not None and dtype.itemsize > widest.itemsize
                stored = stored_dtype(dtype if dtype is not None and wider else widest)
            yield HeadTensor(name, stored, shape, torch_dtype(stored).itemsize * torch.Size(shape).numel())
