"""The draft/verify loop counts what the rollout over greedy outputs counts: for every tap, depth policy, recycle and
position rule, number of drafts and batch size, on targets with and without recurrent layers; and leaves both as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mtp_zoo.acceptance import AcceptanceReport, replay, speculate
from mtp_zoo.errors import AcceptanceError
from mtp_zoo.head import DraftHead
from mtp_zoo.spec import PerEngine
from tests.heads import VOCAB, tiny_head, tiny_target
from tests.oracles import FULL_ATTENTION

HYBRID: dict[str, Any] = {}
NEW_TOKENS = 11

LENGTHS = (5, 1, 9, 2, 5)
"""One token alone, fewer tokens than depths, and two prompts of one length."""


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


def pair(layers: dict[str, Any], *, depths: int = 1, **spec: Any) -> tuple[Any, DraftHead]:
    """A random target and a random head, whose lm_head knows two tokens only: a draft is right about every second time.

    Both of them take part in every choice with all that they compute: a state, a cache or a position that is not what it
    should be changes some of the counts.
    """
    target, head = tiny_target(tied=False, **layers), tiny_head(depths=depths, spec=spec)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        target.lm_head.weight[1:] = 0
        target.model.norm.weight.normal_(std=1.0, generator=generator)
        head.depths[0].norm.weight.normal_(std=1.0, generator=generator)
        for depth in head.depths:
            depth.block.self_attn.o_proj.weight.mul_(3)
    return target, head.eval()


def counts(report: AcceptanceReport) -> list[tuple[int, ...]]:
    return [prompt.accepted for prompt in report.prompts]


def outputs(report: AcceptanceReport) -> list[tuple[int, ...]]:
    return [prompt.output for prompt in report.prompts]


def agree(target: Any, head: DraftHead, k: int, batch_sizes: tuple[int, ...] = (1, 4)) -> set[int]:
    """Assert that loop and replay count alike; returns the numbers of drafts that steps accepted."""
    asked = prompts()
    expected = replay(target, head, asked, k=k, max_new_tokens=NEW_TOKENS)
    for batch_size in batch_sizes:
        check = batch_size > 1
        loop = speculate(target, head, asked, k=k, max_new_tokens=NEW_TOKENS, batch_size=batch_size, check=check)
        assert counts(loop) == counts(expected), batch_size
        assert outputs(loop) == outputs(expected)
        assert loop.lossless is (True if check else None)
    return {accepted for row in counts(expected) for accepted in row}


CASES = {
    "recycled": {},
    "pre_norm tap": {"hidden_tap": "pre_norm"},
    "pre_norm recycle": {"recycle": PerEngine.same("pre_norm")},
    "pre_norm tap and recycle": {"hidden_tap": "pre_norm", "recycle": PerEngine.same("pre_norm")},
    "token positions": {"position_rule": "token"},
    "constant positions": {"position_rule": "constant"},
    "first embedding zeroed": {"zero_first_embedding": PerEngine.same(True)},
    "two depths": {"depths": 2},
    "three depths, pre_norm": {"depths": 3, "hidden_tap": "pre_norm", "recycle": PerEngine.same("pre_norm")},
}


@pytest.mark.parametrize("layers", [HYBRID, FULL_ATTENTION], ids=["hybrid", "attention"])
@pytest.mark.parametrize("case", CASES)
def test_loop_and_replay_count_alike(case: str, layers: dict[str, Any]) -> None:
    target, head = pair(layers, **CASES[case])
    assert agree(target, head, 3) >= {0, 1, 3}


@pytest.mark.parametrize("depths", [1, 2])
@pytest.mark.parametrize("k", [1, 2, 4, 5, 6, 7])
def test_any_number_of_drafts_counts_alike(k: int, depths: int) -> None:
    """More drafts than stored depths use the depths in turn, each time with a cache of its own."""
    target, head = pair(HYBRID, depths=depths)
    assert agree(target, head, k, (3,)) >= {0, 1, min(k, 2)}


@pytest.mark.parametrize("batch_size", [2, 3, 100])
def test_prompts_that_run_together_count_as_if_alone(batch_size: int) -> None:
    target, head = pair(HYBRID, depths=2)
    alone = speculate(target, head, prompts(), k=3, max_new_tokens=NEW_TOKENS)
    together = speculate(target, head, prompts(), k=3, max_new_tokens=NEW_TOKENS, batch_size=batch_size)
    assert together == alone


def test_prompts_that_end_early_leave_the_others_alone() -> None:
    target, head = pair(FULL_ATTENTION)
    eos = [1]
    alone = speculate(target, head, prompts(), k=3, max_new_tokens=NEW_TOKENS, eos=eos)
    assert len({len(prompt.output) for prompt in alone.prompts}) > 2
    assert speculate(target, head, prompts(), k=3, max_new_tokens=NEW_TOKENS, eos=eos, batch_size=6) == alone
    assert counts(replay(target, head, prompts(), k=3, max_new_tokens=NEW_TOKENS, eos=eos)) == counts(alone)


# What is left behind


def traces(target: Any, head: DraftHead) -> dict[str, Any]:
    """Whatever a measurement could leave behind in a model or in the process."""
    found: dict[str, Any] = {
        "rng": torch.get_rng_state().tolist(),
        "shared": vars(head.shared) if head._shared else None,
    }
    for role, model in (("target", target), ("head", head)):
        for name, module in model.named_modules():
            hooks = [len(value) for key, value in vars(module).items() if key.endswith("_hooks")]
            found[f"{role}.{name}"] = (module.training, hooks, getattr(module, "variance_epsilon", None))
        found |= {f"{role}.{name}": p.requires_grad for name, p in model.named_parameters()}
        found |= {f"{role}.{name} value": value.clone() for name, value in model.state_dict().items()}
    return found | {"config": target.config.to_dict(), "block": head.factory.config.to_dict()}


def equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


def train_partly(target: Any, head: DraftHead) -> None:
    """Training mode with exceptions, dropout included, so that a plain `.train()` afterwards would be seen."""
    target.train().requires_grad_(True)
    target.model.layers[0].eval()
    target.config.use_cache = False
    head.train()
    head.depths[0].norm.eval()
    for module in (*target.modules(), *head.modules()):
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5


@pytest.mark.parametrize("measure", [speculate, replay])
@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("tap", ["post_norm", "pre_norm"])
def test_target_and_head_are_left_as_they_were(measure: Any, attached: bool, tap: str) -> None:
    target, head = pair(FULL_ATTENTION, hidden_tap=tap)
    expected = measure(target, head, prompts()[:2], k=2, max_new_tokens=6)
    train_partly(target, head)
    if not attached:
        head._shared = None
    before = traces(target, head)
    assert measure(target, head, prompts()[:2], k=2, max_new_tokens=6) == expected, "evaluation mode: no dropout"
    after = traces(target, head)
    assert after.keys() == before.keys()
    assert [name for name in before if not equal(before[name], after[name])] == []


@pytest.mark.parametrize("measure", [speculate, replay])
def test_they_are_left_as_they_were_where_it_raises(measure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target, head = pair(FULL_ATTENTION, hidden_tap="pre_norm")
    train_partly(target, head)
    before = traces(target, head)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(target.model.layers[1], "forward", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        measure(target, head, prompts()[:2], k=2, max_new_tokens=6)
    assert [name for name, value in traces(target, head).items() if not equal(value, before[name])] == []


def test_a_batch_size_below_one_is_refused() -> None:
    target, head = pair(FULL_ATTENTION)
    with pytest.raises(AcceptanceError, match="batch_size: expected a whole number >= 1, got 0"):
        speculate(target, head, prompts(), k=1, max_new_tokens=1, batch_size=0)
