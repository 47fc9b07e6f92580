"""The header of one safetensors file, parsed without trusting it.

Layout of the format: 8 bytes header length n (unsigned, little endian), n bytes of JSON, then the tensors' bytes. The
JSON maps each name to `{"dtype", "shape", "data_offsets": [start, end]}`, offsets counted from the end of the header.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import stat
import struct
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from mtp_zoo.errors import BrokenCheckpointError, UnsafeCheckpointError, UnsupportedQuantizationError
from mtp_zoo.json_text import parse_object, refuse_controls

if TYPE_CHECKING:
    import torch

HEADER_LIMIT = 100_000_000
"""Largest header in bytes that the safetensors library reads; a longer one is refused before it is allocated."""

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
LARGEST = 2**63
"""Sizes and offsets are below it."""

MAX_AXES = 64
"""Most axes that a torch tensor can have; bounds the work that a hostile shape can ask for."""

DTYPES: Mapping[str, tuple[int, str | None]] = {
    "BOOL": (8, "bool"),
    "F4": (4, None),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "I16": (16, "int16"),
    "U16": (16, "uint16"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "I32": (32, "int32"),
    "U32": (32, "uint32"),
    "F32": (32, "float32"),
    "C64": (64, "complex64"),
    "F64": (64, "float64"),
    "I64": (64, "int64"),
    "U64": (64, "uint64"),
}
"""safetensors' spelling -> bits of one element, and torch's name of the same dtype (None where torch has none)."""


def torch_dtype(stored: str) -> torch.dtype:
    """The torch dtype of a stored one.

    Raises:
        UnsupportedQuantizationError: torch has no such dtype, or safetensors has no such spelling.
    """
    import torch

    name = DTYPES.get(stored, (0, None))[1]
    if name is None:
        raise UnsupportedQuantizationError(
            f"Reading a tensor stored as '{stored}': torch has no such dtype.",
            remedy="Use a checkpoint whose head is stored as BF16, F16 or F32.",
        )
    return getattr(torch, name)


def stored_dtype(dtype: torch.dtype) -> str:
    """safetensors' spelling of a torch dtype.

    Raises:
        UnsupportedQuantizationError: safetensors has no such dtype.
    """
    for stored, (_, name) in DTYPES.items():
        if str(dtype) == f"torch.{name}":
            return stored
    raise UnsupportedQuantizationError(
        f"Writing a tensor of {dtype}: safetensors can't store it.",
        remedy="Cast the tensor to torch.bfloat16 or float32.",
    )


class TensorEntry(NamedTuple):
    """Where one stored tensor is. A tuple, since a checkpoint can have a hundred thousand.

    Attributes:
        name: as stored.
        dtype: in safetensors' spelling, for example `BF16`.
        shape: as stored.
        file: path of the file, relative to the checkpoint's directory.
        start, end: byte range, counted from the beginning of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """One file's header.

    Attributes:
        entries: in the order of their bytes.
        metadata: the file's `__metadata__`, or an empty mapping.
        nbytes: bytes in front of the tensors, the length field included.
        sha256: of these bytes, in hexadecimal: where it is the same, so are names, dtypes, shapes and the file's size.
    """

    entries: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]
    nbytes: int
    sha256: str


@contextmanager
def collector_paused() -> Generator[None]:
    """Parsing makes many objects and no garbage; looking for some meanwhile doubles the time of a large header."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@collector_paused()
def read_header(root: Path, file: str) -> Header:
    """Read and check the header of `root`/`file`; no tensor byte is read.

    Raises:
        BrokenCheckpointError: the file is no readable, complete, self-consistent safetensors file.
        UnsafeCheckpointError: the header is longer than the format's readers allow.
    """
    try:
        raw, size = _header_bytes(root / file, file)
    except OSError as error:
        raise _broken(file, f"it can't be read ({error.strerror or error})") from error
    return decode_header(raw, file, size)


def header_length(start: bytes, file: str, size: int) -> int:
    """Bytes of the JSON part, from the first `len(LFS_POINTER)` bytes of a file of `size` bytes.

    Raises:
        BrokenCheckpointError: the file is empty, a git-lfs pointer, or shorter than its header claims to be.
        UnsafeCheckpointError: see `read_header`.
    """
    if not start:
        raise _broken(file, "it is empty")
    if start == LFS_POINTER:
        raise _broken(file, "it is a git-lfs pointer, not the file that it points to (`git lfs pull` gets it)")
    if size < 8:
        raise _broken(file, f"it has {size} bytes, fewer than the 8 that hold the header's length")
    (length,) = struct.unpack("<Q", start[:8])
    if length > size - 8:
        raise _broken(file, f"its header claims {length} bytes, the file has {size}: truncated, or no safetensors")
    if length > HEADER_LIMIT:
        raise UnsafeCheckpointError(
            f"Reading {file}: its header claims {length} bytes, the limit is {HEADER_LIMIT}.",
            remedy="Take the checkpoint from a source you trust, or split the file into shards.",
        )
    return length


def decode_header(raw: bytes, file: str, size: int) -> Header:
    """The header of a file of `size` bytes out of its JSON part.

    Raises:
        BrokenCheckpointError: see `read_header`.
    """
    table = _parse(raw, file)
    metadata = _metadata(table.pop("__metadata__", {}), file)
    base = 8 + len(raw)
    entries = sorted(_entries(table, file, base), key=attrgetter("start", "end"))
    _check_layout(entries, file, base, size)
    return Header(tuple(entries), metadata, base, _digest(raw))


def encode_header(tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str]) -> bytes:
    """The header of a file that holds `tensors` (name, dtype, shape, bytes) end to end in that order.

    The length is padded with spaces to a multiple of 8, as the safetensors library does, so that tensors stay aligned.
    """
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, dtype, shape, nbytes in tensors:
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + nbytes]}
        start += nbytes
    raw = json.dumps(table, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def _header_bytes(path: Path, file: str) -> tuple[bytes, int]:
    """The JSON part, and the size of the whole file."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise _broken(file, "it is not a regular file")
    size = status.st_size
    with path.open("rb") as stream:
        length = header_length(stream.read(len(LFS_POINTER)), file, size)
        stream.seek(8)
        return stream.read(length), size


