"""Tier serve without an engine: what becomes of a worker's records, whatever they say."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mtp_zoo.acceptance import AcceptanceReport, PromptResult
from mtp_zoo.spec import Engine
from mtp_zoo_conformance.cases import get_case
from mtp_zoo_conformance.record import Cell
from mtp_zoo_conformance.served import NEW_TOKENS, ServedCheckpoint
from mtp_zoo_conformance.tiers import serve

CASE = get_case("qwen3_5")
OUTPUTS = [list(range(number, number + NEW_TOKENS)) for number in (100, 200)]
ACCEPTED = {1: [(0, 1, 0, 1), (1, 1, 0)], 3: [(3, 0, 2, 1), (0, 3, 2)]}
BOTH: dict[Engine, Any] = {"vllm": "float32", "sglang": "float32"}


def checkpoint(head: str = "trained", **changes: Any) -> ServedCheckpoint:
    facts: dict[str, Any] = {"plain": head, "prompts": ((1, 2), (3, 4, 5)), "dtypes": BOTH, "drafts": (1, 3)}
    return ServedCheckpoint(head=head, path=Path("/checkpoints") / head, **{**facts, **changes})


class FakeLibrary:
    """Chooses `OUTPUTS`, accepts `ACCEPTED`, or everything; every choice leads by `margin`."""

    def __init__(self, *, oracle: bool = False, margin: float = 0.5) -> None:
        self.oracle, self.margin = oracle, margin
        self.asked: list[tuple[int, int, int]] = []

    def report(self, engine: Engine, k: int) -> AcceptanceReport:
        rows = [tuple(k for _ in row) for row in ACCEPTED[k]] if self.oracle else ACCEPTED[k]
        return AcceptanceReport(
            k, tuple(PromptResult(row, tuple(output)) for row, output in zip(rows, OUTPUTS, strict=True))
        )

    def choices(self, prompt: int, output: Sequence[int]) -> tuple[list[int], list[float]]:
        return OUTPUTS[prompt], [self.margin] * len(output)

    def bf16_error(self, prompt: int, output: Sequence[int]) -> float:
        return 0.1

    def draft_margin(self, engine: Engine, prompt: int, known: Sequence[int], depth: int) -> float:
        self.asked.append((prompt, len(known), depth))
        return self.margin


def serving(library: FakeLibrary, *checkpoints: ServedCheckpoint) -> serve.Serving:
    made = serve.Serving(CASE, Path("/served"))
    made.__dict__["checkpoints"] = checkpoints or (checkpoint(),)
    made.library = lambda checkpoint: library  # type: ignore[method-assign, assignment]
    return made


def answer(engine: Engine, k: int, *, oracle: bool = False) -> dict[str, Any]:
    """The record of an engine that does exactly what the library does."""
    record: dict[str, Any] = {
        "status": "ok",
        "version": "1.2",
        "log": "/served/log.txt",
        "draft_class": CASE.engines[engine].draft_class if k else None,
        "unfilled": [],
        "outputs": copy.deepcopy(OUTPUTS),
    }
    if k:
        report = FakeLibrary(oracle=oracle).report(engine, k)
        record["accepted"] = [list(prompt.accepted) for prompt in report.prompts]
        record["counters"] = {
            "verify_steps": report.verify_steps,
            "drafted": report.drafted,
            "accepted": report.accepted,
            "accepted_per_depth": [int(depth["accepted"]) for depth in report.per_depth],
        }
    return record


def answers(made: serve.Serving, engine: Engine, **kind: bool) -> dict[str, Any]:
    return {serve.job_id(made, engine, c, k): answer(engine, k, **kind) for c, k in serve.runs(made, engine)}


def verdicts(cells: Sequence[Cell]) -> dict[tuple[str, str], str]:
    return {(cell.variant, cell.stage): cell.verdict for cell in cells}


def judged(library: FakeLibrary, k: int, **changes: Any) -> list[Cell]:
    """Cells of vLLM's run with k drafts of a trained head, its record changed; every other run is right."""
    made = serving(library)
    records = answers(made, "vllm")
    records[f"serve/qwen3_5/trained/{k}/vllm"].update(changes)
    cells, _ = serve.judge(made, "vllm", records)
    wrong_elsewhere = [c for c in cells if c.variant != f"trained, k={k}" and c.verdict != "pass"]
    assert not wrong_elsewhere or k == 0
    return [cell for cell in cells if cell.variant == f"trained, k={k}"]


