"""A rank that dies while a sharded head is written: the others raise, and do not wait for it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import mtp_zoo as mz
from mtp_zoo import sharded_export
from mtp_zoo.errors import ParallelError
from tests.children import forked
from tests.exporting import make_base, snapshot
from tests.parallel.ranks import PATIENCE

SENDS = 3
"""Tensors that the second rank sends before it dies."""


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=PATIENCE)
    head = mz.load_head(f"{folder}/base", mesh=init_device_mesh("cpu", (2,)))
    if rank == 1:
        _die_after(SENDS)
    try:
        mz.export(head, f"{folder}/base", f"{folder}/out")
    except ParallelError as error:
        Path(folder, "told").write_text(str(error))
    os._exit(0)  # the other rank is gone: there is nothing to be torn down with it


def _die_after(count: int) -> None:
    rows_to_send, sent = sharded_export._rows_to_send, iter(range(count))

    def dying(value: torch.Tensor) -> torch.Tensor | None:
        if next(sent, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return rows_to_send(value)

    sharded_export._rows_to_send = dying


@pytest.mark.slow
def test_a_rank_that_is_killed_is_an_error_on_the_other_and_nothing_is_left(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    before = snapshot(base)
    processes = [forked().Process(target=_rank, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE.total_seconds())
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL]
    assert "expected all of ranks [0, 1] to answer, and one has ended" in (tmp_path / "told").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"base", "told", "store"}
    assert snapshot(base) == before
