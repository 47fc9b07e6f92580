from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3_5ForCausalLM

from mtp_zoo.demo.target import demo_config, even_windows, fine_tune, perplexity, random_windows
from mtp_zoo.errors import EmptyDatasetError
from mtp_zoo.loader import load_head

VOCAB = 32
SMALL = {"batch_size": 4, "length": 24, "warmup": 2, "lr": 1e-2}


def target(seed: int = 0) -> Qwen3_5ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3_5ForCausalLM(demo_config(VOCAB))


def stream() -> Tensor:
    """A text that is easy to learn: every token says what comes next."""
    return torch.arange(400) * 7 % VOCAB


def test_the_target_has_the_documented_size_and_declares_one_head() -> None:
    config = demo_config(1024, end_of_text=0)
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_039_756
    saved = config.to_dict()
    assert saved["mtp_num_hidden_layers"] == 1
    assert saved["architectures"] == ["Qwen3_5ForCausalLM"]
    assert saved["layer_types"].count("linear_attention") == 3
    assert saved["tie_word_embeddings"] is True
    assert "mrope_section" not in saved["rope_parameters"]


def test_fine_tuning_lowers_the_loss_and_the_perplexity() -> None:
    model = target()
    before = perplexity(model, stream(), windows=4, length=24)
    losses = fine_tune(model, stream(), steps=12, **SMALL)
    assert losses[0] == pytest.approx(math.log(VOCAB), abs=0.3)
    assert losses[-1] < losses[0] - 1.0
    assert perplexity(model, stream(), windows=4, length=24) < before / 2
    assert not model.training


def test_fine_tuning_repeats_with_its_seed_and_differs_with_another() -> None:
    first, again, other = (fine_tune(target(), stream(), steps=3, seed=seed, **SMALL) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_fine_tuning_moves_the_target_and_leaves_its_head_behind(tmp_path: Path) -> None:
    model = target()
    model.save_pretrained(tmp_path / "base")
    head = load_head(tmp_path / "base", target=model, init="random")
    trunk, before = copy.deepcopy(model.state_dict()), copy.deepcopy(head.state_dict())
    fine_tune(model, stream(), steps=2, **SMALL)
    assert not any(torch.equal(value, trunk[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())
    model.save_pretrained(tmp_path / "tuned")
    saved = load_file(tmp_path / "tuned" / "model.safetensors")
    assert not [name for name in saved if name.startswith("mtp.")]


class Spy(torch.optim.AdamW):
    """AdamW that remembers its groups and the rate of every step."""

    last: Spy

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rates: list[float] = []
        Spy.last = self

    def step(self, closure: Any = None) -> Any:
        self.rates.append(self.param_groups[0]["lr"])
        return super().step(closure)


def test_the_rate_warms_up_and_falls_to_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim, "AdamW", Spy)
    steps = []
    fine_tune(
        target(), stream(), steps=6, lr=1.0e-3, batch_size=1, length=8, warmup=2, progress=lambda: steps.append(1)
    )
    # cosine from step 2 to step 6: 0.1 + 0.9 * (1 + cos(pi * s / 4)) / 2
    expected = [0.0, 0.5, 1.0, 0.1 + 0.9 * 0.8535534, 0.55, 0.1 + 0.9 * 0.1464466]
    assert Spy.last.rates == pytest.approx([1e-3 * rate for rate in expected], rel=1e-5)
    assert len(steps) == 6


def test_only_matrices_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim, "AdamW", Spy)
    model = target()
    fine_tune(model, stream(), steps=1, **SMALL)
    decays = {id(p): group["weight_decay"] for group in Spy.last.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert decays[id(parameter)] == (0.1 if parameter.ndim > 1 else 0.0), name


def test_perplexity_of_a_target_that_knows_nothing_is_the_vocabulary() -> None:
    model = target()
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    assert perplexity(model, stream(), windows=3, length=16) == pytest.approx(VOCAB)


def test_even_windows_span_the_stream() -> None:
    assert even_windows(torch.arange(10), 3, 4).tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]


def test_random_windows_reach_both_ends_and_never_wrap() -> None:
    windows = random_windows(torch.arange(6), 200, 4, torch.Generator().manual_seed(0))
    assert windows.shape == (200, 4)
    assert set(windows[:, 0].tolist()) == {0, 1, 2}
    assert bool((windows.diff(dim=1) == 1).all())


@pytest.mark.parametrize("act", [lambda m, s: fine_tune(m, s, steps=1, lr=1e-3), lambda m, s: perplexity(m, s)])
def test_a_stream_shorter_than_a_window_is_an_error(act: Any) -> None:
    with pytest.raises(EmptyDatasetError, match=r"windows of 256 tokens: the stream holds 255"):
        act(target(), torch.zeros(255, dtype=torch.int64))
