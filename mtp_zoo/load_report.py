"""What a load did, and what a later export has to know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mtp_zoo.copies import Comparison
from mtp_zoo.keymap import Binding


@dataclass(frozen=True)
class LoadedTensor:
    """One native tensor that was read."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str


@dataclass(frozen=True)
class LoadReport:
    """What `load_head` did; `print` shows it as a table.

    Attributes:
        source, family, depths: where from and what.
        tensors: every native tensor read.
        skipped: native names left alone, with the reason.
        copies: of those that repeat a tensor of the target, whether they equal it.
        initialised: head tensors that hold random values because that was asked for.
        notices: contradictions in the checkpoint that did not stop the load.
        bytes_read: bytes of headers and tensors that were read; with a mesh, by this rank.
        bytes_moved: bytes that came over the network for that; those that had come before are kept on this machine.
    """

    source: str
    family: str
    depths: int
    tensors: tuple[LoadedTensor, ...]
    skipped: Mapping[str, str]
    copies: Mapping[str, Comparison]
    initialised: tuple[str, ...]
    notices: tuple[str, ...]
    bytes_read: int
    bytes_moved: int = 0

    @property
    def head_bytes(self) -> int:
        """Stored size of the head."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def __str__(self) -> str:
        from mtp_zoo.tables import render_table

        rows = [(t.name, t.dtype, "x".join(map(str, t.shape)), f"{t.nbytes:,}", t.file) for t in self.tensors]
        rows += [(name, "", "", "", "random, not read") for name in self.initialised]
        rows += [(name, "", "", "", f"skipped: {self._because(name)}") for name in self.skipped]
        title = (
            f"{self.family}, {self.depths} depth(s), {self.head_bytes:,} bytes of head, {self.bytes_read:,} bytes read"
        )
        table = render_table(title, ("tensor", "dtype", "shape", "bytes", "file"), rows, right=(2, 3))
        return "\n".join([table, *(f"notice: {notice}" for notice in self.notices)])

    def _because(self, name: str) -> str:
        compared = self.copies.get(name)
        return self.skipped[name] + (f"; {compared}" if compared else "")


@dataclass(frozen=True)
class Origin:
    """What an export needs to know of where the head came from.

    Attributes:
        root: directory of the checkpoint.
        bindings: the stored layout.
        dtypes: stored dtype (safetensors' spelling) of every head tensor, by canonical name.
    """

    root: Path
    bindings: tuple[Binding, ...]
    dtypes: Mapping[str, str]
