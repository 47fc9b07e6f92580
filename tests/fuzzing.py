"""Mutated checkpoints, and what may come of reading one: a typed error, or the tensors that the safetensors library reads.

A case is a number: the same number makes the same mutation. Cases run in a child process whose memory and time are limited,
so that one that fills the memory or never ends is a finding and not the end of the run.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import struct
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import safe_open

import mtp_zoo as mz
from mtp_zoo.errors import MTPZooError
from mtp_zoo.inspection import inspect
from mtp_zoo.keymap import FLOAT_DTYPES, native_tensors
from tests.exporting import CONFIG, TENSORS
from tests.quantizing import BLOCKS, make_fp8
from tests.stored_forms import Form, make
from tests.tiny import write_checkpoint

SECONDS = 5.0
"""A case that takes longer hangs; most take a hundredth of a second."""

ROOM = 1 << 30
"""Bytes that a case may take on top of what the process has; a tiny head takes a megabyte."""

WARM_UP = 1
"""How often every good checkpoint is read first: what is imported on first use is not a case's."""

NASTY: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 63, 2**31, 2**53 + 1, 2**63 - 1, 2**64, 10**30, -(2**63), 0.5, 1e308, -0.0,
    float("nan"), float("inf"), "", "1", "x" * 5000, "../x", "/etc/passwd", "a\0b", "\u202e", "BF16", "F8_E4M3", "mtp.",
    [], {}, [[]], [0, 0], [1, 1, 1], {"a": {"b": []}}, [None], ["", ""], [-1], [2**40, 2**40],
)  # fmt: skip
"""Values that code forgets."""

BYTES = b'\0"{}[]:,\\\xff\x80 0919eE.-+nftu'
"""Bytes that steer a JSON parser, and some that can't be UTF-8."""


@dataclass(frozen=True)
class Findings:
    """What a run came to.

    Attributes:
        cases: how many were run.
        outcomes: class of the error, or `loaded`, of `load_head`: how often.
        failures: number of a case, and what went wrong, in words.
        slowest: seconds of the slowest case.
        peak: most bytes of memory that the process took on top of what it began with.
    """

    cases: int
    outcomes: dict[str, int]
    failures: list[tuple[int, str]]
    slowest: float
    peak: int


@cache
def bases() -> list[dict[str, bytes]]:
    """The files of good checkpoints: a dense head, experts behind the trunk's layers, an FP8 head of packed experts."""
    made = [(CONFIG, TENSORS), make(Form("deepseek_v3", "one_by_one")), make_fp8(Form("qwen3_5_moe", "packed"), BLOCKS)]
    found: list[dict[str, bytes]] = []
    for config, tensors in made:
        with tempfile.TemporaryDirectory() as folder:
            root = write_checkpoint(Path(folder), config, tensors, shards=2)
            found.append({path.name: path.read_bytes() for path in root.iterdir()})
    return found


def mutated(files: dict[str, bytes], rng: random.Random) -> dict[str, bytes]:
    """The files with one to three changes, most often one."""
    changed = dict(files)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        file = rng.choice(sorted(changed))
        change = rng.choice(_SHARD if file.endswith(".safetensors") else _TEXT)
        changed[file] = change(changed[file], rng)
    if rng.random() < 0.02:
        one, two = rng.sample(sorted(changed), 2)
        changed[one], changed[two] = changed[two], changed[one]
    if rng.random() < 0.02:
        del changed[rng.choice(sorted(changed))]
    return changed


def _flip(raw: bytes, rng: random.Random) -> bytes:
    """Some bytes set, put in, left out or repeated."""
    out = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(out) + 1)
        length = rng.choice((1, 1, 4, 64))
        kind = rng.randrange(4)
        if kind == 0:
            out[at : at + 1] = bytes([rng.choice(BYTES)])
        elif kind == 1:
            out[at:at] = bytes(rng.choice(BYTES) for _ in range(length))
        elif kind == 2:
            del out[at : at + length]
        else:
            out[at:at] = out[at : at + length]
    return bytes(out)


