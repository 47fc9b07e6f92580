"""What SGLang's worker makes of counters, of unfilled parameters and of requests, without SGLang."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.conformance.sglang_files import worker_file

counts, canary, dropped = worker_file("counts"), worker_file("canary"), worker_file("dropped")


def meta(*histogram: int) -> dict[str, Any]:
    """SGLang's counters of an answer whose verify steps accepted 0, 1, .. drafts so and so often."""
    return {
        "spec_verify_ct": sum(histogram),
        "spec_num_correct_drafts": sum(number * times for number, times in enumerate(histogram)),
        "spec_num_proposed_drafts": 3 * sum(histogram),
        "spec_correct_drafts_histogram": list(histogram),
    }


def test_accepted_drafts_are_new_tokens_without_the_targets_own() -> None:
    assert counts.accepted_drafts([1, 3, 4, 8], meta(1, 1, 0, 1)) == [1, 0, 3]


def test_the_last_step_counts_whole_where_it_is_cut() -> None:
    assert counts.accepted_drafts([1, 3, 4], meta(0, 1, 0, 1)) == [1, 3]


def test_an_answer_of_the_prefill_alone_has_no_step() -> None:
    assert counts.accepted_drafts([1], {}) == []


@pytest.mark.parametrize(
    ("lengths", "counted"),
    [([1, 3, 4], meta(0, 0, 2)), ([2, 3, 4], meta(2)), ([1, 2, 5], meta(2))],
    ids=["other steps", "more than the prefill's token", "more than was accepted"],
)
def test_a_stream_that_contradicts_the_counters_is_an_error(lengths: list[int], counted: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="SGLang counted"):
        counts.accepted_drafts(lengths, counted)


def test_a_short_answer_is_an_error() -> None:
    counts.check_length([1, 2, 3], 3, {})
    with pytest.raises(RuntimeError, match=r"4 tokens were asked for, SGLang gave 3: \{'type': 'length'"):
        counts.check_length([1, 2, 3], 4, {"finish_reason": {"type": "length", "length": 3}})


class Streams:
    """An engine whose answers come as the given lengths of the stream, one answer after the other."""

    def __init__(self, *answers: list[int], histogram: tuple[int, ...]) -> None:
        self.left, self.meta = list(answers), meta(*histogram)

    def generate(self, *, input_ids: list[int], sampling_params: dict[str, Any], stream: bool) -> Any:
        for length in self.left.pop(0) if len(self.left) > 1 else self.left[0]:
            yield {"output_ids": list(range(length)), "meta_info": {**self.meta, "completion_tokens": length}}


def test_a_stream_that_joins_two_steps_is_asked_for_again() -> None:
    engine = Streams([1, 4, 8], [1, 4, 8], [1, 3, 4, 8], histogram=(1, 1, 0, 1))
    answer = counts.ask(engine, [5, 6], 8, 3)
    assert (answer.tokens, answer.accepted) == (list(range(8)), [1, 0, 3])


def test_streams_that_never_show_every_step_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="joined verify steps in each of 40 attempts"):
        counts.ask(Streams([1, 4, 8], histogram=(1, 1, 0, 1)), [5, 6], 8, 3)


def test_counters_add_up_over_prompts() -> None:
    answers = [counts.Answer([], [], meta(1, 2, 0, 1)), counts.Answer([], [], meta(0, 1)), counts.Answer([], [], {})]
    assert counts.counters(answers, 3) == {
        "verify_steps": 5,
        "drafted": 15,
        "accepted": 6,
        "accepted_per_depth": [4, 1, 1],
    }


class Loader:
    """A loader that forgets a bias, and half of another parameter."""

    @staticmethod
    def load_weights_only(model: nn.Module, weights: dict[str, torch.Tensor], device: str) -> str:
        """Fill what there are weights for."""
        for name, parameter in model.named_parameters():
            if name in weights:
                parameter.data[: len(weights[name])] = weights[name]
        return device


def test_unfilled_parameters_are_found_by_what_was_there_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(DefaultModelLoader=type("DefaultModelLoader", (Loader,), {}))
    canary.watch(module)
    file = tmp_path / "loads.log"
    monkeypatch.setenv(canary.LOG, str(file))
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2, bias=False))
    weights = {"0.weight": torch.ones(3, 2), "1.weight": torch.ones(1, 3)}
    assert module.DefaultModelLoader.load_weights_only(model, weights, "cpu") == "cpu"
    assert canary.loads(file) == [canary.Load("Sequential", 15, ["0.bias", "1.weight"])]


def test_without_a_log_a_load_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(DefaultModelLoader=type("DefaultModelLoader", (Loader,), {}))
    canary.watch(module)
    monkeypatch.delenv(canary.LOG, raising=False)
    model = nn.Linear(2, 3)
    module.DefaultModelLoader.load_weights_only(model, {}, "cpu")
    assert bool(model.bias.isfinite().all())
    assert canary.loads(tmp_path / "none.log") == []


def test_config_fields_are_dropped_beside_the_checkpoint(tmp_path: Path) -> None:
    checkpoint, folder = tmp_path / "checkpoint", tmp_path / "job"
    checkpoint.mkdir()
    folder.mkdir()
    config = {"rope": {"section": 1, "theta": 2}, "text_config": {"rope": {"section": 1}}}
    (checkpoint / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    job = {"checkpoint": str(checkpoint), "folder": str(folder), "drop": ["rope.section", "absent.field"]}
    for _ in range(2):  # a folder from an earlier run is no hindrance
        seen = dropped.without_fields(job)
    assert json.loads((seen / "config.json").read_text()) == {"rope": {"theta": 2}, "text_config": {"rope": {}}}
    assert (seen / "model.safetensors").read_bytes() == b"weights"
    assert json.loads((checkpoint / "config.json").read_text()) == config
    assert dropped.without_fields({**job, "drop": []}) == checkpoint
