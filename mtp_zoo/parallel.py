"""A head over several ranks: FSDP2, and the way back to one plain head.

The factor of the loss. The objective's denominators count the slots of all ranks (`step_counts`), so what one process would
compute is the sum of the gradients over ranks, not their mean:

    DistributedDataParallel(objective)    takes the mean: multiply the loss by the number of ranks
    fully_shard, as torch does it         takes the mean: multiply the loss by the number of ranks
    shard_head                            takes the sum: the loss as it is
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mtp_zoo.errors import ParallelError
from mtp_zoo.head import DraftDepth, DraftHead


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