def only(cells: Sequence[Cell], stage: str) -> Cell:
    found = [cell for cell in cells if cell.stage == stage]
    assert len(found) == 1
    return found[0]


def counters(**changes: Any) -> dict[str, Any]:
    return {"counters": {**answer("vllm", 3)["counters"], **changes}}


def test_jobs_run_each_target_once_without_drafts_and_each_head_with_them() -> None:
    made = serving(
        FakeLibrary(),
        checkpoint("trained", drafts=(1, 2, 3)),
        checkpoint("untouched", plain="trained", drafts=(3,)),
        checkpoint("demo", dtypes={**BOTH, "vllm": "bfloat16"}, drafts=(3,), not_run={"sglang": "no kernel"}),
    )
    found = {engine: [(job["id"], job["dtype"]) for job in serve.jobs(made, engine, limit=60)] for engine in BOTH}
    assert [name.split("/", 2)[2] for name, _ in found["vllm"]] == [
        "trained/0/vllm",
        "trained/1/vllm",
        "trained/2/vllm",
        "trained/3/vllm",
        "untouched/3/vllm",
        "demo/0/vllm",
        "demo/3/vllm",
    ]
    assert {dtype for _, dtype in found["vllm"][-2:]} == {"bfloat16"}
    assert [name.split("/", 2)[2] for name, _ in found["sglang"]] == [
        "trained/0/sglang",
        "trained/1/sglang",
        "trained/3/sglang",
        "untouched/3/sglang",
    ]
    job = serve.jobs(made, "vllm", limit=60)[1]
    assert (job["kind"], job["k"], job["limit"], job["max_new_tokens"]) == ("generate", 1, 60, NEW_TOKENS)
    assert (job["prompts"], job["checkpoint"]) == ([[1, 2], [3, 4, 5]], "/checkpoints/trained")
    assert len({job["folder"] for job in serve.jobs(made, "vllm", limit=60)}) == 7


@pytest.mark.parametrize("engine", BOTH)
def test_an_engine_that_counts_alike_passes(engine: Engine) -> None:
    made = serving(FakeLibrary())
    cells, rows = serve.judge(made, engine, answers(made, engine))
    assert set(verdicts(cells).values()) == {"pass"}
    assert [cell.stage for cell in cells] == ["loads", "greedy", *["loads", "greedy", "counters"] * 2]
    assert {(cell.engine, cell.engine_version, cell.tier, cell.family) for cell in cells} == {
        (engine, "1.2", "serve", "qwen3_5")
    }
    assert [(row.k, row.accepted, row.verify_steps) for row in rows] == [(1, (4,), 7), (3, (5, 4, 2), 7)]
    assert all(row.accepted == row.library_accepted and row.accept_length == row.library_accept_length for row in rows)
    assert rows[1].accept_length == pytest.approx(1 + 11 / 7)


def test_an_oracle_passes_only_if_every_draft_is_accepted() -> None:
    made = serving(FakeLibrary(oracle=True), checkpoint("oracle"))
    records = answers(made, "vllm", oracle=True)
    assert verdicts(serve.judge(made, "vllm", records)[0])["oracle, k=3", "oracle"] == "pass"
    records["serve/qwen3_5/oracle/3/vllm"]["counters"]["accepted"] -= 2
    cell = only([c for c in serve.judge(made, "vllm", records)[0] if c.variant == "oracle, k=3"], "oracle")
    assert (cell.verdict, cell.max_abs_diff, cell.reason) == ("differs", 2.0, "accepted 19 of 21 drafts")


def test_one_count_off_names_the_step_and_the_margin_there() -> None:
    library = FakeLibrary()
    cell = only(
        judged(library, 3, accepted=[[3, 0, 1, 1], [0, 3, 2]], **counters(accepted=10, accepted_per_depth=[5, 3, 2])),
        "counters",
    )
    assert (cell.verdict, cell.max_abs_diff) == ("differs", 1.0)
    assert "prompt 0, step 2: accepted 1 of 3 drafts, the library 2" in cell.reason
    assert "leads by 5.0e-01" in cell.reason
    # Six tokens were known before step 2 (the prefill's, four of step 0, one of step 1), and the draft of depth 1.
    assert library.asked == [(0, 7, 2)]


