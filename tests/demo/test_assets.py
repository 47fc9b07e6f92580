from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mtp_zoo.demo.target import demo_config
from mtp_zoo.loader import load_head

ASSETS = Path(__file__).parents[2] / "mtp_zoo" / "demo" / "assets" / "tiny-qwen3_5"
MAX_BYTES = 4_000_000


def test_the_shipped_checkpoint_is_small_and_whole() -> None:
    files = {path.name for path in ASSETS.iterdir()}
    assert files == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in ASSETS.iterdir()) <= MAX_BYTES


def test_the_shipped_weights_are_a_trunk_and_a_head_of_fifteen_tensors_in_bf16() -> None:
    tensors = load_file(ASSETS / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert sum(name.startswith("mtp.") for name in tensors) == 15
    assert "lm_head.weight" not in tensors  # tied


def test_the_shipped_config_is_the_one_that_the_script_would_write() -> None:
    saved = json.loads((ASSETS / "config.json").read_text(encoding="utf-8"))
    vocabulary = len(AutoTokenizer.from_pretrained(ASSETS))
    made = json.loads(demo_config(vocabulary, end_of_text=0).to_json_string(use_diff=False))
    differing = {name for name in saved.keys() & made.keys() if saved[name] != made[name]}
    assert differing <= {"dtype", "transformers_version"}
    assert saved["vocab_size"] == vocabulary == 1024


def test_the_shipped_head_loads_strictly_onto_the_shipped_target() -> None:
    target, loading = AutoModelForCausalLM.from_pretrained(ASSETS, dtype=torch.float32, output_loading_info=True)
    assert not loading["missing_keys"]
    head = load_head(ASSETS, target=target)
    assert head.num_depths == 1
    assert head.report.notices == ()


@pytest.mark.parametrize("said", ["--seed", "perplexity", "accept length", "PSF"])
def test_the_readme_says_how_it_was_made_and_what_it_measures(said: str) -> None:
    assert said in (ASSETS / "README.md").read_text(encoding="utf-8")
