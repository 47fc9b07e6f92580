"""Faults at the boundary of the kernel: a traced child is killed at one of its writing system calls, or the call fails.

Linux on x86-64. The child is forked, so nothing is imported anew; it runs `work()` and leaves at once.

    count = trace(work).calls                       # how many calls that write
    trace(work, at=3, fault="kill")                 # SIGKILL before the third of them is made
    trace(work, at=3, fault=errno.ENOSPC)           # the third is not made and returns ENOSPC
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

TRACEME, GETREGS, SETREGS, SETOPTIONS, SYSCALL = 0, 12, 13, 0x4200, 24
EXITKILL, SYSGOOD = 0x100000, 1
SYSCALL_STOP = signal.SIGTRAP | 0x80
CREATE = os.O_CREAT | os.O_TRUNC

OPENAT = 257
WRITING = {
    1: "write", 16: "ioctl", 18: "pwrite64", 20: "writev", 40: "sendfile", 74: "fsync", 75: "fdatasync", 76: "truncate",
    77: "ftruncate", 82: "rename", 83: "mkdir", 84: "rmdir", 86: "link", 87: "unlink", 88: "symlink", 90: "chmod",
    91: "fchmod", 189: "lsetxattr", OPENAT: "openat", 258: "mkdirat", 263: "unlinkat", 264: "renameat", 265: "linkat",
    268: "fchmodat", 280: "utimensat", 316: "renameat2", 326: "copy_file_range",
}  # fmt: skip
"""Numbers of the calls that change a file system; opening counts where it makes or empties a file, ioctl where it clones."""

FICLONE = 0x40049409


class Registers(ctypes.Structure):
    """`struct user_regs_struct`."""

    _fields_ = [
        (name, ctypes.c_ulonglong)
        for name in (
            *("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi"),
            *("orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs"),
        )
    ]  # fmt: skip


@dataclass(frozen=True)
class Trace:
    """What became of the child.

    Attributes:
        calls: names of the writing calls that it made or tried, in order.
        exit_code: as of a process; -9 where it was killed.
    """

    calls: tuple[str, ...]
    exit_code: int


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def available() -> bool:
    """Whether children can be traced here."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    try:
        return trace(lambda: None).exit_code == 0
    except OSError:
        return False


def run(work: Callable[[], object], *, kill_after: float | None = None) -> int:
    """Exit code of a forked child that runs `work`; killed after some seconds where these are given."""
    pid = _fork(work, traced=False)
    if kill_after is not None:
        import time

        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def trace(work: Callable[[], object], *, at: int = 0, fault: Literal["kill"] | int = "kill") -> Trace:
    """Run `work` in a forked child and let its writing call number `at` (from 1; 0 is none) meet a fault."""
    pid = _fork(work, traced=True)
    os.waitpid(pid, 0)  # stopped by itself
    _ptrace(SETOPTIONS, pid, EXITKILL | SYSGOOD)
    calls: list[str] = []
    entering, failing, pending = False, False, 0
    while True:
        if not (fault == "kill" and len(calls) == at > 0):
            _ptrace(SYSCALL, pid, pending)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(status):
            return Trace(tuple(calls), os.waitstatus_to_exitcode(status))
        stop = os.WSTOPSIG(status)
        pending = 0 if stop == SYSCALL_STOP else stop
        if stop != SYSCALL_STOP:
            continue
        entering = not entering
        registers = _registers(pid)
        if failing:
            registers.rax = ctypes.c_ulonglong(-int(fault)).value
            _set(pid, registers)
            failing = False
        elif entering and (name := _writing(registers)):
            calls.append(name)
            if len(calls) == at and fault == "kill":
                os.kill(pid, signal.SIGKILL)
            elif len(calls) == at:
                registers.orig_rax = ctypes.c_ulonglong(-1).value  # no such call: nothing is done
                _set(pid, registers)
                failing = True


def _writing(registers: Registers) -> str | None:
    number = registers.orig_rax
    if number == OPENAT and not registers.rdx & CREATE:
        return None
    if number == 16 and registers.rsi != FICLONE:
        return None
    if number == 1 and registers.rdi <= 2:
        return None
    return WRITING.get(number)


def _fork(work: Callable[[], object], *, traced: bool) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        if traced:
            _ptrace(TRACEME, 0, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _ptrace(request: int, pid: int, data: int) -> None:
    if _libc.ptrace(request, pid, None, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _registers(pid: int) -> Registers:
    registers = Registers()
    _libc.ptrace(GETREGS, pid, None, ctypes.addressof(registers))
    return registers


def _set(pid: int, registers: Registers) -> None:
    _libc.ptrace(SETREGS, pid, None, ctypes.addressof(registers))
