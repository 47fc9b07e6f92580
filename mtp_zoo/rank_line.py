"""What ranks say to each other while one of them, or each, reads or writes a checkpoint: who failed, what is wanted, done.

Two rules. A rank that fails tells the others, so that all raise and none waits for ever. And a rank may wait for as long as
another reads or writes files, which is longer than collectives of a training step may take: the words go over a process group
of their own, over gloo, so that they need no accelerator either.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from mtp_zoo.errors import MTPZooError, ParallelError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

PATIENCE = datetime.timedelta(days=1)
"""How long a rank waits for another that lives; one that ends closes its connections, which is noticed at once."""


@dataclass(frozen=True)
class Failure:
    """Why a rank can't go on, as others raise it."""

    kind: type[MTPZooError]
    message: str
    remedy: str
    problems: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: BaseException, act: str) -> Failure:
        """Of an error that this rank raises."""
        if isinstance(error, MTPZooError):
            return cls(type(error), error.message, error.remedy, tuple(map(str, error.problems)))
        message = f"{act}: expected no failure, got {type(error).__name__}: {error}"
        return cls(ParallelError, message, "Mend what that rank reports, and start again.")

    def error(self, rank: int) -> MTPZooError:
        """What a rank raises that hears of it."""
        return self.kind(f"On rank {rank}: {self.message}", remedy=self.remedy, problems=self.problems)


class Alone:
    """One process, which has nobody to tell."""

    is_first = True

    @contextmanager
    def together(self, act: str) -> Generator[None]:
        """Nothing."""
        del act
        yield

    def tell(self, message: T) -> T:
        """The message."""
        return message


class RankLine:
    """The ranks of a mesh; all of them must make the same calls.

    Args:
        group: a process group of these ranks, for CPU tensors.
        ranks: their numbers in the default group; the first one leads.

    Attributes:
        is_first: whether this is the one that leads.
    """

    def __init__(self, group: Any, ranks: list[int]) -> None:
        self.ranks = ranks
        self.is_first = torch.distributed.get_rank() == ranks[0]
        self._group = group

    @contextmanager
    def together(self, act: str) -> Generator[None]:
        """A block in which ranks work by themselves; where one fails, all raise behind it.

        Raises:
            MTPZooError: this rank's own error, or that of the first one that failed, of the same class and with its number.
        """
        own: Exception | None = None
        try:
            yield
        except Exception as error:  # whatever it is, the others must hear of it
            own = error
        self.agree(own, act)

    def agree(self, own: Exception | None, act: str) -> None:
        """Exchange what failed on each rank; raises what `together` does."""
        failures: list[Failure | None] = [None] * len(self.ranks)
        with self._speaking(act):
            mine = None if own is None else Failure.of(own, act)
            torch.distributed.all_gather_object(failures, mine, group=self._group)
        if own is not None:
            raise own
        for rank, failure in zip(self.ranks, failures, strict=True):
            if failure is not None:
                raise failure.error(rank)

    def tell(self, message: T) -> T:
        """What the first rank gives, on all ranks."""
        box: list[Any] = [message]
        with self._speaking("Hearing from the first rank"):
            torch.distributed.broadcast_object_list(box, src=self.ranks[0], group=self._group)
        return cast("T", box[0])

    def hear(self) -> Any:
        """What the first rank tells, on the others."""
        return self.tell(None)

    def send(self, value: Tensor) -> None:
        """Send a contiguous CPU tensor to the first rank."""
        with self._speaking("Sending a part of a tensor"):
            torch.distributed.send(_raw(value), dst=self.ranks[0], group=self._group)

    def receive(self, place: Tensor, rank: int) -> None:
        """Fill a contiguous CPU tensor with what `rank` sends."""
        with self._speaking("Receiving a part of a tensor"):
            torch.distributed.recv(_raw(place), src=rank, group=self._group)

    @contextmanager
    def _speaking(self, act: str) -> Generator[None]:
        try:
            yield
        except RuntimeError as error:
            raise ParallelError(
                f"{act}: expected all of ranks {self.ranks} to answer, and one has ended: {error}",
                remedy="See what that rank reports, and start all ranks again.",
            ) from error


@contextmanager
def line_of(mesh: DeviceMesh | None) -> Generator[RankLine | Alone]:
    """The line between the ranks of a mesh; without a mesh, this process. All ranks of the mesh must call it."""
    if mesh is None:
        yield Alone()
        return
    ranks: list[int] = sorted(mesh.mesh.flatten().tolist())
    everyone = len(ranks) == torch.distributed.get_world_size()
    group: Any = torch.distributed.new_group(
        ranks, timeout=PATIENCE, backend="gloo", use_local_synchronization=not everyone
    )
    try:
        yield RankLine(group, ranks)
    finally:
        # The name of a group of some ranks is made of their numbers: a second one would find the addresses of the first,
        # so it is left to `destroy_process_group()`.
        if everyone:
            with contextlib.suppress(RuntimeError):
                torch.distributed.destroy_process_group(group)


def _raw(value: Tensor) -> Tensor:
    return value.detach().reshape(-1).view(torch.uint8)
