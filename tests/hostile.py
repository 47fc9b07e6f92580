"""Checkpoints made to harm who opens them: each a change to a good one, the error that it must end in, and what that says."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_zoo.checkpoint import INDEX_NAME
from mtp_zoo.errors import BrokenCheckpointError, ModelConfigError, MTPZooError, UnsafeCheckpointError
from mtp_zoo.index_file import INDEX_LIMIT
from mtp_zoo.modelconfig import CONFIG_LIMIT
from mtp_zoo.safetensors_header import HEADER_LIMIT
from tests.exporting import CONFIG, FC, HEAD, TENSORS, TRUNK
from tests.tiny import write_checkpoint

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
BORROWED = ("model.embed_tokens.weight", "model.norm.weight")
SPLIT = {ONE: [name for name in TRUNK if name not in BORROWED], TWO: [*HEAD, *BORROWED]}
SECRET = "secret.json"
"""A file beside the checkpoint's directory, which no link may reach."""

Change = Callable[[Path], None]


@dataclass(frozen=True)
class Hostile:
    """One way to harm.

    Attributes:
        change: does it to a good checkpoint.
        error: what every reader of the head must raise.
        says: a part of the message, as a regular expression.
    """

    change: Change
    error: type[MTPZooError]
    says: str


def good_checkpoint(directory: Path) -> Path:
    """What the changes are made to: a shard of layers, one of the head and what it borrows, an index; beside it, a secret."""
    (directory.parent / SECRET).write_text(json.dumps(CONFIG))
    return write_checkpoint(directory, CONFIG, TENSORS, shards=SPLIT)


def _header(edit: Callable[[dict[str, Any]], None]) -> Change:
    """The head's shard with another header in front of the same bytes."""

    def change(root: Path) -> None:
        content = (root / TWO).read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        table = json.loads(content[8 : 8 + length])
        edit(table)
        raw = json.dumps(table).encode()
        (root / TWO).write_bytes(struct.pack("<Q", len(raw)) + raw + content[8 + length :])

    return change


def _row(**fields: Any) -> Change:
    return _header(lambda table: table[FC].update(fields))


def _shift(table: dict[str, Any], by: int) -> None:
    start, end = table[FC]["data_offsets"]
    table[FC]["data_offsets"] = [start + by, end + by]


def _content(file: str, content: bytes) -> Change:
    return lambda root: (root / file).write_bytes(content) and None


def _sparse(file: str, start: bytes, size: int) -> Change:
    """A file that claims much and takes no space."""

    def change(root: Path) -> None:
        (root / file).write_bytes(start)
        os.truncate(root / file, size)

    return change


def _mapped(place: str) -> Change:
    """An index that puts the head's fusion and the embedding somewhere else."""

    def change(root: Path) -> None:
        content = json.loads((root / INDEX_NAME).read_text())
        content["weight_map"] |= {FC: place, BORROWED[0]: place}
        (root / INDEX_NAME).write_text(json.dumps(content))

    return change


def _replaced(file: str, make: Callable[[Path], object]) -> Change:
    def change(root: Path) -> None:
        (root / file).unlink()
        make(root / file)

    return change


def _linked(file: str, target: str) -> Change:
    return _replaced(file, lambda place: os.symlink(target, place))


def _moved_out(file: str) -> Change:
    """A link to a good file of the same bytes, outside of the directory."""

    def change(root: Path) -> None:
        (root / file).rename(root.parent / f"moved-{file}")
        os.symlink(f"../moved-{file}", root / file)

    return change


def _linked_folder(root: Path) -> None:
    (root.parent / "folder").mkdir()
    (root / TWO).rename(root.parent / "folder" / TWO)
    os.symlink("../folder", root / "folder")
    (root / INDEX_NAME).write_text((root / INDEX_NAME).read_text().replace(f'"{TWO}"', f'"folder/{TWO}"'))


