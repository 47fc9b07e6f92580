"""A head that is sharded while it is read, and written while it is sharded, on two real ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import mtp_zoo as mz
from mtp_zoo import sharded_export
from mtp_zoo.checkpoint import CheckpointIndex
from mtp_zoo.errors import ParallelError, SettingsError
from mtp_zoo.head import DraftHead
from mtp_zoo.objective import MTPObjective
from mtp_zoo.parallel import own_rows, own_values, shard_head
from mtp_zoo.storage import ByteRange, LocalStorage
from tests.allocations import PeakBytes
from tests.exporting import make_base, snapshot, train
from tests.heads import HIDDEN
from tests.parallel.batches import batch, row
from tests.parallel.ranks import on_ranks
from tests.quantizing import BLOCKS, ROWS, Storage, make_fp8
from tests.stored_forms import Form, make
from tests.tiny import tiny_config, tiny_tensors, write_checkpoint

RANKS = 2
SMALL = 20_000
"""Bytes of tensors that an export makes beside the one it writes: frequencies of a rotary embedding, messages between ranks."""

STORED = 1.5
"""What the first rank holds at a time, over the largest FP32 tensor: that, whole, and the BF16 that is stored of it."""


@dataclass(frozen=True)
class Case:
    """A checkpoint, how it is loaded, and which share of a stored tensor a rank may read beyond its own rows.

    Attributes:
        form, storage: how it is stored; without a form, it is the tiny one.
        fields: of its config.
        dtype: of the head.
        extra: rows of every FP8 matrix that both ranks read, since a block of scales lies across the cut.
    """

    form: Form | None = None
    storage: Storage | None = None
    fields: tuple[tuple[str, Any], ...] = ()
    dtype: torch.dtype | None = torch.float32
    extra: int = 0

    def write(self, folder: Path) -> Path:
        if self.form is None:
            config = tiny_config(**dict(self.fields))
            return write_checkpoint(folder, config, tiny_tensors(config), shards=3)
        config, tensors = make(self.form) if self.storage is None else make_fp8(self.form, self.storage)
        return write_checkpoint(folder, config, tensors, shards=3)


CASES = {
    "as stored": Case(dtype=None),
    "rows that two does not divide": Case(fields=(("intermediate_size", 129),)),
    "fewer rows than ranks, experts one by one": Case(Form("qwen3_5_moe", "one_by_one")),
    "experts packed": Case(Form("qwen3_5_moe", "packed")),
    "a router bias that is not sharded, copies": Case(Form("deepseek_v3", "one_by_one", copies=True)),
    "FP8 blocks": Case(Form("deepseek_v3", "one_by_one"), BLOCKS, extra=24),
    "FP8 blocks, experts packed": Case(Form("qwen3_5_moe", "packed"), BLOCKS, extra=24),
    "FP8 rows": Case(Form("qwen3_5_moe", "one_by_one"), ROWS),
}


def bits(value: Tensor) -> Tensor:
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def different(left: DraftHead, right: DraftHead) -> list[str]:
    """Names of tensors of which two heads hold other bytes, rows, dtypes or placements."""
    ours, theirs = left.weights(), right.weights()
    assert ours.keys() == theirs.keys()
    return [
        name
        for name, value in ours.items()
        if (value.dtype, value.shape, own_rows(value))
        != (theirs[name].dtype, theirs[name].shape, own_rows(theirs[name]))
        or not torch.equal(bits(own_values(value)), bits(own_values(theirs[name])))
        or getattr(value, "placements", None) != getattr(theirs[name], "placements", None)
        or value.requires_grad != theirs[name].requires_grad
    ]


def train_own_rows(head: DraftHead, seed: int = 1) -> DraftHead:
    """What `train` does to a plain head, to the rows of a sharded one."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        noise, rows = torch.randn(parameter.shape, generator=generator).to(parameter.dtype), own_rows(parameter)
        own_values(parameter).add_(noise[rows.start : rows.stop])
    return head


