"""Writing a head whose tensors are sharded over ranks, one whole tensor at a time on the first of them.

    first rank     writes, and asks for each tensor by its name when it needs it; tells when it is done or has failed
    the others     send their rows of what is asked for, until then

The first rank holds one whole tensor, in the memory of the CPU; the others hold none. Every rank raises where one fails.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from mtp_zoo.errors import ParallelError
from mtp_zoo.parallel import cut_by_rows, own_values, rows_at
from mtp_zoo.rank_line import Alone, Failure, RankLine, line_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from mtp_zoo.head import DraftHead

T = TypeVar("T")


@dataclass(frozen=True)
class _Done(Generic[T]):
    """The first rank has finished."""

    result: T


def on_first_rank(head: DraftHead, act: str, write: Callable[[Mapping[str, Tensor]], T]) -> T:
    """Call `write` with the whole tensors of a head, by canonical name; of a sharded head, on the first rank of its mesh.

    All ranks of the mesh must make the call. A tensor that is asked for again without another in between is not gathered
    again.

    Args:
        head: sharded or not.
        act: what `write` does, for messages.
        write: must ask for tensors by `weights[name]`.

    Returns:
        What `write` returned, on every rank.

    Raises:
        ParallelError: the tensors are cut in other ways than `shard_head` cuts them, or a rank has ended.
        MTPZooError: what `write` raised, on every rank.
    """
    tensors = head.weights()
    with line_of(_mesh_of(tensors, act)) as ranks:
        if isinstance(ranks, Alone):
            return write(tensors)
        if ranks.is_first:
            return _lead(ranks, act, tensors, write)
        return _serve(ranks, act, tensors)


def _mesh_of(tensors: Mapping[str, Tensor], act: str) -> DeviceMesh | None:
    """The mesh that the sharded tensors lie on; None where none is sharded."""
    sharded = {name: value for name, value in tensors.items() if isinstance(value, DTensor)}
    meshes = {value.device_mesh for value in sharded.values()}
    problems = [
        f"{name}: expected rows cut over one axis of the mesh, found {value.placements}"
        for name, value in sharded.items()
        if not cut_by_rows(value)
    ]
    problems += [f"expected one mesh, found {len(meshes)}: {', '.join(map(str, meshes))}"] if len(meshes) > 1 else []
    if problems:
        raise ParallelError(
            f"{act}: the ranks' parts of its tensors can't be put together.",
            remedy="Call mtp_zoo.gather_head(head) on all ranks, and export what rank 0 gets.",
            problems=problems,
        )
    return next(iter(meshes), None)


def _lead(ranks: RankLine, act: str, tensors: Mapping[str, Tensor], write: Callable[[Mapping[str, Tensor]], T]) -> T:
    try:
        result = write(_Gathered(tensors, ranks, act))
    except BaseException as error:
        with contextlib.suppress(ParallelError):  # where a rank has ended, that is the error which is being raised
            ranks.tell(Failure.of(error, act))
        raise
    ranks.tell(_Done(result))
    return result


def _serve(ranks: RankLine, act: str, tensors: Mapping[str, Tensor]) -> Any:
    """Send rows until the first rank has finished; raises what it, or this rank, failed with."""
    own: Exception | None = None
    while isinstance(message := ranks.hear(), str):
        rows: Tensor | None = None
        try:
            rows = _rows_to_send(tensors[message])
        except Exception as error:  # the first rank must hear of it; this one raises it when all have stopped
            own = error
        with contextlib.suppress(Exception):
            ranks.agree(own, act)
            if rows is not None:
                ranks.send(rows)
    if own is not None:
        raise own
    if isinstance(message, Failure):
        raise message.error(ranks.ranks[0])
    return message.result


def _rows_to_send(value: Tensor) -> Tensor | None:
    """This rank's rows, on the CPU; None where the first rank does not need them, since another has the same."""
    assert isinstance(value, DTensor)
    sender = dict(_senders(value)).get(torch.distributed.get_rank())
    return own_values(value).cpu().contiguous() if sender else None


def _senders(value: DTensor) -> Iterator[tuple[int, range]]:
    """The ranks whose rows make up the tensor, with their rows; of ranks that have the same, the first."""
    mesh = value.device_mesh
    axes = [
        range(1 if isinstance(placement, Replicate) else size)
        for placement, size in zip(value.placements, mesh.shape, strict=True)
    ]
    for place in itertools.product(*axes):
        rows = rows_at(value, place)
        if len(rows):
            yield int(mesh.mesh[place]), rows


class _Gathered(Mapping[str, Tensor]):
    """Whole tensors on the CPU, each put together when it is asked for; the last one is kept.

    Args:
        tensors: the head's own, of which some are sharded.
        ranks: over which.
        act: what they are gathered for.
    """

    def __init__(self, tensors: Mapping[str, Tensor], ranks: RankLine, act: str) -> None:
        self._tensors, self._ranks, self._act = tensors, ranks, act
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        value = self._tensors[name]
        if not isinstance(value, DTensor):
            return value
        if self._last is None or self._last[0] != name:
            self._last = None  # let go of one before the next is made
            self._last = (name, self._gather(name, value))
        return self._last[1]

    def _gather(self, name: str, value: DTensor) -> Tensor:
        self._ranks.tell(name)
        self._ranks.agree(None, self._act)
        whole = torch.empty(value.shape, dtype=value.dtype, device="cpu")
        for rank, rows in _senders(value):
            place = whole[rows.start : rows.stop]
            if rank == torch.distributed.get_rank():
                place.copy_(own_values(value))
            else:
                self._ranks.receive(place, rank)
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
