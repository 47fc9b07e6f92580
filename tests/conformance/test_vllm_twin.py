"""The form in which vLLM opens a checkpoint: no vLLM is needed to make it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtp_zoo_conformance import engines
from mtp_zoo_conformance.cases import get_case
from mtp_zoo_conformance.prepared import prepare
from mtp_zoo_conformance.tiers import module

SPARSE = ("deepseek_v32", "glm_moe_dsa")


@pytest.fixture(scope="module")
def twin() -> ModuleType:
    """The worker's module, which stands alone."""
    spec = importlib.util.spec_from_file_location("twin", Path(engines.__file__).parent / "vllm" / "twin.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_without_a_twin_the_checkpoint_itself_is_opened(twin: ModuleType, tmp_path: Path) -> None:
    assert twin.opened({"checkpoint": "/a/b", "folder": str(tmp_path)}) == Path("/a/b")
    assert twin.opened({"checkpoint": "/a/b", "folder": str(tmp_path), "twin": None}) == Path("/a/b")


@pytest.mark.parametrize("family", SPARSE)
def test_the_twin_of_a_sparse_head_has_no_trace_of_its_indexer(family: str, twin: ModuleType, tmp_path: Path) -> None:
    case = get_case(family)
    prepared = prepare(case, case.variants[0], tmp_path)
    job = module.job(prepared, "vllm", limit=1)
    assert job is not None
    (tmp_path / "job").mkdir()
    before = sorted((path.name, path.read_bytes()) for path in prepared.checkpoint.iterdir())
    opened = twin.opened({**json.loads(json.dumps(job)), "folder": str(tmp_path / "job")})
    config, tensors = json.loads((opened / "config.json").read_text()), load_file(opened / "model.safetensors")
    stored = load_file(prepared.checkpoint / "model.safetensors")
    assert (config["model_type"], config["architectures"]) == ("deepseek_v3", ["DeepseekV3ForCausalLM"])
    assert [name for name in config if "index" in name] == []
    assert set(stored) - set(tensors) == {name for name in stored if ".indexer." in name}
    assert len(set(stored) - set(tensors)) == 5 * 3  # of both layers of the target and of the head
    assert all(torch.equal(tensors[name], stored[name]) for name in tensors)
    assert sorted((path.name, path.read_bytes()) for path in prepared.checkpoint.iterdir()) == before


def test_an_index_file_loses_the_same_names(twin: ModuleType, tmp_path: Path) -> None:
    checkpoint, folder = tmp_path / "checkpoint", tmp_path / "job"
    checkpoint.mkdir()
    folder.mkdir()
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "x", "index_topk": 4, "vocab_size": 3}))
    save_file({"a.indexer.w": torch.ones(1), "a.w": torch.ones(2)}, checkpoint / "part-1.safetensors")
    save_file({"b.indexer.w": torch.ones(1), "b.w": torch.ones(2)}, checkpoint / "part-2.safetensors")
    weights = {"a.indexer.w": "part-1.safetensors", "a.w": "part-1.safetensors", "b.w": "part-2.safetensors"}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    made: dict[str, Any] = {"config": {"model_type": "y"}, "without_fields": ["index_.*"]}
    job = {"checkpoint": str(checkpoint), "folder": str(folder)}
    opened = twin.opened({**job, "twin": {**made, "without_tensors": [r".*\.indexer\..*"]}})
    assert json.loads((opened / "config.json").read_text()) == {"model_type": "y", "vocab_size": 3}
    assert json.loads((opened / "model.safetensors.index.json").read_text())["weight_map"] == {
        "a.w": "part-1.safetensors",
        "b.w": "part-2.safetensors",
    }
    assert set(load_file(opened / "part-1.safetensors")) == {"a.w"}
    assert set(load_file(opened / "part-2.safetensors")) == {"b.w"}
