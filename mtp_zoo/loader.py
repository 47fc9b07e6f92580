"""load_head: plan from headers, read the planned bytes, fill every tensor or fail.

    index (headers) -> resolve the family -> module on the meta device -> key map plan (all problems at once)
      -> allocate each head tensor once, or this rank's rows of it -> read what fills them, straight into its place

Nothing is read before the plan is whole, nothing in the head keeps an initial value unless that was asked for by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from mtp_zoo.arguments import (
    DEVICE,
    FLOAT_DTYPE,
    INTEGER,
    PATH,
    TARGET,
    TEXT,
    checked,
    either,
    having,
    instance,
    one_of,
    optional,
    refuse,
    some_of,
    whole,
)
from mtp_zoo.checkpoint import CheckpointIndex, TensorReader, stored_dtype, torch_dtype
from mtp_zoo.copies import compare_copies
from mtp_zoo.errors import HeadCountError, SettingsError
from mtp_zoo.groups import GROUPS, Group
from mtp_zoo.head import DraftHead
from mtp_zoo.head_parts import Stored, entries_of, plan_reads, run_read
from mtp_zoo.keymap import Binding, KeyMap, LoadPlan
from mtp_zoo.load_report import LoadedTensor, LoadReport, Origin
from mtp_zoo.parallel import own_rows, own_values, shard_head
from mtp_zoo.progress import progress
from mtp_zoo.quant_ignore import HeadModules, quantized_by
from mtp_zoo.quantization import Paired, pair, quantization_settings
from mtp_zoo.rank_line import line_of
from mtp_zoo.registry import Family, Resolution, get_family, needed_by_head, resolve, resolve_family
from mtp_zoo.shared import SharedTensors
from mtp_zoo.site import HeadSite, find_site
from mtp_zoo.spec import Engine
from mtp_zoo.trained_head import fill_trained, training_checkpoint

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Init: TypeAlias = Literal["checkpoint", "random"]


@checked(
    "Loading a head",
    error=SettingsError,
    source=PATH,
    target=optional(either(instance("SharedTensors", SharedTensors), TARGET)),
    family=optional(either(TEXT, instance("a Family", Family))),
    dtype=optional(FLOAT_DTYPE),
    device=optional(DEVICE),
    init=one_of(*get_args(Init)),
    depths=optional(INTEGER),
    seed=whole(least=0, most=2**64 - 1),
    engine=optional(one_of(*get_args(Engine))),
    trainable=some_of(GROUPS),
    revision=optional(TEXT),
    mesh=optional(having("a DeviceMesh", "device_type")),
)
def load_head(
    source: str | Path,
    *,
    target: Any = None,
    family: str | Family | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    init: Init = "checkpoint",
    depths: int | None = None,
    seed: int = 0,
    engine: Engine | None = None,
    trainable: Collection[Group] = GROUPS,
    revision: str | None = None,
    mesh: DeviceMesh | None = None,
    mp_policy: Any = None,
) -> DraftHead:
    """Load the head that a checkpoint ships, or this rank's part of it.

    Args:
        source: checkpoint directory, hub-cache tree, or repository id. Of a repository that is not on this machine, headers
            and the head's bytes are read, and nothing else. Of a training checkpoint (`checkpoints/step-000100` of a run),
            the head of its base is filled with what was trained, in FP32 where no dtype is given.
        target: transformers model (or `SharedTensors`) whose embedding and lm_head the head borrows.
        family: family name, to skip the decision from the tensors.
        dtype: cast to this dtype; None keeps every tensor as stored, and decodes FP8 to BF16. `torch.float32` gives master
            weights for training.
            Tensors that must not be rounded (`DraftHead.rounds`), such as a router's FP32 bias, are cast upwards only.
        device: where the head lives: the CPU where not given, or the device of the mesh.
        init: "random" makes a new head instead of reading one, by transformers' rule, from `seed`.
        depths: number of depths of a new head; only with `init="random"`. None takes what the config declares, or 1.
        engine: the engine that will serve, where engines differ in a convention; None is the training default.
        trainable: groups of tensors that take gradients, see `DraftHead.train_only`.
        revision: branch, tag or commit of a repository; its main branch where not given.
        mesh: shard the head over these ranks, all of which must make the same call. Each reads the rows that it will hold, and
            gets what `shard_head(load_head(...), mesh)` would give it.
        mp_policy: see `shard_head`; only with a mesh.

    Returns:
        The head; `head.report` says what was read.

    Raises:
        SettingsError: an argument is none of those above.
        ParallelError: the head can't be sharded, or another rank ended. Where one rank fails, all raise, with its number.
        CheckpointError: the files can't be read as a checkpoint.
        UnresolvedFamilyError, HeadNotFoundError, HeadCountError, HeadLayerError, HeadMismatchError: see `mtp_zoo.errors`.
        UnsupportedQuantizationError: the head is stored quantised, and not as FP8.
        ScaleMismatchError: the head is stored as FP8, and tensors and scales do not belong together.
    """
    _check_request(source, init, depths, device, mesh, mp_policy)
    trained = training_checkpoint(source) if init == "checkpoint" else None
    if trained is not None:
        sharded = ["mesh: expected none with a training checkpoint; shard_head the head that comes back"]
        refuse("Loading a head", sharded if mesh is not None else [], SettingsError)
        engine = engine or trained["engine"]
        head = load_head(
            trained["base"], family=trained["family"], dtype=dtype or torch.float32, device=device, engine=engine,
            target=target, trainable=trainable, revision=revision,
        )  # fmt: skip
        return fill_trained(head, source)
    chosen = get_family(family) if isinstance(family, str) else family
    device = device or ("cpu" if mesh is None else mesh.device_type)
    if init == "random":
        index = CheckpointIndex.open(source, revision=revision)
        found = chosen or resolve_family(index.names, index.config)
        head = _new_head(index, found, depths, dtype, device, seed)
        head.train_only(trainable)
        head = head if mesh is None else shard_head(head, mesh, mp_policy=mp_policy)
    else:
        head = _stored_head(source, revision, chosen, dtype, device, mesh, mp_policy)
        head.train_only(trainable)
    head.engine = engine
    return head if target is None else head.attach(target)


def _check_request(
    source: str | Path,
    init: str,
    depths: int | None,
    device: torch.device | str | None,
    mesh: DeviceMesh | None,
    mp_policy: Any,
) -> None:
    wrong: list[str] = []
    if mesh is None and mp_policy is not None:
        wrong.append("mp_policy: expected a mesh beside it, got none")
    if mesh is not None and device is not None and torch.device(device).type != mesh.device_type:
        wrong.append(f"device: expected that of the mesh, {mesh.device_type}, got {device!r}")
    if wrong:
        raise SettingsError(
            f"Loading the head of {source}: it can't be done as asked.",
            remedy="Leave out what you do not need: by default the head comes as the checkpoint stores it.",
            problems=wrong,
        )
    if depths is not None and (init != "random" or depths < 1):
        raise HeadCountError(
            f'Loading the head of {source}: expected depths >= 1 with init="random" and none otherwise (the checkpoint '
            f"decides), got {depths} with init={init!r}.",
            remedy='Leave depths out, or ask for a new head with init="random".',
        )


def plan_head(index: CheckpointIndex, resolution: Resolution) -> tuple[DraftHead, LoadPlan, Paired]:
    """The head on the meta device, what reading it takes, and the stored tensors; reads nothing.

    Raises:
        BrokenCheckpointError: a file that holds or should hold a tensor of the head can't be trusted.
        UnsupportedQuantizationError, ScaleMismatchError, HeadMismatchError: see `load_head`.
    """
    family, site = resolution.family, resolution.site
    index.check(site.in_scope)
    stored = pair(index.require(resolution.names), index.config, f"{family.name} head")
    head = DraftHead(family, index.config, depths=resolution.depths, first_layer=site.first_layer, device="meta")
    return head, key_map(head).plan(stored.logical), stored


def ignore_notices(index: CheckpointIndex, site: HeadSite, plan: LoadPlan, stored: Paired) -> list[str]:
    """Modules that are stored as floats although the config would have an engine build them quantised, in words."""
    floats = [(entry.name, entry.shape) for entry in stored.plain if entry.name in plan.dtypes]
    modules = HeadModules.of(site, floats, whole=not stored.quantized)
    found = quantized_by(quantization_settings(index.config), modules)
    names = dict.fromkeys(name for engine in found for name in found[engine])
    engines = " and ".join(engine for engine in found if found[engine])
    told = f"the config has {engines} build these quantised, and they are stored as floats: {', '.join(names)}"
    return [f"ignore list incomplete: {told}"] if names else []


def key_map(head: DraftHead, site: HeadSite | None = None) -> KeyMap:
    """The family's rules, bound to this head's tensors, at the head's own place or at `site` in another checkpoint."""
    shapes = {name: tuple(value.shape) for name, value in head.weights().items()}
    first_layer = (site or head.site).first_layer
    return KeyMap(head.family.rules, shapes, depths=head.num_depths, first_layer=first_layer, family=head.family.name)