def a_step(head: DraftHead) -> list[Tensor]:
    """The loss of a batch, and this rank's gradients."""
    shared = mz.SharedTensors(torch.nn.Embedding(128, HIDDEN), torch.nn.Linear(HIDDEN, 128, bias=False))
    with torch.no_grad():
        for parameter in (shared.embedding.weight, shared.lm_head.weight):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    tokens, hidden = batch([row(9, 4)])
    loss = MTPObjective(head.attach(shared), depths=2, loss="ce")(tokens, hidden).loss
    loss.backward()
    return [loss.detach(), *(own_values(p.grad) for p in head.parameters() if p.grad is not None)]


def own_bytes(head: DraftHead) -> int:
    """Stored bytes of a float head's rows on this rank."""
    sizes = {"BF16": 2, "F32": 4}
    return sum(own_values(value).numel() * sizes[head.origin.dtypes[name]] for name, value in head.weights().items())


def _read(root: str, case: Case, mesh: Any) -> dict[str, Any]:
    fetched: list[ByteRange] = []
    fetch = LocalStorage.fetch
    LocalStorage.fetch = lambda self, ranges: fetched.extend(ranges)
    try:
        head = mz.load_head(root, dtype=case.dtype, trainable=("attention", "norms"), mesh=mesh)
    finally:
        LocalStorage.fetch = fetch
    whole = mz.load_head(root, dtype=case.dtype, trainable=("attention", "norms"))
    report = head.report
    return {
        "different": different(head, shard_head(whole, mesh)),
        "sharded": sum(isinstance(value, DTensor) for value in head.weights().values()),
        "plain": [name for name, value in head.weights().items() if not isinstance(value, DTensor)],
        "bytes": report.bytes_read - CheckpointIndex.open(root).header_bytes,
        "fetched": sum(end - start for _, start, end in fetched),
        "own bytes": own_bytes(head),
        "report": (report.tensors, dict(report.skipped), {n: str(c) for n, c in report.copies.items()}),
        "expected report": (whole.report.tensors, dict(whole.report.skipped), _copies(whole)),
        "head bytes": report.head_bytes,
        "origin": head.origin == whole.origin,
    }


def _copies(head: DraftHead) -> dict[str, str]:
    return {name: str(compared) for name, compared in head.report.copies.items()}


def _failure(act: Callable[[], Any]) -> tuple[str, str] | None:
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def _spoilt(head: DraftHead) -> DraftHead:
    """NaN in rows of the second rank only."""
    if torch.distributed.get_rank() == 1:
        own_values(head.get_parameter("depths.0.block.self_attn.o_proj.weight")).fill_(torch.nan)
    return head


def _broken_gather(head: DraftHead, root: str, out: str) -> tuple[str, str] | None:
    """An export while the second rank can't read its own rows."""
    kept = sharded_export.own_values
    if torch.distributed.get_rank() == 1:
        sharded_export.own_values = _no_rows
    try:
        return _failure(lambda: mz.export(head, root, out))
    finally:
        sharded_export.own_values = kept


def _no_rows(_value: Tensor) -> Tensor:
    raise ValueError("no rows today")


def _everything(rank: int, folder: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (RANKS,))
    roots = {name: f"{folder}/{number}" for number, name in enumerate(CASES)}
    found: dict[str, Any] = {name: _read(roots[name], case, mesh) for name, case in CASES.items()}
    odd, fp8, packed = roots["rows that two does not divide"], roots["FP8 rows"], roots["experts packed"]
    steps = [a_step(head) for head in (mz.load_head(odd, dtype=torch.float32, mesh=mesh), _sharded(odd, mesh))]
    found["step"] = steps
    found["random"] = different(
        mz.load_head(odd, init="random", dtype=torch.float32, seed=3, mesh=mesh),
        shard_head(mz.load_head(odd, init="random", dtype=torch.float32, seed=3), mesh),
    )
    found["broken"] = _failure(lambda: mz.load_head(f"{folder}/broken{rank}", mesh=mesh))
    found["mixed"] = _failure(lambda: mz.load_head(f"{folder}/mixed", mesh=mesh))
    head = mz.load_head(fp8, dtype=torch.float32, mesh=mesh)
    found["no rows"] = _broken_gather(head, fp8, f"{folder}/no-rows")
    found["not finite"] = _failure(lambda: mz.export(_spoilt(head), fp8, f"{folder}/not-finite"))
    for name in ("odd", "packed"):
        head = train_own_rows(mz.load_head(odd if name == "odd" else packed, dtype=torch.float32, mesh=mesh))
        with PeakBytes() as seen:
            own = sum(own_values(value).nbytes for value in head.weights().values())  # seen, so that it is counted
            found[f"{name} export"] = mz.export(head, odd if name == "odd" else packed, f"{folder}/{name}-sharded")
        found[f"{name} peak"] = seen.peak - own
        found[f"{name} largest"] = max(value.numel() * value.itemsize for value in head.weights().values())
    return found


