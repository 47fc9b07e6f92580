"""load_head: plan from headers, read the planned bytes, fill every tensor or fail.

    index (headers) -> resolve the family -> module on the meta device -> key map plan (all problems at once)
      -> allocate each head tensor once -> read each native tensor straight into its place

Nothing is read before the plan is whole, nothing in the head keeps an initial value unless that was asked for by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from mtp_zoo.checkpoint import CheckpointIndex, TensorEntry, TensorReader, stored_dtype, torch_dtype
from mtp_zoo.errors import HeadCountError, SettingsError, SharedTensorError
from mtp_zoo.head import DraftHead
from mtp_zoo.keymap import FLOAT_DTYPES, Binding, KeyMap, LoadPlan, Move
from mtp_zoo.progress import progress
from mtp_zoo.quantization import refuse_quantized
from mtp_zoo.registry import Family, Resolution, get_family, resolve, resolve_family
from mtp_zoo.shared import SharedTensors
from mtp_zoo.spec import Engine

Init: TypeAlias = Literal["checkpoint", "random"]


@dataclass(frozen=True)
class LoadedTensor:
    """One native tensor that was read."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str


@dataclass(frozen=True)
class LoadReport:
    """What `load_head` did; `print` shows it as a table.

    Attributes:
        source, family, depths: where from and what.
        tensors: every native tensor read.
        skipped: native names left alone, with the reason.
        initialised: head tensors that hold random values because that was asked for.
        notices: contradictions in the checkpoint that did not stop the load.
        bytes_read: bytes taken from disk, headers included.
    """

    source: str
    family: str
    depths: int
    tensors: tuple[LoadedTensor, ...]
    skipped: Mapping[str, str]
    initialised: tuple[str, ...]
    notices: tuple[str, ...]
    bytes_read: int

    @property
    def head_bytes(self) -> int:
        """Stored size of the head."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def __str__(self) -> str:
        from mtp_zoo.tables import render_table

        rows = [(t.name, t.dtype, "x".join(map(str, t.shape)), f"{t.nbytes:,}", t.file) for t in self.tensors]
        rows += [(name, "", "", "", "random, not read") for name in self.initialised]
        rows += [(name, "", "", "", f"skipped: {because}") for name, because in self.skipped.items()]
        title = (
            f"{self.family}, {self.depths} depth(s), {self.head_bytes:,} bytes of head, {self.bytes_read:,} bytes read"
        )
        table = render_table(title, ("tensor", "dtype", "shape", "bytes", "file"), rows, right=(2, 3))
        return "\n".join([table, *(f"notice: {notice}" for notice in self.notices)])


@dataclass(frozen=True)
class Origin:
    """What an export needs to know of where the head came from.

    Attributes:
        root: directory of the checkpoint.
        bindings: the stored layout.
        native_dtypes: stored dtype (safetensors' spelling) of every native tensor.
    """

    root: Path
    bindings: tuple[Binding, ...]
    native_dtypes: Mapping[str, str] = field(default_factory=dict)


def load_head(
    source: str | Path,
    *,
    target: Any = None,
    family: str | Family | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    init: Init = "checkpoint",
    depths: int | None = None,
    seed: int = 0,
    engine: Engine | None = None,
) -> DraftHead:
    """Load the head that a checkpoint ships.

    Args:
        source: checkpoint directory, hub-cache tree, or id of a cached repository.
        target: transformers model (or `SharedTensors`) whose embedding and lm_head the head borrows.
        family: family name, to skip the decision from the tensors.
        dtype: cast to this dtype; None keeps every tensor as stored. `torch.float32` gives master weights for training.
        device: where the head lives.
        init: "random" makes a new head instead of reading one, by transformers' rule, from `seed`.
        depths: number of depths of a new head; only with `init="random"`. None takes what the config declares, or 1.
        engine: the engine that will serve, where engines differ in a convention; None is the training default.

    Returns:
        The head; `head.report` says what was read.

    Raises:
        SettingsError: `init` or `dtype` is none of those above.
        CheckpointError: the files can't be read as a checkpoint.
        UnresolvedFamilyError, HeadNotFoundError, HeadCountError, HeadMismatchError: see `mtp_zoo.errors`.
        UnsupportedQuantizationError: the head is stored quantised.
    """
    _check_request(source, dtype, init, depths)
    index = CheckpointIndex.open(source)
    chosen = get_family(family) if isinstance(family, str) else family
    if init == "random":
        head = _new_head(index, chosen or resolve_family(index.names, index.config), depths, dtype, device, seed)
    else:
        head = _stored_head(index, resolve(index.names, index.config, family=chosen), dtype, device)
    head.engine = engine
    return head if target is None else head.attach(target)


def _check_request(source: str | Path, dtype: torch.dtype | None, init: str, depths: int | None) -> None:
    if init not in get_args(Init) or dtype not in (None, *map(torch_dtype, FLOAT_DTYPES)):
        raise SettingsError(
            f"Loading the head of {source}: expected init to be one of {get_args(Init)} and dtype to be a float dtype "
            f"or None, got {init!r} and {dtype}.",
            remedy='Leave both out to get what the checkpoint stores, or ask for init="random".',
        )
    if depths is not None and (init != "random" or depths < 1):
        raise HeadCountError(
            f'Loading the head of {source}: expected depths >= 1 with init="random" and none otherwise (the checkpoint '
            f"decides), got {depths} with init={init!r}.",
            remedy='Leave depths out, or ask for a new head with init="random".',
        )


def plan_head(index: CheckpointIndex, resolution: Resolution) -> tuple[DraftHead, LoadPlan]:
    """The head on the meta device, and what reading it takes; reads nothing.

    Raises:
        BrokenCheckpointError: a file that holds or should hold a tensor of the head can't be trusted.
        UnsupportedQuantizationError, HeadMismatchError: see `load_head`.
    """
    family = resolution.family
    index.check(family.in_scope)
    entries = index.require(resolution.names)
    refuse_quantized(entries, index.config, f"{family.name} head")
    head = DraftHead(family, index.config, depths=resolution.depths, device="meta")
    return head, key_map(head).plan(entries)


def key_map(head: DraftHead) -> KeyMap:
    """The family's rules, bound to this head's tensors."""
    shapes = {name: tuple(value.shape) for name, value in head.weights().items()}
    return KeyMap(head.family.rules, shapes, depths=head.num_depths, family=head.family.name)


def _stored_head(
    index: CheckpointIndex, resolution: Resolution, dtype: torch.dtype | None, device: torch.device | str
) -> DraftHead:
    head, plan = plan_head(index, resolution)
    reader = TensorReader(index)
    with progress("Reading the head", total=len(plan.natives)) as advance:
        for binding in plan.bindings:
            for name, value in _read_binding(binding, index, reader, dtype, device, advance).items():
                _assign(head, name, value)
    head.rotary.to(device)
    entries = [index.entries[name] for name in plan.natives]
    head.report = LoadReport(
        source=index.source,
        family=head.family.name,
        depths=head.num_depths,
        tensors=tuple(LoadedTensor(e.name, e.dtype, e.shape, e.nbytes, e.file) for e in entries),
        skipped=plan.skipped,
        initialised=(),
        notices=(*resolution.notices, *_notices(index, head.family)),
        bytes_read=index.header_bytes + reader.bytes_read,
    )
    head.origin = Origin(index.root, plan.bindings, plan.dtypes)
    return head


def _notices(index: CheckpointIndex, family: Family) -> list[str]:
    return [str(fault) for fault in index.faults if any(family.in_scope(name) for name in fault.tensors)]


def _read_binding(
    binding: Binding,
    index: CheckpointIndex,
    reader: TensorReader,
    dtype: torch.dtype | None,
    device: torch.device | str,
    advance: Callable[[], None],
) -> dict[str, Tensor]:
    """Head tensors of one rule. Each is allocated once; whole natives are read in place, parts through one buffer."""
    stored = torch_dtype(index.entries[next(iter(binding.natives))].dtype)
    filled = {name: torch.empty(shape, dtype=dtype or stored, device=device) for name, shape in binding.heads.items()}
    by_native: dict[str, list[Move]] = {}
    for move in binding.moves:
        by_native.setdefault(move.native, []).append(move)
    for native, moves in by_native.items():
        _read_native(index.entries[native], moves, filled, reader)
        advance()
    return filled


def _read_native(entry: TensorEntry, moves: list[Move], filled: Mapping[str, Tensor], reader: TensorReader) -> None:
    place = filled[moves[0].head][moves[0].head_index]
    in_place = not moves[0].native_index and place.is_contiguous() and place.device.type == "cpu"
    if in_place and stored_dtype(place.dtype) == entry.dtype:
        reader.read_into(entry, place)
        return
    native = reader.read(entry)
    for move in moves:
        filled[move.head][move.head_index] = native[move.native_index].to(place.device)


def _assign(head: DraftHead, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = head.get_submodule(path)
    if isinstance(getattr(module, leaf), nn.Parameter):
        setattr(module, leaf, nn.Parameter(value, requires_grad=value.is_floating_point()))
    else:
        setattr(module, leaf, value)


def _new_head(
    index: CheckpointIndex,
    family: Family,
    depths: int | None,
    dtype: torch.dtype | None,
    device: torch.device | str,
    seed: int,
) -> DraftHead:
    """A head with random weights; an export stores it in the dtype of most of the trunk."""
    declared = index.config.count(family.count_field) if family.count_field else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = DraftHead(family, index.config, depths=depths or declared or 1)
        head.factory.initialise(head)
    bindings = key_map(head).default_bindings()
    stored = _trunk_dtype(index)
    head.to(device=device, dtype=dtype or torch_dtype(stored))
    ignored = [name for name in index.entries if family.in_scope(name)]
    head.report = LoadReport(
        source=index.source,
        family=family.name,
        depths=head.num_depths,
        tensors=(),
        skipped=dict.fromkeys(ignored, 'init="random" was asked for'),
        initialised=tuple(head.weights()),
        notices=(),
        bytes_read=index.header_bytes,
    )
    head.origin = Origin(index.root, bindings, {name: stored for binding in bindings for name in binding.natives})
    return head


def _trunk_dtype(index: CheckpointIndex) -> str:
    """The float dtype that most of the checkpoint's bytes are stored in."""
    sizes: dict[str, int] = {}
    for entry in index.entries.values():
        if entry.dtype in ("BF16", "F16", "F32"):
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.nbytes
    return max(sizes, key=lambda name: sizes[name], default="BF16")


def load_shared(
    source: str | Path,
    *,
    family: str | Family | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> SharedTensors:
    """Read the embedding, the lm_head and the final norm of a checkpoint, for callers without the target in memory.

    Raises:
        CheckpointError: the files can't be read as a checkpoint, or one that holds a shared tensor is damaged.
        SharedTensorError: one of them is missing or misshapen, or the config says untied and there is no lm_head.
        UnsupportedQuantizationError: one of them is stored quantised.
    """
    index = CheckpointIndex.open(source)
    chosen = get_family(family) if isinstance(family, str) else (family or resolve_family(index.names, index.config))
    names = shared_names(index, chosen)
    wanted = dict.fromkeys(names.values())
    index.check(wanted.__contains__)
    entries = index.require(wanted)
    refuse_quantized(entries, index.config, "shared tensors")
    factory = chosen.block.build(index.config)
    _check_shared(index, names, factory.config.hidden_size)
    reader = TensorReader(index)
    tensors: dict[str, Tensor] = {}
    with progress("Reading the shared tensors", total=len(wanted)) as advance:
        for entry in entries:
            tensors[entry.name] = reader.read(entry).to(device=device, dtype=dtype)
            advance()
    norm = factory.norm()
    norm.weight = nn.Parameter(tensors[names["final_norm"]], requires_grad=False)
    embedding = nn.Embedding.from_pretrained(tensors[names["embedding"]])
    lm_head = embedding if names["lm_head"] == names["embedding"] else _projection(tensors[names["lm_head"]])
    return SharedTensors(embedding, lm_head, norm)


def _check_shared(index: CheckpointIndex, names: Mapping[str, str], hidden: int) -> None:
    found = {role: index.entries[name].shape for role, name in names.items()}
    matrix = (*found["embedding"][:1], hidden)
    expected = {"embedding": matrix, "lm_head": matrix, "final_norm": (hidden,)}
    wrong = [
        f"{names[role]}: expected {list(shape)}, found {list(found[role])}"
        for role, shape in expected.items()
        if found[role] != shape
    ]
    if wrong:
        raise SharedTensorError(
            f"Reading the shared tensors of {index.root}: their shapes are not those of one model.",
            remedy="Restore the tensors, and the config.json that belongs to them, from the original checkpoint.",
            problems=wrong,
        )


def _projection(weight: Tensor) -> nn.Module:
    with torch.device("meta"):
        module = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


def shared_names(index: CheckpointIndex, family: Family) -> dict[str, str]:
    """Names of `embedding`, `lm_head` and `final_norm` in this checkpoint; a tied lm_head has the embedding's name.

    A name counts as present where the index lists it, also if no file holds it: reading then says which file is at fault.

    Raises:
        SharedTensorError: see `load_shared`.
        ModelConfigError: the config contradicts itself on whether lm_head is tied.
    """
    target, present = family.target, index.names
    prefixes = [prefix for prefix in target.prefixes if prefix + target.embedding in present]
    if not prefixes:
        raise SharedTensorError(
            f"Looking for the embedding of {index.root}: none of "
            f"{[prefix + target.embedding for prefix in target.prefixes]} is on disk.",
            remedy="Point at the whole checkpoint, not at a directory that holds only the head.",
        )
    embedding, norm = prefixes[0] + target.embedding, prefixes[0] + target.final_norm
    lm_heads = [name for name in target.lm_head if name in present]
    if not lm_heads and not index.config.tied:
        raise SharedTensorError(
            f"Looking for the lm_head of {index.root}: config.json says tie_word_embeddings is false, and none of "
            f"{list(target.lm_head)} is on disk.",
            remedy="Restore the lm_head, or set tie_word_embeddings to true if the model was trained tied.",
        )
    if norm not in present:
        raise SharedTensorError(
            f"Looking for the final norm of {index.root}: '{norm}' is not on disk.",
            remedy="Restore the tensor from the original checkpoint.",
        )
    lm_head = embedding if index.config.tied or not lm_heads else lm_heads[0]
    return {"embedding": embedding, "lm_head": lm_head, "final_norm": norm}
