"""One rank's failure ends all ranks of a run: each raises within a minute, with the number of the rank that failed.

A rank that raises in the middle of a step leaves the others inside a collective, where they would wait for it until the
process group's timeout. So it writes what happened into the group's store, and raises. Over gloo, the others' collectives
break off when its process ends, and they look into the store; a caller who catches the error has to let the process end.
NCCL does not notice that a peer is gone, so there a thread of each rank watches the store and aborts its own group.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import distributed

from mtp_zoo.errors import RankError

FAILED, HEARD = "mtp_zoo/failed", "mtp_zoo/heard"
"""Keys in the store: what failed first, and how many ranks have read it."""

PATIENCE = 20.0
"""Seconds that a rank whose collective broke off waits for another's words."""

LINGER = 2.0
"""Seconds that a failed rank waits to be heard: it may be the one that holds the store."""

WATCH = 1.0
"""Seconds between two looks into the store."""


@contextmanager
def fail_together(act: str) -> Generator[None]:
    """Run a block on all ranks; where one raises, all raise.

    Args:
        act: what the block does, as a phrase ("Training").

    Raises:
        RankError: another rank failed, or ended; its number and the first line of its error are in the message.
        Exception: this rank's own error.
    """
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        yield
        return
    line = _Line(act)
    with line.watched():
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            if line.is_echo(error):
                raise line.error(str(error)) from error
            line.report(error)
            raise


class _Line:
    """This rank's access to the store, for one block."""

    def __init__(self, act: str) -> None:
        self.act = act
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        group: Any = distributed.distributed_c10d
        self._store: Any = group.PrefixStore(f"{FAILED}/{group._world.group_count}", group._get_default_store())
        self._ended = threading.Event()

    @contextmanager
    def watched(self) -> Generator[None]:
        """Watch the store beside the block, where collectives run on an accelerator and don't end by themselves."""
        thread = threading.Thread(target=self._watch, daemon=True)
        if distributed.get_backend() != "gloo":
            thread.start()
        try:
            yield
        finally:
            self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(WATCH):
            with contextlib.suppress(RuntimeError):
                if self._store.check([FAILED]):
                    _abort()
                    return

    def is_echo(self, error: Exception) -> bool:
        """Return whether an error of this rank may be what another one's failure looks like from here.

        A group that was left raises errors of any class, and a reduce that was cut short any number.
        """
        return self._heard(PATIENCE if _from_backend(error) else 0.0) is not None

    def report(self, error: Exception) -> None:
        """Write this rank's failure, unless another's is there, and wait a little for the others to read it."""
        first = str(error).strip().partition("\n")[0]
        words = json.dumps({"rank": self.rank, "error": f"{type(error).__name__}: {first}"})
        with contextlib.suppress(RuntimeError):
            if self._store.compare_set(FAILED, "", words).decode() != words:
                self._store.add(HEARD, 1)  # another one was first and waits to be heard
        _abort()
        deadline = time.monotonic() + LINGER
        with contextlib.suppress(RuntimeError):  # the rank that holds the store may be gone
            while time.monotonic() < deadline and self._store.add(HEARD, 0) < self.size - 1:
                time.sleep(0.05)

    def error(self, seen: str) -> RankError:
        """The error of a rank that hears of another's failure."""
        told = self._heard(0.0)
        with contextlib.suppress(RuntimeError):
            self._store.add(HEARD, 1)
        _abort()
        found = f"rank {told['rank']} failed: {told['error']}" if told else f"a rank has ended ({seen})"
        return RankError(
            f"{self.act} on rank {self.rank}: {found}.", remedy="See what that rank reports, and start all ranks again."
        )

    def _heard(self, patience: float) -> dict[str, Any] | None:
        """Another rank's failure, waited for while it may still be on its way."""
        deadline = time.monotonic() + patience
        with contextlib.suppress(RuntimeError):
            while True:
                if self._store.check([FAILED]):
                    told = json.loads(self._store.get(FAILED))
                    return None if told["rank"] == self.rank else told
                if time.monotonic() >= deadline:
                    return None
                time.sleep(0.05)
        return {} if patience else None


def _from_backend(error: Exception) -> bool:
    """Return whether a collective raised it."""
    text = str(error).lower()
    return isinstance(error, distributed.DistError) or any(word in text for word in ("gloo", "nccl", "connection"))


def _abort() -> None:
    """End this rank's collectives on an accelerator.

    Gloo's end when the peer's process does. Its group is left alone: DDP holds it too, and would then be the last to let go
    of it, under Python's lock, for which the group's own threads may be waiting.
    """
    with contextlib.suppress(Exception):
        if distributed.get_backend() != "gloo":
            distributed.distributed_c10d._abort_process_group()  # pyright: ignore[reportPrivateUsage] - destroying waits for kernels that no peer ends