def _stored_head(
    source: str | Path,
    revision: str | None,
    family: Family | None,
    dtype: torch.dtype | None,
    device: torch.device | str,
    mesh: DeviceMesh | None,
    mp_policy: Any,
) -> DraftHead:
    act = f"Loading the head of {source}"
    with line_of(mesh) as ranks:
        with ranks.together(act):
            index = CheckpointIndex.open(source, revision=revision, need=partial(needed_by_head, family=family))
            resolution = resolve(index.names, index.config, family=family)
            head, plan, stored = plan_head(index, resolution)
            tensors: dict[str, Stored] = {entry.name: entry for entry in stored.plain} | dict(stored.quantized)
            allocate = partial(_allocate, head, tensors, dtype, device)
            if mesh is not None:
                for binding in plan.bindings:
                    _allocate(head, tensors, dtype, "meta", binding)
                shard_head(head, mesh, mp_policy=mp_policy).to_empty(device=device)
                allocate = None
            head.rotary.to(device)
        reader = TensorReader(index)
        with ranks.together(act):
            _fill(head, plan, tensors, reader, allocate)
            copies = compare_copies(index, head.site, plan.skipped, reader) if ranks.is_first else {}
        copies = ranks.tell(copies)
    entries = [entry for name in plan.natives for entry in entries_of(tensors[name])]
    head.report = LoadReport(
        source=index.source,
        family=head.family.name,
        depths=head.num_depths,
        tensors=tuple(LoadedTensor(e.name, e.dtype, e.shape, e.nbytes, e.file) for e in entries),
        skipped=plan.skipped,
        copies=copies,
        initialised=(),
        notices=(
            *index.storage.notices,
            *resolution.notices,
            *ignore_notices(index, head.site, plan, stored),
            *_notices(index, head.site),
        ),
        bytes_read=index.header_bytes + reader.bytes_read,
        bytes_moved=index.storage.bytes_moved,
    )
    dtypes = {name: plan.dtypes[next(iter(binding.natives))] for binding in plan.bindings for name in binding.heads}
    head.origin = Origin(index.root, plan.bindings, dtypes)
    return head