def test_sums_that_hide_two_different_steps_differ() -> None:
    cell = only(judged(FakeLibrary(), 3, accepted=[[3, 2, 0, 1], [0, 3, 2]]), "counters")
    assert (cell.verdict, cell.max_abs_diff) == ("differs", 0.0)
    assert "prompt 0, step 1: accepted 2 of 3 drafts, the library 0" in cell.reason


def test_sums_that_the_steps_do_not_explain_differ() -> None:
    cell = only(judged(FakeLibrary(), 3, **counters(drafted=24)), "counters")
    assert (cell.verdict, cell.max_abs_diff) == ("differs", 3.0)
    assert "drafted 24, the library 21" in cell.reason


def test_another_number_of_steps_differs() -> None:
    cell = only(judged(FakeLibrary(), 3, accepted=[[3, 0, 2, 1], [0, 3]], **counters(verify_steps=6)), "counters")
    assert cell.verdict == "differs"
    assert "prompt 1: 2 verify steps, the library 3" in cell.reason


def test_a_numeric_tie_is_shown_as_one_and_is_no_pass() -> None:
    cell = only(judged(FakeLibrary(margin=1e-5), 3, accepted=[[3, 0, 1, 1], [0, 3, 2]]), "counters")
    assert cell.verdict == "not_judged"
    assert cell.reason.startswith("numeric tie: prompt 0, step 2")
    assert not cell.expected


def test_another_token_is_found_against_both_sides() -> None:
    outputs = copy.deepcopy(OUTPUTS)
    outputs[1][7] = 5
    cell = only(judged(FakeLibrary(), 3, outputs=outputs), "greedy")
    assert cell.verdict == "differs"
    assert (
        "prompt 1, token 7: 5, plain decoding has 207; there the library's best logit leads by 5.0e-01" in cell.reason
    )
    assert "the library has 207" in cell.reason


def test_plain_outputs_are_judged_too() -> None:
    outputs = copy.deepcopy(OUTPUTS)
    outputs[0][0] = 5
    cell = only(judged(FakeLibrary(), 0, outputs=outputs), "greedy")
    assert (cell.verdict, "prompt 0, token 0: 5, the library has 100" in cell.reason) == ("differs", True)


def test_too_few_tokens_differ() -> None:
    cell = only(judged(FakeLibrary(), 3, outputs=[OUTPUTS[0][:-1], OUTPUTS[1]]), "greedy")
    assert (cell.verdict, cell.reason) == ("differs", f"prompt 0: {NEW_TOKENS - 1} tokens for {NEW_TOKENS}")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"unfilled": ["model.fc.weight"]}, "that no tensor of the checkpoint filled: ['model.fc.weight']"),
        ({"target_unfilled": ["model.norm.weight"]}, "of the target that no tensor of the checkpoint filled"),
        ({"draft_class": "Other"}, "expected the draft module Qwen3_5MTP, the engine built Other"),
    ],
)
def test_a_checkpoint_that_does_not_fill_the_module_differs(changes: dict[str, Any], words: str) -> None:
    cell = only(judged(FakeLibrary(), 3, **changes), "loads")
    assert cell.verdict == "differs"
    assert words in cell.reason


@pytest.mark.parametrize(
    ("status", "error", "verdict"),
    [
        ("error", "ValueError: no such head", "differs"),
        ("error", "CountingError: two steps in one", "not_judged"),
        ("died", "signal 9", "not_judged"),
        ("timeout", "ran past its limit of 60 s", "not_judged"),
    ],
)
def test_a_run_that_did_not_finish_gives_one_cell_with_the_log(status: str, error: str, verdict: str) -> None:
    cells = judged(FakeLibrary(), 3, status=status, error=error)
    assert [(cell.stage, cell.verdict, cell.reason) for cell in cells] == [
        ("loads", verdict, f"{error}; log: /served/log.txt")
    ]


