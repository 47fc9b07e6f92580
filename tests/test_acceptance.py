"""The draft/verify loop: lossless whatever the head, counted by hand, and equal to its replay."""

from __future__ import annotations

from typing import Any

import pytest

from mtp_zoo.acceptance import AcceptanceReport, PromptResult, ends_in_loop, replay, speculate
from mtp_zoo.errors import AcceptanceError
from mtp_zoo.verifier import Verifier
from tests.heads import VOCAB, tiny_head, tiny_target
from tests.oracles import FULL_ATTENTION, oracle_pair, prompts


def test_an_oracle_is_accepted_every_time() -> None:
    target, head = oracle_pair()
    report = speculate(target, head, prompts(5, 3), k=3, max_new_tokens=13)
    # The prefill gives one token, three steps of four tokens give twelve.
    assert [prompt.accepted for prompt in report.prompts] == [(3, 3, 3), (3, 3, 3)]
    assert (report.accept_rate, report.accept_length, report.lossless) == (1.0, 4.0, True)
    assert (report.drafted, report.accepted, report.verify_steps, report.tokens) == (18, 18, 6, 24)


def test_a_head_that_is_always_wrong_costs_nothing_but_speed() -> None:
    target, head = oracle_pair(wrong_after=0)
    report = speculate(target, head, prompts(4), k=2, max_new_tokens=6)
    assert report.prompts[0].accepted == (0, 0, 0, 0, 0)
    assert (report.accept_rate, report.accept_length, report.lossless) == (0.0, 1.0, True)


@pytest.mark.parametrize("layers", [{}, FULL_ATTENTION])
def test_loop_and_replay_count_alike_and_the_output_is_plain_greedy_decoding(layers: dict[str, Any]) -> None:
    """With a hybrid target, whose recurrent state must be put back after a rejection, and with a pure one."""
    if layers:
        target, head = oracle_pair(wrong_after=VOCAB // 2)
    else:
        target = tiny_target()
        head = tiny_head().attach(target)
    asked = prompts(5, 9, 5)
    loop = speculate(target, head, asked, k=3, max_new_tokens=20)
    replayed = replay(target, head, asked, k=3, max_new_tokens=20)
    assert loop.lossless is True
    assert replayed.lossless is None
    assert [p.accepted for p in loop.prompts] == [p.accepted for p in replayed.prompts]
    assert [p.output for p in loop.prompts] == [p.output for p in replayed.prompts]
    if layers:
        assert {0, 3} <= {accepted for prompt in loop.prompts for accepted in prompt.accepted}


def test_a_head_trained_for_several_depths_uses_each_in_turn() -> None:
    target = tiny_target(**FULL_ATTENTION)
    head = tiny_head(depths=2).attach(target)
    seen: list[int] = []
    run = head.run_depth

    def spy(depth: int, *args: Any, **kwargs: Any) -> Any:
        seen.append(depth)
        return run(depth, *args, **kwargs)

    head.run_depth = spy  # type: ignore[method-assign]
    speculate(target, head, prompts(4), k=3, max_new_tokens=2, check=False)
    assert seen == [1, 2, 3]


def test_an_output_that_differs_from_plain_decoding_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    target, head = oracle_pair()
    monkeypatch.setattr(Verifier, "greedy", lambda self, prompts, steps: [[0] * steps])
    assert speculate(target, head, prompts(4), k=2, max_new_tokens=5).lossless is False


def test_outputs_end_with_the_end_of_sequence() -> None:
    target, head = oracle_pair()
    free = speculate(target, head, prompts(4), k=3, max_new_tokens=12)
    stop = free.prompts[0].output[6]
    for measure in (speculate, replay):
        ended = measure(target, head, prompts(4), k=3, max_new_tokens=12, eos=[stop])
        assert ended.prompts[0].output == free.prompts[0].output[:7]
        assert ended.prompts[0].accepted == (3, 3)


def test_counts_and_rates_on_a_literal_table() -> None:
    report = AcceptanceReport(
        3, (PromptResult((0, 2, 3), (1,), (1,)), PromptResult((1,), (2,), (2,)), PromptResult((), (3,), (3,)))
    )
    assert (report.verify_steps, report.drafted, report.accepted, report.tokens) == (4, 12, 6, 10)
    assert report.accept_rate == 0.5
    assert report.accept_length == 2.5
    assert [depth["accepted"] for depth in report.per_depth] == [3, 2, 1]
    assert [depth["accept_rate"] for depth in report.per_depth] == [0.75, 0.5, 0.25]
    # Lengths 1 + 5/3 and 1 + 1 over two prompts with a step.
    assert report.standard_error == pytest.approx(((2 / 3) ** 2 / 2 / 2) ** 0.5)


def test_one_prompt_has_no_standard_error() -> None:
    assert AcceptanceReport(3, (PromptResult((1,), (2,)),)).standard_error is None


@pytest.mark.parametrize(
    ("tokens", "loops"),
    [
        ([1, 2, 3, 3, 3], True),
        ([9, 1, 2, 1, 2, 1, 2], True),
        ([1, 2, 1, 2, 1], False),
        ([1, 2], False),
        ([3, 3], False),
    ],
)
def test_loops_at_the_end_are_seen(tokens: list[int], loops: bool) -> None:
    assert ends_in_loop(tokens) is loops


@pytest.mark.parametrize("call", [{"prompts": []}, {"prompts": [[]]}, {"k": 0}, {"max_new_tokens": 0}])
@pytest.mark.parametrize("measure", [speculate, replay])
def test_nothing_to_measure_is_refused(measure: Any, call: dict[str, Any]) -> None:
    arguments = {"prompts": [[1, 2]], "k": 2, "max_new_tokens": 3} | call
    asked = arguments.pop("prompts")
    with pytest.raises(AcceptanceError, match="Measuring acceptance"):
        measure(None, tiny_head(), asked, **arguments)
