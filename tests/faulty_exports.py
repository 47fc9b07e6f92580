"""Exports that are killed or whose system calls fail, and what must be found behind them. The tests make a few, and
`scripts/export_faults.py` makes them all."""

from __future__ import annotations

import errno
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mtp_zoo import overlay
from mtp_zoo.errors import ExportError
from mtp_zoo.exporter import export
from mtp_zoo.journal import UNDO, UPDATE, rollback
from mtp_zoo.loader import load_head
from tests import syscalls
from tests.exporting import make_base, train

Kind = Literal["new directory", "in place", "rollback"]
KINDS: tuple[Kind, ...] = ("new directory", "in place", "rollback")
FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
REFUSED = 3
"""Exit code of a child whose export raised an error of the library."""

Files = dict[str, bytes]


@dataclass
class Tally:
    """What was found; `wrong` says in words what must not be."""

    faults: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class _Here:
    """An executor whose work is done by the thread that asks for it, at once."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*args))
        except OSError as error:
            done.set_exception(error)
        return done

    def shutdown(self) -> None: ...


class Trials:
    """One base, one head, and as many exports as are asked for. Every one starts from the same files at the same place.

    Args:
        folder: an empty directory to work in.
        kind: what is disturbed: an export to a new directory, an update in place, or taking one back.
    """

    def __init__(self, folder: Path, kind: Kind) -> None:
        self.kind: Kind = kind
        self.base, self.out, self.spare = folder / "base", folder / "out", folder / "spare"
        self.sibling = folder / "sibling"
        make_base(self.spare)
        self.head = train(load_head(self.spare))
        self.tally = Tally()
        self.old = contents(self.spare)
        self._reset()
        if kind != "rollback":
            self._export()
        self.new = contents(self.out if kind == "new directory" else self.base)

    def calls(self) -> int:
        """How many writing calls one undisturbed run makes."""
        self._reset()
        return len(syscalls.trace(self._in_one_thread).calls)

    def kill_at(self, calls: Iterable[int]) -> None:
        """End a run by SIGKILL before each of these writing calls."""
        for at in calls:
            self._reset()
            found = syscalls.trace(self._in_one_thread, at=at)
            self._judge_kill(f"killed before call {at}, {found.calls[-1]}", found.exit_code)

    def kill_randomly(self, count: int, seed: int) -> None:
        """End this many runs by SIGKILL at random moments; those that were done before their moment came are judged as well."""
        moments, killed, length = random.Random(seed), self.tally.ended["killed"], self._seconds()
        while self.tally.ended["killed"] < killed + count:
            self._reset()
            after = moments.uniform(0.0, length)
            exit_code = syscalls.run(self._work, kill_after=after)
            length = length if exit_code < 0 else max(after, 0.7 * length)  # it was faster than the first
            self._judge_kill(f"killed after {after:.4f} s", exit_code)

    def _seconds(self) -> float:
        """What an undisturbed run takes."""
        self._reset()
        began = time.monotonic()
        syscalls.run(self._work)
        return time.monotonic() - began

    def fail_at(self, calls: Iterable[int], number: int) -> None:
        """Let each of these writing calls fail once."""
        for at in calls:
            self._reset()
            found = syscalls.trace(self._in_one_thread, at=at, fault=number)
            what = f"call {at}, {found.calls[at - 1]}, failed with {errno.errorcode[number]}"
            self.tally.faults += 1
            self.tally.ended["error" if found.exit_code == REFUSED else "done"] += 1
            self._expect(found.exit_code in (0, REFUSED), f"{what}: exit code {found.exit_code}")
            if found.exit_code == REFUSED:
                self._expect(not self.out.exists() and contents(self.base) == self.old, f"{what}: not as it was")
                self._expect(not self._left_over(), f"{what}: {self._left_over()} is left")

    def _in_one_thread(self) -> None:
        overlay.ThreadPoolExecutor = _Here  # in a child: calls of its first thread are all that is traced
        self._work()

    def _work(self) -> None:
        try:
            rollback(self.base) if self.kind == "rollback" else self._export()
        except ExportError:
            os._exit(REFUSED)

    def _export(self) -> None:
        if self.kind == "new directory":
            export(self.head, self.base, self.out)
        else:
            export(self.head, self.base, in_place=True)

    def _reset(self) -> None:
        for folder in (self.base, self.out, self.sibling, self._partial()):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.spare, self.base)
        shutil.copytree(self.base, self.sibling, copy_function=os.link)  # another checkpoint of the same files
        if self.kind == "rollback":
            self._export()

    def _judge_kill(self, what: str, exit_code: int) -> None:
        self.tally.faults += 1
        self.tally.ended["killed" if exit_code < 0 else "done"] += 1
        self._expect(contents(self.sibling) == contents(self.spare), f"{what}: files of another checkpoint changed")
        if self.kind == "new directory":
            self._expect(contents(self.base) == self.old, f"{what}: the base changed")
            if self.out.exists():
                self._expect(contents(self.out) == self.new, f"{what}: half an output")
                return
            self._export()
            self._expect(contents(self.out) == self.new, f"{what}: the next run came out wrong")
        else:
            found = contents(self.base)
            self._expect("config.json" not in found or found in (self.old, self.new), f"{what}: half a checkpoint")
            self._mend(what)
        self._expect(not self._left_over(), f"{what}: {self._left_over()} is left")

    def _mend(self, what: str) -> None:
        """Every other time the next run mends it, else `rollback` does."""
        if self.kind == "in place" and self.tally.faults % 2:
            self._export()
            self._expect(contents(self.base) == self.new, f"{what}: the next run came out wrong")
        elif (self.base / UPDATE).exists() or (self.base / UNDO).exists():
            rollback(self.base)
            self._expect(contents(self.base) == self.old, f"{what}: rollback came out wrong")
        else:
            self._expect(contents(self.base) == self.old, f"{what}: nothing to go back to")

    def _partial(self) -> Path:
        return self.out.with_name(f".{self.out.name}.mtp-zoo-partial")

    def _left_over(self) -> list[str]:
        return [str(path) for path in (self._partial(), self.base / UPDATE) if path.exists()]

    def _expect(self, right: bool, wrong: str) -> None:
        if not right:
            self.tally.wrong.append(f"{self.kind}: {wrong}")


def contents(root: Path) -> Files:
    """Every file's bytes, without what an update in place keeps for itself."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not {UPDATE, UNDO}.intersection(path.parts)
    }
