"""The header parser: reads what safetensors reads, refuses what safetensors refuses, and says why."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from mtp_zoo.errors import BrokenCheckpointError, UnsafeCheckpointError, UnsupportedQuantizationError
from mtp_zoo.safetensors_header import DTYPES, HEADER_LIMIT, encode_header, read_header, stored_dtype, torch_dtype

FILE = "model.safetensors"


def row(dtype: object = "BF16", shape: object = (2,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write_raw(directory: Path, header: object, data: bytes = b"\0" * 4, length: int | None = None) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (directory / FILE).write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)


def test_entries_have_absolute_ranges_in_byte_order(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(3, dtype=torch.int64), "a": torch.ones(2, 2, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    header = read_header(tmp_path, FILE)
    assert header.metadata == {"format": "pt"}
    assert [(e.name, e.dtype, e.shape, e.nbytes) for e in header.entries] == [
        ("b", "I64", (3,), 24),
        ("a", "BF16", (2, 2), 8),
    ]
    assert header.entries[0].start == header.nbytes
    assert header.entries[1].end == (tmp_path / FILE).stat().st_size


def test_names_may_hold_colons(tmp_path: Path) -> None:
    write_raw(tmp_path, {"a:b": row(), "c::": row(offsets=[4, 8])}, b"\0" * 8)
    assert [entry.name for entry in read_header(tmp_path, FILE).entries] == ["a:b", "c::"]


@pytest.mark.parametrize("stored", sorted(name for name, (_, known) in DTYPES.items() if known))
def test_dtype_table_agrees_with_safetensors_both_ways(tmp_path: Path, stored: str) -> None:
    dtype = torch_dtype(stored)
    save_file({"x": torch.zeros(3, dtype=dtype)}, tmp_path / FILE)
    (entry,) = read_header(tmp_path, FILE).entries
    assert (entry.dtype, entry.nbytes) == (stored, 3 * dtype.itemsize)
    assert stored_dtype(dtype) == stored


def test_dtypes_that_torch_or_safetensors_lacks_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedQuantizationError, match="'F6_E2M3'"):
        torch_dtype("F6_E2M3")
    with pytest.raises(UnsupportedQuantizationError, match=r"torch\.complex128"):
        stored_dtype(torch.complex128)


BROKEN = {
    "not_json": (b"{nope", b"", "header can't be used"),
    "not_utf8": (b'{"\xff": 1}', b"", "header can't be used"),
    "nested_too_deep": (b"[" * 100_000, b"", "header can't be used"),
    "a_number_too_long_to_parse": (b'{"a": ' + b"9" * 5000 + b"}", b"", "header can't be used"),
    "not_an_object": ([1], b"", "header can't be used"),
    "name_twice": (b'{"a": 1, "a": 2}', b"", "'a' occurs twice"),
    "name_twice_beside_names_with_colons": (b'{"x::y": 1, "a": 1, "a": 2}', b"", "'a' occurs twice"),
    "field_twice_in_a_list": (b'[{"a": 1, "a": 2}]', b"", "'a' occurs twice"),
    "field_twice": (b'{"a": {"dtype": "U8", "dtype": "I8"}}', b"", "'dtype' occurs twice"),
    "name_with_a_lone_surrogate": (b'{"\\ud800": 1}', b"", "not valid Unicode"),
    "row_is_a_number": ({"a": 1}, b"", "'a' is not a dtype, a shape and two offsets"),
    "row_lacks_offsets": ({"a": {"dtype": "U8", "shape": []}}, b"", "'a' is not a dtype"),
    "three_offsets": ({"a": row(offsets=[0, 2, 4])}, b"\0" * 4, "'a' is not a dtype"),
    "shape_is_a_table": ({"a": row(shape={})}, b"\0" * 4, "'a' is not a dtype"),
    "shape_with_a_bool": ({"a": row(shape=[True, 2])}, b"\0" * 4, "'a' is not a dtype"),
    "shape_with_a_float": ({"a": row(shape=[2.0])}, b"\0" * 4, "'a' is not a dtype"),
    "bool_in_a_shape_like_an_earlier_one": (
        {"a": row(shape=[1, 2]), "b": row(shape=[True, 2], offsets=[4, 8])},
        b"\0" * 8,
        "'b' is not a dtype",
    ),
    "float_in_a_shape_like_an_earlier_one": (
        {"a": row(), "b": row(shape=[2.0], offsets=[4, 8])},
        b"\0" * 8,
        "'b' is not a dtype",
    ),
    "shape_with_too_many_axes": ({"a": row(shape=[1] * 65)}, b"\0" * 4, "'a' is not a dtype"),
    "negative_size": ({"a": row(shape=[-2], offsets=[0, 4])}, b"\0" * 4, "impossible size"),
    "size_beyond_64_bits": ({"a": row(shape=[2**64])}, b"\0" * 4, "impossible size"),
    "offsets_backwards": ({"a": row(offsets=[4, 0])}, b"\0" * 4, "needs 4 bytes, its range holds -4"),
    "unknown_dtype": ({"a": row(dtype="Q4_K")}, b"\0" * 4, "unknown dtype 'Q4_K'"),
    "dtype_is_a_list": ({"a": row(dtype=["BF16"])}, b"\0" * 4, "unknown dtype"),
    "wrong_byte_count": ({"a": row(shape=[3])}, b"\0" * 4, r"'a' \(BF16 \[3\]\) needs 6 bytes, its range holds 4"),
    "range_past_the_end": ({"a": row(shape=[4], offsets=[0, 8])}, b"\0" * 4, "'a' ends at byte .* truncated"),
    "overlap": ({"a": row(), "b": row(offsets=[2, 6])}, b"\0" * 6, "'b' and 'a' overlap"),
    "gap": ({"a": row(), "b": row(offsets=[6, 10])}, b"\0" * 10, "'b' and 'a' leave a gap"),
    "gap_behind_the_header": ({"a": row(offsets=[2, 6])}, b"\0" * 6, "'a' and the header leave a gap"),
    "bytes_of_no_tensor": ({"a": row()}, b"\0" * 7, "3 bytes at its end belong to no tensor"),
    "metadata_is_a_list": ({"__metadata__": []}, b"", "__metadata__ is not a table of strings"),
    "metadata_holds_a_number": ({"__metadata__": {"a": 1}}, b"", "__metadata__ is not a table of strings"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_header_is_refused_with_its_reason(tmp_path: Path, name: str) -> None:
    header, data, reason = BROKEN[name]
    write_raw(tmp_path, header, data)
    with pytest.raises(BrokenCheckpointError, match=f"^{FILE}: .*{reason}"):
        read_header(tmp_path, FILE)
    with pytest.raises((SafetensorError, ValueError)), safe_open(tmp_path / FILE, "pt") as opened:
        opened.keys()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"\1\2\3", "it has 3 bytes, fewer than the 8"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n", "git-lfs pointer.*git lfs pull"),
        (b"\0" * 64, "header can't be used"),
        (struct.pack("<Q", 100) + b"{}", "header claims 100 bytes, the file has 10"),
    ],
)
def test_file_that_is_no_safetensors_file_is_refused_with_its_reason(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(BrokenCheckpointError, match=f"^{FILE}: .*{reason}"):
        read_header(tmp_path, FILE)


def test_what_is_no_regular_file_is_refused_without_opening_it(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / FILE)  # opening it would block for ever
    with pytest.raises(BrokenCheckpointError, match="not a regular file"):
        read_header(tmp_path, FILE)


def test_header_that_claims_a_terabyte_is_refused_without_allocating(tmp_path: Path) -> None:
    """https://github.com/safetensors/safetensors/issues/668"""
    write_raw(tmp_path, {}, length=2**40)
    with pytest.raises(BrokenCheckpointError, match=f"{FILE}: its header claims {2**40} bytes"):
        read_header(tmp_path, FILE)