def _sharded(root: str, mesh: Any) -> DraftHead:
    return shard_head(mz.load_head(root, dtype=torch.float32), mesh)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for number, case in enumerate(CASES.values()):
        case.write(folder / str(number))
    config, tensors = tiny_config(), tiny_tensors(tiny_config())
    write_checkpoint(folder / "mixed", config, tensors | {"mtp.norm.weight": tensors["mtp.norm.weight"].float()})
    for rank in range(RANKS):
        shutil.copytree(folder / "0", folder / f"broken{rank}")
    last = folder / "broken1" / "model-00003-of-00003.safetensors"
    last.write_bytes(last.read_bytes()[:-1])
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(_everything, tmp_path_factory.mktemp("ranks"), str(folder), size=RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_reading_a_part_is_loading_and_sharding(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        found = rank[name]
        assert found["different"] == []
        assert found["sharded"] > 10
        assert found["report"] == found["expected report"]
        assert found["origin"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.storage is None])
def test_a_rank_reads_its_own_rows_and_nothing_else(ranks: list[dict[str, Any]], name: str) -> None:
    """The ranges that it announces are what a checkpoint on the Hub would send."""
    for number, rank in enumerate(ranks):
        found = rank[name]
        compared = 0
        if "copies" in name:  # the first rank alone compares copies with what they repeat
            assert len(found["report"][2]) == 2
            compared = found["bytes"] - found["own bytes"]
            assert (compared > 0) == (number == 0)
        assert found["bytes"] - compared == found["own bytes"] <= found["fetched"] <= found["bytes"]
    whole = ranks[0][name]["head bytes"]
    assert all(rank[name]["own bytes"] < 0.55 * whole for rank in ranks)
    assert sum(rank[name]["own bytes"] for rank in ranks) >= whole


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.storage is not None])
def test_of_fp8_a_rank_reads_the_blocks_that_hold_its_rows(ranks: list[dict[str, Any]], name: str) -> None:
    both = sum(rank[name]["bytes"] for rank in ranks)
    tensors, _, _ = ranks[0][name]["report"]
    shared = sum(t.nbytes for t in tensors if len(t.shape) == 1) + sum(
        CASES[name].extra * t.shape[1] for t in tensors if t.dtype == "F8_E4M3" and len(t.shape) == 2
    )
    scales = sum(t.nbytes for t in tensors if "_scale" in t.name)
    whole = ranks[0][name]["head bytes"]
    assert whole <= both <= whole + shared + scales
    assert all(rank[name]["bytes"] == rank[name]["fetched"] < 0.75 * whole for rank in ranks)


