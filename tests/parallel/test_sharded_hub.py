"""A head that two ranks read from the Hub: each moves the bytes of its own rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import mtp_zoo as mz
from mtp_zoo.parallel import own_values
from tests.hub.loopback import LoopbackHub, hub, talk_to  # noqa: F401
from tests.parallel.ranks import on_ranks
from tests.tiny import tiny_config, tiny_tensors, write_checkpoint

REPO = "acme/wide"
WIDE = 32768
"""Rows of the projections of the MLP: half of one is larger than the gaps that are read along to save a request."""

MOVED_SHARE = 0.52
"""What a rank may move of the head: its half, and headers, index, config and closed gaps."""


def _load(_rank: int, url: str, folder: str) -> dict[str, Any]:
    talk_to(url, pytest.MonkeyPatch(), Path(folder))  # never undone: this process ends
    head = mz.load_head(REPO, mesh=init_device_mesh("cpu", (2,)))
    return {
        "rows": {name: own_values(value) for name, value in head.weights().items()},
        "moved": head.report.bytes_moved,
        "head": head.report.head_bytes,
    }


@pytest.mark.slow
def test_each_rank_moves_its_half_of_the_head(hub: LoopbackHub, tmp_path: Path) -> None:  # noqa: F811
    config = tiny_config(intermediate_size=WIDE)
    tensors = tiny_tensors(config)
    own = [name for name in tensors if name.startswith("mtp.")]
    layout = {"a.safetensors": [name for name in tensors if name not in own], "b.safetensors": own}
    base = write_checkpoint(tmp_path / "base", config, tensors, shards=layout)
    hub.publish(REPO, hub.files_of(base))
    ranks = on_ranks(_load, tmp_path / "ranks", hub.url, str(tmp_path / "cache"))
    whole = mz.load_head(base).weights()
    for name, value in whole.items():
        assert torch.equal(torch.cat([rank["rows"][name] for rank in ranks]), value), name
    for rank in ranks:
        assert 0.49 * rank["head"] < rank["moved"] < MOVED_SHARE * rank["head"]
    assert hub.sent("cdn") < 2 * MOVED_SHARE * ranks[0]["head"]