def _only_pickles(root: Path) -> None:
    for name in (ONE, TWO, INDEX_NAME):
        (root / name).unlink()
    (root / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch harmed'\ntR.")


def _two_of_one_name(root: Path) -> None:
    """json.dumps can't write a name twice."""
    row = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    raw = b"{" + row + b"," + row + b"}"
    (root / TWO).write_bytes(struct.pack("<Q", len(raw)) + raw + b"\0")


def _configured(**fields: Any) -> Change:
    return lambda root: (root / "config.json").write_text(json.dumps({**CONFIG, **fields})) and None


def _framed(raw: bytes) -> Change:
    return _content(TWO, struct.pack("<Q", len(raw)) + raw)


BOMB = b'{"a":[' + b"[]," * (1 << 20) + b"0]}"
"""3 MiB of text that would become 64 MiB of lists."""

DEEP = b'{"weight_map":' + b"[" * 200_000
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"

FILES = {
    "pickles alone": Hostile(_only_pickles, UnsafeCheckpointError, "pickled.*run code"),
    "a pickle in the index": Hostile(_mapped("pytorch_model.bin"), UnsafeCheckpointError, "a pickle"),
    "a pickle named safetensors": Hostile(_content(TWO, b"\x80\x04\x95" + b"." * 64), BrokenCheckpointError, TWO),
    "a zip named safetensors": Hostile(_content(TWO, b"PK\3\4" + b"\0" * 64), BrokenCheckpointError, TWO),
    "an LFS pointer": Hostile(_content(TWO, LFS), BrokenCheckpointError, "git-lfs pointer"),
    "an index that is an LFS pointer": Hostile(_content(INDEX_NAME, LFS), BrokenCheckpointError, "git-lfs pointer"),
    "an empty file": Hostile(_content(TWO, b""), BrokenCheckpointError, "it is empty"),
    "a pipe": Hostile(_replaced(TWO, os.mkfifo), BrokenCheckpointError, "not a regular file"),
    "a pipe for an index": Hostile(_replaced(INDEX_NAME, os.mkfifo), BrokenCheckpointError, "not a regular file"),
    "a pipe for a config": Hostile(_replaced("config.json", os.mkfifo), ModelConfigError, "not a regular file"),
    "a folder for an index": Hostile(_replaced(INDEX_NAME, Path.mkdir), BrokenCheckpointError, "not a regular file"),
    "a folder for a config": Hostile(_replaced("config.json", Path.mkdir), ModelConfigError, "not a regular file"),
}

LINKS = {
    "a link to a device": Hostile(_linked(TWO, "/dev/zero"), UnsafeCheckpointError, "/dev/zero"),
    "a link to an endless config": Hostile(_linked("config.json", "/dev/zero"), UnsafeCheckpointError, "/dev/zero"),
    "a link to an endless index": Hostile(
        _linked(INDEX_NAME, "/dev/zero"), BrokenCheckpointError, "not a regular file"
    ),
    "a link to a good shard outside": Hostile(_moved_out(TWO), UnsafeCheckpointError, f"moved-{TWO}"),
    "a link to a trunk shard outside": Hostile(_moved_out(ONE), UnsafeCheckpointError, f"moved-{ONE}"),
    "a link to a config outside": Hostile(_linked("config.json", f"../{SECRET}"), UnsafeCheckpointError, SECRET),
    "a link to an index outside": Hostile(_moved_out(INDEX_NAME), UnsafeCheckpointError, f"moved-{INDEX_NAME}"),
    "a linked folder": Hostile(_linked_folder, UnsafeCheckpointError, "outside the checkpoint's directory"),
    "a link to itself": Hostile(_linked(TWO, TWO), BrokenCheckpointError, TWO),
}

PATHS = {
    f"the path {place!r}": Hostile(_mapped(place), UnsafeCheckpointError, "outside the checkpoint's directory")
    for place in (
        f"../{SECRET}",
        f"sub/../../{SECRET}",
        "/etc/passwd",
        "..\\model.safetensors",
        "C:\\model.safetensors",
        "model.safetensors\0.txt",
        "\x1b[2J.safetensors",
        "..",
        ".",
    )
} | {
    "a path of a million letters": Hostile(_mapped("a" * 1_000_000), UnsafeCheckpointError, "1000000 letters"),
    "a path of a thousand folders": Hostile(_mapped("a/" * 1000 + "b"), UnsafeCheckpointError, "2001 letters"),
    "a name too long for a file": Hostile(_mapped("a" * 300), BrokenCheckpointError, "not on disk|listed weight file"),
}

HEADERS = {
    "a length of a terabyte": Hostile(_content(TWO, struct.pack("<Q", 2**40) + b"{}"), BrokenCheckpointError, "claims"),
    "a length of 2^64 - 1": Hostile(_content(TWO, b"\xff" * 8 + b"{}"), BrokenCheckpointError, "header claims"),
    "a header over the limit": Hostile(
        _sparse(TWO, struct.pack("<Q", HEADER_LIMIT + 1) + b"{}", HEADER_LIMIT + 4096), UnsafeCheckpointError, "limit"
    ),
    "a header that fills the memory": Hostile(_framed(BOMB), BrokenCheckpointError, "lists and tables in"),
    "a deep header": Hostile(_framed(DEEP), BrokenCheckpointError, "header can't be used"),
    "tensors that overlap": Hostile(_header(lambda table: _shift(table, -2)), BrokenCheckpointError, "overlap|gap"),
    "a gap between tensors": Hostile(_header(lambda table: _shift(table, 2)), BrokenCheckpointError, "overlap|gap"),
    "a tensor behind the end": Hostile(_header(lambda table: _shift(table, 2**40)), BrokenCheckpointError, "gap"),
    "a tensor before the start": Hostile(_row(data_offsets=[-16384, 0]), BrokenCheckpointError, "impossible size"),
    "a tensor that ends before it starts": Hostile(_row(data_offsets=[16384, 0]), BrokenCheckpointError, "needs 16384"),
    "a name twice in a header": Hostile(_two_of_one_name, BrokenCheckpointError, "'a' occurs twice"),
    "a shape of 2^70": Hostile(_row(shape=[2**70]), BrokenCheckpointError, "impossible size"),
    "a shape whose product is 0 times 2^62": Hostile(_row(shape=[0, 2**62]), BrokenCheckpointError, "needs 0 bytes"),
    "a shape that wraps to the right size": Hostile(_row(shape=[2**32, 2**32, 8192]), BrokenCheckpointError, "needs"),
    "a shape with NaN": Hostile(_row(shape=[math.nan]), BrokenCheckpointError, "not a dtype, a shape"),
    "a shape of texts": Hostile(_row(shape=["64", "128"]), BrokenCheckpointError, "not a dtype, a shape"),
    "a dtype that is a table": Hostile(_row(dtype={}), BrokenCheckpointError, "unknown dtype"),
    "half a character for a name": Hostile(
        _header(lambda table: table.update({"\ud800": table.pop(FC)})), BrokenCheckpointError, "valid Unicode"
    ),
    "a name that steers the terminal": Hostile(
        _header(lambda table: table.update({"mtp.\x1b[2J": table.pop(FC)})), BrokenCheckpointError, "control character"
    ),
    "metadata that is no text": Hostile(
        _header(lambda table: table.update(__metadata__={"a": [1]})), BrokenCheckpointError, "__metadata__"
    ),
}

TEXTS = {
    "an index that fills the memory": Hostile(_content(INDEX_NAME, BOMB), BrokenCheckpointError, "lists and tables"),
    "an index over the limit": Hostile(_sparse(INDEX_NAME, b"{", INDEX_LIMIT + 1), BrokenCheckpointError, "the limit"),
    "a deep index": Hostile(_content(INDEX_NAME, DEEP), BrokenCheckpointError, "recursion"),
    "a number of a million digits in an index": Hostile(
        _content(INDEX_NAME, b'{"weight_map":' + b"9" * 1_000_000 + b"}"), BrokenCheckpointError, "digits"
    ),
    "an index with a name that steers the terminal": Hostile(
        _content(INDEX_NAME, b'{"weight_map":{"\\u001b[2J":"a.safetensors"}}'),
        BrokenCheckpointError,
        "control character",
    ),
    "an index that is a list": Hostile(_content(INDEX_NAME, b"[]"), BrokenCheckpointError, "expected an object"),
    "an index with a name twice": Hostile(
        _content(INDEX_NAME, b'{"weight_map":{"a":"b","a":"c"}}'), BrokenCheckpointError, "'a' occurs twice"
    ),
    "half a character in an index": Hostile(
        _content(INDEX_NAME, b'{"weight_map":{"\\ud800":"a.safetensors"}}'), BrokenCheckpointError, "valid Unicode"
    ),
    "a config over the limit": Hostile(_sparse("config.json", b"{", CONFIG_LIMIT + 1), ModelConfigError, "the limit"),
    "a deep config": Hostile(_content("config.json", DEEP), ModelConfigError, "recursion"),
    "a config that fills the memory": Hostile(_content("config.json", BOMB), ModelConfigError, "lists and tables"),
    "half a character in a config": Hostile(_configured(model_type="\ud800"), ModelConfigError, "valid Unicode"),
    "a config of NaN": Hostile(_content("config.json", b"NaN"), ModelConfigError, "expected an object"),
}

NUMBERS = {
    f"{field} = {str(value)[:20]}": Hostile(_configured(**{field: value}), ModelConfigError, says or field)
    for field, value, says in (
        ("hidden_size", 10**12, ""),
        ("head_dim", 10**10, ""),
        ("intermediate_size", 10**30, ""),
        ("num_attention_heads", 10**9, ""),
        ("num_experts", 10**6, ""),
        ("hidden_size", -64, ""),
        ("hidden_size", 0, ""),
        ("hidden_size", "64", ""),
        ("hidden_size", math.nan, ""),
        ("rms_norm_eps", "tiny", ""),
        ("mtp_num_hidden_layers", -1, ""),
        ("rope_parameters", {"rope_theta": math.nan}, "rope_theta"),
        ("rope_parameters", {"rope_theta": 10**4, "partial_rotary_factor": 1e12}, "partial_rotary_factor"),
    )
}
"""Configs that no head can be built from."""

CORPUS: dict[str, Hostile] = FILES | LINKS | PATHS | HEADERS | TEXTS
"""What no reader may open."""