def _digest(raw: bytes) -> str:
    return hashlib.sha256(struct.pack("<Q", len(raw)) + raw).hexdigest()


def _parse(raw: bytes, file: str) -> dict[str, Any]:
    try:
        table = parse_object(raw, unique=True)
        refuse_controls(table)
    except (ValueError, RecursionError) as error:
        raise _broken(file, f"its header can't be used ({error})") from error
    return table


def _metadata(value: object, file: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in cast("dict[str, Any]", value).values()):
        raise _broken(file, "its __metadata__ is not a table of strings")
    return cast("dict[str, str]", value)


def _entries(table: Mapping[str, Any], file: str, base: int) -> Iterator[TensorEntry]:
    forms: dict[tuple[Any, ...], tuple[tuple[int, ...], int]] = {}  # few in a large file: each is checked once
    for name, row in table.items():
        try:
            dtype, shape, (start, end) = row["dtype"], row["shape"], row["data_offsets"]
            if type(dtype) is not str or dtype not in DTYPES:
                raise _broken(file, f"'{name}' has the unknown dtype {dtype!r}")
            form = forms.get(key := (dtype, *shape, *map(type, shape)))  # 1, 1.0 and true are equal
        except (TypeError, KeyError, ValueError) as error:
            raise _no_row(name, file) from error
        if form is None:
            form = forms[key] = _form(name, dtype, shape, file)
        shape, bits = form
        if type(start) is not int or type(end) is not int:
            raise _no_row(name, file)
        if start < 0 or not 0 <= end < LARGEST:
            raise _broken(file, f"the header's row of '{name}' holds an impossible size: {[start, end]}")
        if bits != 8 * (end - start):
            needs = f"'{name}' ({dtype} {list(shape)}) needs {-(-bits // 8)} bytes"
            raise _broken(file, f"{needs}, its range holds {end - start}")
        yield TensorEntry(name, dtype, shape, file, base + start, base + end)


def _form(name: str, dtype: str, shape: Any, file: str) -> tuple[tuple[int, ...], int]:
    """The shape, and the bits of a tensor of that dtype and shape."""
    if type(shape) is not list:
        raise _no_row(name, file)
    sizes = cast("list[Any]", shape)
    if len(sizes) > MAX_AXES or not {*map(type, sizes)} <= {int}:
        raise _no_row(name, file)
    if any(not 0 <= size < LARGEST for size in sizes):
        raise _broken(file, f"the header's row of '{name}' holds an impossible size: {sizes}")
    return tuple(sizes), DTYPES[dtype][0] * math.prod(sizes)


def _no_row(name: str, file: str) -> BrokenCheckpointError:
    return _broken(file, f"the header's row of '{name}' is not a dtype, a shape and two offsets")


def _check_layout(entries: Sequence[TensorEntry], file: str, base: int, size: int) -> None:
    """Ranges must tile the file behind the header, as every safetensors reader demands."""
    previous, at = "the header", base
    for entry in entries:
        if entry.end > size:
            raise _broken(file, f"'{entry.name}' ends at byte {entry.end}, the file has {size}: truncated")
        if entry.start != at:
            what = "overlap" if entry.start < at else "leave a gap"
            raise _broken(file, f"the bytes of '{entry.name}' and {previous} {what}")
        previous, at = f"'{entry.name}'", entry.end
    if at != size:
        raise _broken(file, f"{size - at} bytes at its end belong to no tensor")


def _broken(file: str, fault: str) -> BrokenCheckpointError:
    return BrokenCheckpointError(
        f"{file}: {fault}.", remedy="Download the file again, or restore it from the original checkpoint."
    )