def _notices(index: CheckpointIndex, site: HeadSite) -> list[str]:
    return [str(fault) for fault in index.faults if site.inside(fault.tensors)]


def _allocate(
    head: DraftHead,
    tensors: Mapping[str, Stored],
    dtype: torch.dtype | None,
    device: torch.device | str,
    binding: Binding,
) -> None:
    """Give the head tensors of one rule their dtype and, unless they stay on the meta device, their memory."""
    stored = torch_dtype(tensors[next(iter(binding.natives))].dtype)
    for name, shape in binding.heads.items():
        held = _held_dtype(head, name, stored, dtype)
        _assign(head, name, torch.empty(shape, dtype=held, device=device))


def _fill(
    head: DraftHead,
    plan: LoadPlan,
    tensors: Mapping[str, Stored],
    reader: TensorReader,
    allocate: Callable[[Binding], None] | None,
) -> None:
    """Read what this process holds of the head; `allocate` makes room for a rule when its turn comes."""
    held = {name: own_rows(value) for name, value in head.weights().items()}
    planned = [plan_reads(binding, tensors, held) for binding in plan.bindings]
    reader.fetch(entry for reads in planned for read in reads for entry in read.entries)
    with progress("Reading the head", total=sum(map(len, planned))) as advance:
        for binding, reads in zip(plan.bindings, planned, strict=True):
            if allocate is not None:
                allocate(binding)
            weights = head.weights()
            values = {name: own_values(weights[name]) for name in binding.heads}
            for read in reads:
                run_read(read, values, reader)
                advance()


def _held_dtype(head: DraftHead, name: str, stored: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    if asked is None or head.rounds(name):
        return asked or stored
    return torch.promote_types(stored, asked)


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
    """A head with random weights; an export stores it in the dtype of most of the trunk, and buffers (the router's bias) in
    their own, as releases do."""
    declared = index.config.count(family.count_field) if family.count_field else None
    site = find_site(family, index.names, index.config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = DraftHead(family, index.config, depths=depths or declared or 1, first_layer=site.first_layer)
        head.factory.initialise(head)
    bindings = key_map(head).layout()
    stored = _trunk_dtype(index)
    head.to(device=device, dtype=dtype or torch_dtype(stored))
    ignored = site.inside(index.entries)
    head.report = LoadReport(
        source=index.source,
        family=family.name,
        depths=head.num_depths,
        tensors=(),
        skipped=dict.fromkeys(ignored, 'init="random" was asked for'),
        copies={},
        initialised=tuple(head.weights()),
        notices=(),
        bytes_read=index.header_bytes,
    )
    dtypes = {
        name: stored if isinstance(value, nn.Parameter) else stored_dtype(value.dtype)
        for name, value in head.weights().items()
    }
    head.origin = Origin(index.root, bindings, dtypes)
    return head


def _trunk_dtype(index: CheckpointIndex) -> str:
    """The float dtype that most of the checkpoint's bytes are stored in."""
    sizes: dict[str, int] = {}
    for entry in index.entries.values():
        if entry.dtype in ("BF16", "F16", "F32"):
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.nbytes
    return max(sizes, key=lambda name: sizes[name], default="BF16")
