"""Runs a function on several real processes over gloo, and hands back what each of them returns."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.children import METHOD, forked

PATIENCE = datetime.timedelta(seconds=120)
"""How long a rank waits for another, before it fails instead of hanging."""


def on_ranks(function: Callable[..., Any], folder: Path, *args: Any, size: int = 2) -> list[Any]:
    """`function(rank, *args)` on ranks 0 .. size - 1 of one gloo group; what they return, rank 0 first.

    A start takes a second, so that one call should compute all cases of a file. Files, not ports, bring the ranks
    together: nothing else on the machine can be in the way.
    """
    folder.mkdir(parents=True, exist_ok=True)
    forked()  # says what the server loads
    torch.multiprocessing.start_processes(
        _rank, args=(size, function, str(folder), args), nprocs=size, start_method=METHOD
    )
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(size)]


def _rank(rank: int, size: int, function: Callable[..., Any], folder: str, args: tuple[Any, ...]) -> None:
    warnings.simplefilter("error", UserWarning)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=PATIENCE)
    try:
        torch.save(function(rank, *args), f"{folder}/rank{rank}.pt")
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