def _edit(raw: bytes, rng: random.Random) -> bytes:
    """Some values of a JSON text replaced, removed, renamed, swapped or nested."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return _flip(raw, rng)
    for _ in range(rng.choice((1, 1, 2))):
        value = _edited(value, rng)
    return json.dumps(value).encode()


def _edited(value: Any, rng: random.Random) -> Any:
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.05:
        return rng.choice(NASTY)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key, other, kind = rng.choice(keys), rng.choice(keys), rng.randrange(8)
    if kind == 0:
        value.pop(key)
    elif kind == 1:
        value[key], value[other] = value[other], value[key]
    elif kind == 2 and isinstance(value, dict):
        value[rng.choice((str(key)[:-1], f"{key}x", str(key).upper(), "__metadata__", ""))] = value.pop(key)
    elif kind == 3:
        value[key] = [value[key]] if rng.random() < 0.5 else {"a": value[key]}
    else:
        value[key] = _edited(value[key], rng)
    return value


def _truncate(raw: bytes, rng: random.Random) -> bytes:
    return raw[: rng.choice((rng.randrange(len(raw) + 1), rng.randrange(min(len(raw), 16) + 1)))]


def _extend(raw: bytes, rng: random.Random) -> bytes:
    return raw + rng.randbytes(rng.choice((1, 8, 4096)))


def _in_header(change: Callable[[bytes, random.Random], bytes]) -> Callable[[bytes, random.Random], bytes]:
    """A change to the JSON of a shard, whose length is most often told right."""

    def changed(raw: bytes, rng: random.Random) -> bytes:
        length = int.from_bytes(raw[:8], "little")
        header = change(raw[8 : 8 + length], rng)
        told = len(header) if rng.random() < 0.9 else rng.choice((0, 1, length, len(raw), 2**40, 2**64 - 1))
        return struct.pack("<Q", told) + header + raw[8 + length :]

    return changed


_TEXT = (_flip, _edit, _edit, _edit, _truncate, _extend)
_SHARD = (_in_header(_flip), _in_header(_edit), _in_header(_edit), _truncate, _extend, _flip)


def run_cases(numbers: Iterable[int], *, every_export: int = 10) -> Findings:
    """Run cases in a child of this process; every n-th whose head loads is exported too."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _run_child(numbers, writer, every_export)
    os.close(writer)
    with os.fdopen(reader) as stream:
        lines = stream.read().splitlines()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with status {status}; the last case that it began: {lines[-1:]}"
    return Findings(**json.loads(lines[-1]))


def _run_child(numbers: Iterable[int], writer: int, every_export: int) -> NoReturn:
    """Never returns to the test that forked."""
    status = 1
    try:
        with os.fdopen(writer, "w") as stream, tempfile.TemporaryDirectory() as folder:
            found = _run(
                list(numbers), Path(folder), every_export, lambda number: print(number, file=stream, flush=True)
            )
            print(json.dumps(found.__dict__), file=stream)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _run(numbers: list[int], folder: Path, every_export: int, tell: Callable[[int], None]) -> Findings:
    originals = bases()
    for files in originals * WARM_UP:
        _case(files, folder, export=True)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    signal.signal(signal.SIGALRM, _too_long)
    began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes: Counter[str] = Counter()
    failures: list[tuple[int, str]] = []
    slowest = 0.0
    for number in numbers:
        tell(number)
        rng = random.Random(number)
        files = mutated(rng.choice(originals), rng)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            outcomes[_case(files, folder, export=number % every_export == 0)] += 1
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            failures.append((number, f"{type(error).__name__}: {str(error)[:300]} ({frame.filename}:{frame.lineno})"))
        slowest = max(slowest, SECONDS - signal.setitimer(signal.ITIMER_REAL, 0)[0])
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began) * 1024
    return Findings(len(numbers), dict(outcomes), failures, slowest, peak)


def _too_long(*_: object) -> NoReturn:
    raise TimeoutError(f"longer than {SECONDS} s")


def _case(files: dict[str, bytes], folder: Path, *, export: bool) -> str:
    """Write the files, go through every way in, and return what `load_head` came to."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        root = Path(place) / "base"
        root.mkdir()
        for name, content in files.items():
            (root / name).write_bytes(content)
        for call in (
            lambda: mz.CheckpointIndex.open(root).verify(),
            lambda: inspect(root),
            lambda: mz.load_shared(root),
        ):
            _attempt(call)
        outcome, head = _attempt(lambda: mz.load_head(root))
        if head is not None:
            _compare(root, head)
            if export:
                _attempt(lambda: mz.export(head, root, root.parent / "out"))
        assert {path.name: path.read_bytes() for path in root.iterdir()} == files, "the checkpoint was changed"
    return outcome


def _attempt(call: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return "loaded", call()
    except MTPZooError as error:
        str(error).encode()  # it can be printed
        return type(error).__name__, None


def _compare(root: Path, head: mz.DraftHead) -> None:
    """Every float tensor of the head is what the safetensors library reads under its name."""
    natives = dict(native_tensors(head.origin.bindings, head.state_dict()))
    for told in head.report.tensors:
        if told.dtype in FLOAT_DTYPES and told.name in natives:
            with safe_open(root / told.file, "pt") as opened:
                expected = opened.get_tensor(told.name)
            mine = natives[told.name]
            assert mine.dtype == expected.dtype, told.name
            assert torch.equal(mine.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)), told.name
