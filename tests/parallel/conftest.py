"""A process group without other processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def world_of_one() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