@pytest.mark.slow
def test_what_is_not_sharded_is_read_by_every_rank(ranks: list[dict[str, Any]]) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/8358"""
    for rank in ranks:
        plain = rank["a router bias that is not sharded, copies"]["plain"]
        assert [name.rpartition(".")[2] for name in plain] == ["e_score_correction_bias"]
        assert rank["as stored"]["plain"] == []


@pytest.mark.slow
def test_a_step_of_either_is_the_same(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        ours, theirs = rank["step"]
        assert len(ours) > 10
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert all(bool(a.isfinite().all()) for a in ours)


@pytest.mark.slow
def test_a_new_head_is_sharded_too(ranks: list[dict[str, Any]]) -> None:
    assert [rank["random"] for rank in ranks] == [[], []]


@pytest.mark.slow
def test_where_one_rank_cannot_read_all_raise_its_error(ranks: list[dict[str, Any]]) -> None:
    (kind, first), (other, second) = (rank["broken"] for rank in ranks)
    assert kind == other == "BrokenCheckpointError"
    assert "model-00003-of-00003.safetensors" in second
    assert first == f"On rank 1: {second}"


@pytest.mark.slow
def test_floats_of_several_dtypes_are_refused_before_anything_is_read(ranks: list[dict[str, Any]]) -> None:
    for kind, message in (rank["mixed"] for rank in ranks):
        assert kind == "ParallelError"
        assert "expected one dtype, found torch.bfloat16, torch.float32" in message


@pytest.mark.slow
@pytest.mark.parametrize("name", ["odd", "packed"])
def test_a_sharded_head_exports_the_bytes_of_a_plain_one(ranks: list[dict[str, Any]], folder: Path, name: str) -> None:
    """https://github.com/verl-project/verl/pull/925"""
    case = "rows that two does not divide" if name == "odd" else "experts packed"
    base, out = folder / str(list(CASES).index(case)), folder / f"{name}-plain"
    if not out.exists():
        mz.export(train(mz.load_head(base, dtype=torch.float32)), base, out)
    expected, found = (
        {file: content for file, (_, content) in snapshot(path).items()} for path in (out, folder / f"{name}-sharded")
    )
    assert found == expected
    assert ranks[0][f"{name} export"] == ranks[1][f"{name} export"]
    assert ranks[0][f"{name} export"].out == folder / f"{name}-sharded"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["odd", "packed"])
def test_the_first_rank_holds_one_tensor_and_the_other_its_rows(ranks: list[dict[str, Any]], name: str) -> None:
    first, second = ranks
    assert first[f"{name} largest"] > 30_000
    assert first[f"{name} peak"] < first[f"{name} largest"] * STORED + SMALL
    assert second[f"{name} peak"] < SMALL


@pytest.mark.slow
def test_where_the_first_rank_cannot_write_all_raise_and_nothing_is_left(
    ranks: list[dict[str, Any]], folder: Path
) -> None:
    (kind, first), (other, second) = (rank["not finite"] for rank in ranks)
    assert kind == other == "ExportError"
    assert "expected finite numbers" in first
    assert second == f"On rank 0: {first}"
    assert not [path for path in folder.iterdir() if "not-finite" in path.name]


@pytest.mark.slow
def test_where_another_rank_cannot_send_all_raise_and_nothing_is_left(
    ranks: list[dict[str, Any]], folder: Path
) -> None:
    assert ranks[1]["no rows"] == ("ValueError", "no rows today")
    kind, message = ranks[0]["no rows"]
    assert kind == "ParallelError"
    assert message.startswith("On rank 1: Exporting the qwen3_5_moe head: expected no failure, got ValueError: no rows")
    assert not [path for path in folder.iterdir() if "no-rows" in path.name]


@pytest.mark.usefixtures("world_of_one")
def test_a_head_cut_by_columns_is_refused_by_name_and_nothing_is_written(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    head = mz.load_head(base)
    attention = head.get_submodule("depths.0.block.self_attn")
    by_columns = distribute_tensor(attention.get_parameter("q_proj.weight"), init_device_mesh("cpu", (1,)), [Shard(1)])
    attention.get_submodule("q_proj").weight = torch.nn.Parameter(by_columns)
    with pytest.raises(ParallelError, match="Exporting the qwen3_5 head: the ranks' parts") as caught:
        mz.export(head, base, tmp_path / "out")
    assert caught.value.problems == (
        "depths.0.block.self_attn.q_proj.weight: expected rows cut over one axis of the mesh, found (Shard(dim=1),)",
    )
    assert list(tmp_path.iterdir()) == [base]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"mp_policy": object()}, "mp_policy: expected a mesh beside it, got none"),
        ({"mesh": "cpu", "device": "meta"}, "device: expected that of the mesh, cpu, got 'meta'"),
    ],
)
def test_what_does_not_go_with_a_mesh_is_refused(
    arguments: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "mesh" in arguments:
        arguments = arguments | {"mesh": type("Mesh", (), {"device_type": arguments["mesh"]})()}
    with pytest.raises(SettingsError) as caught:
        mz.load_head("anywhere", **arguments)
    assert caught.value.problems == (problem,)
