"""inspect: the whole truth about a checkpoint's head, from headers."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtp_zoo.errors import SourceNotFoundError
from mtp_zoo.inspection import inspect
from tests.tiny import tiny_config, tiny_tensors, write_checkpoint


def test_a_whole_head_is_described_and_has_no_problems(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = tiny_tensors(config)
    found = inspect(write_checkpoint(tmp_path / "model", config, tensors, shards=2))
    head = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
    assert (found.family, found.depths, found.loads, found.problems) == ("qwen3_5", 1, True, ())
    assert found.head_bytes == sum(tensor.nbytes for tensor in head.values())
    assert {entry.name: entry.shape for entry in found.tensors} == {n: tuple(t.shape) for n, t in head.items()}
    assert found.shared["tied"] is True
    assert found.shared["lm_head"]["name"] == "model.embed_tokens.weight"
    described = found.as_dict()
    assert described["tensors"][0].keys() == {"name", "dtype", "shape", "bytes", "file"}
    assert all(name in str(found) for name in head)


def test_only_headers_are_read(tmp_path: Path) -> None:
    config = tiny_config(hidden=256, vocab=4096, num_attention_heads=8)
    path = write_checkpoint(tmp_path / "model", config, tiny_tensors(config))
    assert inspect(path).header_bytes < (path / "model.safetensors").stat().st_size / 100


def test_a_head_that_a_trainer_dropped_is_a_problem(tmp_path: Path) -> None:
    """https://github.com/unslothai/unsloth/pull/11042"""
    config = tiny_config()
    found = inspect(write_checkpoint(tmp_path / "model", config, tiny_tensors(config, head_depths=0)))
    assert (found.family, found.depths, found.loads) == ("qwen3_5", 0, False)
    assert "'mtp_num_hidden_layers' declares 1" in found.problems[0]


def test_every_damaged_tensor_is_listed(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = tiny_tensors(config)
    del tensors["mtp.fc.weight"]
    tensors["mtp.extra.weight"] = tensors["mtp.norm.weight"].clone()
    found = inspect(write_checkpoint(tmp_path / "model", config, tensors))
    assert not found.loads
    assert any(problem.startswith("missing: mtp.fc.weight") for problem in found.problems)
    assert any(problem.startswith("unexpected: mtp.extra.weight") for problem in found.problems)


def test_an_undeclared_head_loads_and_the_contradiction_is_told(tmp_path: Path) -> None:
    config = tiny_config(depths=None)
    found = inspect(write_checkpoint(tmp_path / "model", config, tiny_tensors(config)))
    assert found.loads
    assert any("does not declare 'mtp_num_hidden_layers'" in problem for problem in found.problems)


def test_an_untied_model_without_lm_head_is_told(tmp_path: Path) -> None:
    """https://github.com/QwenLM/Qwen3-VL-Embedding/issues/89"""
    tensors = tiny_tensors(tiny_config())
    found = inspect(write_checkpoint(tmp_path / "model", tiny_config(tied=False), tensors))
    assert sorted(found.shared) == ["embedding", "final_norm"]
    assert not found.loads
    assert any("tie_word_embeddings is false" in problem for problem in found.problems)


def test_a_shared_tensor_in_a_lost_file_is_told(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = tiny_tensors(config)
    layout = {
        "model-1.safetensors": [n for n in tensors if "embed_tokens" in n],
        "model-2.safetensors": [n for n in tensors if "embed_tokens" not in n],
    }
    path = write_checkpoint(tmp_path / "model", config, tensors, shards=layout)
    (path / "model-1.safetensors").unlink()
    found = inspect(path)
    assert not found.loads, "nothing to borrow the embedding from"
    assert any("model-1.safetensors" in problem for problem in found.problems)
    assert "embedding" not in found.shared


def test_a_place_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError):
        inspect(tmp_path / "nothing")