def test_without_plain_outputs_nothing_is_called_greedy() -> None:
    made = serving(FakeLibrary())
    records = answers(made, "vllm")
    del records["serve/qwen3_5/trained/0/vllm"]
    found = verdicts(serve.judge(made, "vllm", records)[0])
    assert found["trained, k=0", "loads"] == found["trained, k=3", "greedy"] == "not_judged"
    assert found["trained, k=3", "counters"] == "pass"


def test_counts_that_could_not_differ_are_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACCEPTED, 3, [(0, 0, 0), (0, 0)])
    cell = only(judged(FakeLibrary(), 3), "counters")
    assert cell.verdict == "not_judged"
    assert "tells little" in cell.reason


@pytest.mark.parametrize(("accepted", "verdict"), [(12, "pass"), (20, "differs")])
def test_bf16_is_judged_by_accept_length_and_own_plain_outputs(accepted: int, verdict: str) -> None:
    """The library accepts 6 of 4 steps and 5 of 3: lengths 2.5 and 2.667, so three standard errors are .25."""
    made = serving(FakeLibrary(), checkpoint("demo", dtypes={"vllm": "bfloat16"}, drafts=(3,)))
    records = answers(made, "vllm")
    outputs = [[token + 1 for token in output] for output in OUTPUTS]
    for record in records.values():
        record["outputs"] = outputs
    records["serve/qwen3_5/demo/3/vllm"]["counters"]["accepted"] = accepted
    cells, rows = serve.judge(made, "vllm", records)
    cell = only(cells, "counters")
    assert (cell.verdict, cell.tolerance) == (verdict, pytest.approx(0.25))
    assert cell.max_abs_diff == pytest.approx((accepted - 11) / 7)
    assert {found.verdict for found in cells if found.stage == "greedy"} == {"pass"}
    assert rows[0].dtype == "bfloat16"


@pytest.mark.parametrize(("margin", "verdict"), [(0.2, "pass"), (0.3, "differs")])
def test_bf16_outputs_may_part_at_a_tie(margin: float, verdict: str) -> None:
    made = serving(FakeLibrary(margin=margin), checkpoint("demo", dtypes={"vllm": "bfloat16"}, drafts=(3,)))
    records = answers(made, "vllm")
    records["serve/qwen3_5/demo/3/vllm"]["outputs"][1][-1] = 5
    cell = only([c for c in serve.judge(made, "vllm", records)[0] if c.variant == "demo, k=3"], "greedy")
    assert cell.verdict == verdict
    assert cell.reason.startswith("numeric tie: ") == (verdict == "pass")
    assert "prompt 1, token 39: 5, plain decoding has 239" in cell.reason


def test_what_an_engine_cannot_run_is_not_judged_as_expected() -> None:
    made = serving(FakeLibrary(), checkpoint(), checkpoint("demo", not_run={"vllm": "no kernel"}))
    cells, rows = serve.judge(made, "vllm", answers(made, "vllm"))
    assert [(c.variant, c.stage, c.reason, c.expected) for c in cells if c.verdict != "pass"] == [
        ("demo", "all", "no kernel", True)
    ]
    assert {row.head for row in rows} == {"trained"}


def test_what_an_engine_cannot_judge_is_said_once_for_all_heads() -> None:
    view = dataclasses.replace(CASE.engines["vllm"], unjudged={"indexer": "needs a GPU"})
    made = serving(FakeLibrary(), checkpoint(), checkpoint("untouched", plain="trained"))
    made.case = dataclasses.replace(CASE, engines={**CASE.engines, "vllm": view})
    cells, _ = serve.judge(made, "vllm", answers(made, "vllm"))
    assert [(c.variant, c.stage, c.reason, c.expected) for c in cells if c.verdict != "pass"] == [
        ("all", "indexer", "needs a GPU", True)
    ]


def test_no_environment_is_one_cell_that_says_how_to_get_one() -> None:
    cells, rows = serve.judge(serving(FakeLibrary()), "vllm", None)
    assert (len(cells), cells[0].verdict, rows) == (1, "not_judged", [])
    assert "mtp-zoo conform --install vllm" in cells[0].reason
