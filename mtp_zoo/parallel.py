"""A head over several ranks: FSDP2, and the way back to one plain head.

The factor of the loss. The objective's denominators count the slots of all ranks (`step_counts`), so what one process would
compute is the sum of the gradients over ranks, not their mean:

    DistributedDataParallel(objective)    takes the mean: multiply the loss by the number of ranks
    fully_shard, as torch does it         takes the mean: multiply the loss by the number of ranks
    shard_head                            takes the sum: the loss as it is
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from mtp_zoo.arguments import checked, having, instance, optional
from mtp_zoo.errors import ParallelError
from mtp_zoo.head import DraftDepth, DraftHead


@checked(
    "Sharding a head",
    error=ParallelError,
    head=instance("a DraftHead", DraftHead),
    mesh=optional(having("a DeviceMesh", "device_type")),
)
def shard_head(head: DraftHead, mesh: Any = None, *, mp_policy: Any = None) -> DraftHead:
    """Shard a head in place with FSDP2, each depth's block as a group, and what is left as one of the head's own.

    `DraftHead.forward` runs all depths, so one forward of the head, as the objective makes it, unshards its fusions and norms
    once. Gradients are summed over the ranks of the mesh, not averaged: the loss needs no factor. Parameters keep their
    names; make the optimiser behind this call.

    Args:
        head: on the device of the mesh.
        mesh: `DeviceMesh` of one axis (or two, for hybrid sharding); None takes all ranks.
        mp_policy: `torch.distributed.fsdp.MixedPrecisionPolicy`, for compute in BF16 on FP32 weights.

    Returns:
        The head that came in.

    Raises:
        ParallelError: torch.distributed is not initialised, the head is sharded, or its floats are of several dtypes.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    _check_shardable(head)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": mp_policy or MixedPrecisionPolicy()}
    for module in (*(cast("DraftDepth", depth).block for depth in head.depths), head):
        sharded = fully_shard(cast("nn.Module", module), **options)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction that takes a factor
    return head


@checked("Gathering a head", error=ParallelError, head=instance("a DraftHead", DraftHead))
def gather_head(head: DraftHead) -> DraftHead | None:
    """A plain head on the CPU out of one that is sharded, for `export`. All ranks must call it.

    Example:
        >>> plain = gather_head(head)                                       # doctest: +SKIP
        >>> if plain is not None:                                           # doctest: +SKIP
        ...     mz.export(plain, base, out)

    Returns:
        On rank 0 a copy; elsewhere None. Of a head that is not sharded, the same.
    """
    initialised = torch.distributed.is_available() and torch.distributed.is_initialized()
    first = not initialised or torch.distributed.get_rank() == 0
    whole: dict[str, Tensor] = {}
    for name, value in head.weights().items():
        full = unsharded(value)
        if first:
            whole[name] = full.detach().to("cpu", copy=True)
    return _plain(head, whole) if first else None


def unsharded(value: Tensor) -> Tensor:
    """The tensor itself; of a DTensor, what all ranks hold together. All ranks must call it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def is_sharded(value: Tensor) -> bool:
    """Whether this rank holds a part of the tensor, or knows that others have copies."""
    return isinstance(value, DTensor)


def cut_by_rows(value: DTensor) -> bool:
    """Whether each rank holds all of some rows, as FSDP2 cuts a tensor where it is not asked for anything else."""
    cuts = [placement for placement in value.placements if not isinstance(placement, Replicate)]
    return len(cuts) <= 1 and all(type(cut) is Shard and cut.dim == 0 for cut in cuts)


def rows_at(value: DTensor, place: Sequence[int]) -> range:
    """The rows that one rank holds of a tensor that is cut by rows: none, where there are fewer rows than ranks.

    Args:
        value: on a mesh.
        place: of the rank on that mesh, one number an axis.

    Example: 5 rows over 4 ranks are rows 0..1, 2..3, 4, and none.
    """
    rows = range(value.shape[0])
    for placement, size, at in zip(value.placements, value.device_mesh.shape, place, strict=True):
        if isinstance(placement, Shard):
            each = -(-len(rows) // size)
            rows = rows[at * each : (at + 1) * each]
    return rows


def own_rows(value: Tensor) -> range:
    """The rows that this rank holds of a tensor that is cut by rows or not at all; of one without axes, `range(1)`."""
    if not isinstance(value, DTensor):
        return range(value.shape[0] if value.shape else 1)
    place = value.device_mesh.get_coordinate()
    assert cut_by_rows(value)
    assert place is not None
    return rows_at(value, place)


def own_values(value: Tensor) -> Tensor:
    """What this rank holds of a tensor, without its graph."""
    return value.to_local().detach() if isinstance(value, DTensor) else value.detach()


def _plain(head: DraftHead, weights: dict[str, Tensor]) -> DraftHead:
    first_layer = head.site.first_layer
    plain = DraftHead(head.family, head.config, depths=head.num_depths, first_layer=first_layer, device="meta")
    plain.load_state_dict(weights, assign=True)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(head.get_parameter(name).requires_grad)
    plain.engine = head.engine
    for name in ("report", "origin"):  # a head that no checkpoint gave has neither
        if hasattr(head, name):
            setattr(plain, name, getattr(head, name))
    return plain


def _check_shardable(head: DraftHead) -> None:
    problems: list[str] = []
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        problems.append("torch.distributed: expected a process group, found none")
    if any(map(is_sharded, head.parameters())):
        problems.append("parameters: expected plain tensors, found sharded ones")
    dtypes = sorted({str(parameter.dtype) for parameter in head.parameters()})
    if len(dtypes) > 1:
        problems.append(f"parameters: expected one dtype, found {', '.join(dtypes)}")
    if problems:
        raise ParallelError(
            f"Sharding the {head.family.name} head: it can't be done.",
            remedy="Start the ranks with torchrun, and shard once, a head of dtype=torch.float32 with mp_policy for BF16.",
            problems=problems,
        )