def test_header_over_the_limit_is_refused_also_where_the_file_is_that_large(tmp_path: Path) -> None:
    """https://github.com/safetensors/safetensors/issues/668"""
    write_raw(tmp_path, {}, length=HEADER_LIMIT + 1)
    with (tmp_path / FILE).open("r+b") as file:
        file.truncate(HEADER_LIMIT + 4096)  # sparse: takes no space
    with pytest.raises(UnsafeCheckpointError, match=f"limit is {HEADER_LIMIT}"):
        read_header(tmp_path, FILE)


def test_encoded_header_is_read_back_by_safetensors(tmp_path: Path) -> None:
    parts = {"b.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3), "ä": torch.tensor(7, dtype=torch.uint8)}
    header = encode_header(
        [(name, stored_dtype(t.dtype), t.shape, t.nbytes) for name, t in parts.items()], {"format": "pt"}
    )
    assert len(header) % 8 == 0
    data = b"".join(t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in parts.values())
    (tmp_path / FILE).write_bytes(header + data)
    loaded = load_file(tmp_path / FILE)
    assert loaded.keys() == parts.keys()
    assert all(torch.equal(loaded[name], parts[name]) for name in parts)
    with safe_open(tmp_path / FILE, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 10_000), value=st.integers(0, 255))
@example(at=0, value=255)
def test_one_changed_byte_is_never_read_more_loosely_than_by_safetensors(tmp_path: Path, at: int, value: int) -> None:
    save_file({"a.weight": torch.ones(2, 2), "b.weight": torch.ones(3)}, tmp_path / FILE, metadata={"format": "pt"})
    content = bytearray((tmp_path / FILE).read_bytes())
    content[at % (len(content) - 28)] = value
    (tmp_path / FILE).write_bytes(content)
    try:
        ours = {(e.name, e.dtype, e.shape) for e in read_header(tmp_path, FILE).entries}
    except BrokenCheckpointError:
        return
    with safe_open(tmp_path / FILE, "pt") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
        assert ours == {(name, part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
