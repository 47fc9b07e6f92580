"""A target with latent attention gives the same states on every way in, those that engines compute, and is left as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mtp_zoo as mz
from mtp_zoo.corrections import LATENT_NORMS, corrected
from mtp_zoo.training.target import load_target
from tests.attaching import load_model
from tests.stored_forms import plain_form, write

LATENT = ("glm4_moe_lite", "deepseek_v3", "glm_moe_dsa")
ENGINES = 1e-5
"""The epsilon of the config, which engines use; transformers' layers are built with 1e-6."""


def epsilons(model: Any) -> set[float]:
    return {module.variance_epsilon for name, module in model.named_modules() if name.endswith(LATENT_NORMS)}


@pytest.fixture(params=LATENT)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path / "base", plain_form(request.param), rms_norm_eps=ENGINES)


def batch() -> mz.TokenBatch:
    ids = torch.randint(3, 500, (2, 9), generator=torch.Generator().manual_seed(0))
    return mz.TokenBatch.all_tokens(ids)


def states_while(model: Any, act: Any) -> Tensor:
    """What leaves the final norm in the first forward pass of an act."""
    seen: list[Tensor] = []
    hook = model.model.norm.register_forward_hook(lambda _module, _inputs, output: seen.append(output.detach().clone()))
    act()
    hook.remove()
    return seen[0]


def test_every_way_in_sees_the_same_states(root: Path) -> None:
    """`target_states`, `speculate`, `replay`, `attach`, and the target that `train` loads; no difference at all."""
    tokens = batch()
    prompts = tokens.input_ids.tolist()
    model = load_model(root).eval()
    head = mz.load_head(root, target=model, dtype=model.dtype)
    found = {"target_states": states_while(model, lambda: mz.target_states(model, tokens, head.spec))}
    for measure in (mz.speculate, mz.replay):
        options = {"batch_size": 2} if measure is mz.speculate else {}
        found[measure.__name__] = states_while(
            model, lambda run=measure, more=options: run(model, head, prompts, k=1, max_new_tokens=2, **more)
        )
    trained = load_target(root, dtype=model.dtype)
    expected = states_while(trained, lambda: trained(input_ids=tokens.input_ids, use_cache=False))
    uncorrected = states_while(model, lambda: model(input_ids=tokens.input_ids, use_cache=False))
    assert not torch.equal(uncorrected, expected), "the epsilon shows"
    assert epsilons(model) == {1e-6}, "left as it was"
    joint = mz.attach(model, head)
    found["attach"] = states_while(joint, lambda: joint(input_ids=tokens.input_ids, use_cache=False))
    for way, states in found.items():
        assert torch.equal(states, expected), way


def test_the_epsilon_comes_back_where_something_fails(root: Path) -> None:
    model = load_model(root).eval()
    seen: list[set[float]] = []

    def fails() -> None:
        with corrected(model):
            seen.append(epsilons(model))
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        fails()
    assert seen == [{ENGINES}]
    assert epsilons(model) == {1e-6}


def test_a_target_without_latent_attention_is_left_alone(tmp_path: Path) -> None:
    model = load_model(write(tmp_path, plain_form("glm4_moe"))).eval()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with corrected(model):
        assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
