"""The comparison: every stage, every step, the first that differs, and what counts as a tie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtp_zoo_conformance import compare
from mtp_zoo_conformance.case import STAGES, TAP
from mtp_zoo_conformance.inputs import Requests

REQUESTS = Requests.random(vocab=6, hidden=4, lengths=(2, 3))
BOUNDS = dict.fromkeys((TAP, *STAGES, "rollout"), 0.1)


def outputs() -> dict[str, Tensor]:
    """A whole set of outputs, with drafts that follow from the logits."""
    out = {TAP: torch.randn(5, 4)}
    for step in ("prefill", "step2", "step3", "step4"):
        rows = 5 if step == "prefill" else 2
        out |= {f"{step}.{stage}": torch.randn(rows, 6 if stage == "logits" else 4) for stage in STAGES}
    best = [out["prefill.logits"][REQUESTS.last].argmax(-1), *(out[f"step{n}.logits"].argmax(-1) for n in (2, 3, 4))]
    return {**out, "drafts": torch.stack(best, 1)}


def with_rollout(out: dict[str, Tensor]) -> dict[str, Tensor]:
    rolled = {f"rollout.{name}": value.clone() for name, value in out.items() if name.endswith((".logits", ".recycle"))}
    return {**out, **rolled}


def moved(out: dict[str, Tensor], name: str, row: int, by: float) -> dict[str, Tensor]:
    changed = {**out, name: out[name].clone()}
    changed[name][row, -1] += by
    return changed


def test_equal_outputs_do_not_differ() -> None:
    out = with_rollout(outputs())
    found = compare.differences(out, out, REQUESTS, BOUNDS)
    assert [d.stage for d in compare.worst(found)] == [TAP, *STAGES, "rollout"]
    assert all(d.max_abs == 0 for d in found)
    assert compare.first_miss(found) is None


@pytest.mark.parametrize(
    ("name", "row", "stage", "where"),
    [
        ("tap", 3, "tap", "request 1, position 1"),
        ("prefill.fusion", 1, "fusion", "prefill, request 0, position 1"),
        ("prefill.logits", 4, "logits", "prefill, request 1, position 2"),
        ("step3.attention", 1, "attention", "step3, request 1"),
        ("rollout.step2.recycle", 0, "rollout", "step2, request 0"),
    ],
)
def test_a_difference_is_found_where_it_is(name: str, row: int, stage: str, where: str) -> None:
    theirs = outputs()
    miss = compare.first_miss(
        compare.differences(moved(with_rollout(theirs), name, row, 0.5), theirs, REQUESTS, BOUNDS)
    )
    assert miss is not None
    assert (miss.stage, miss.where) == (stage, where)
    assert miss.max_abs == pytest.approx(0.5)


def test_the_first_to_differ_is_the_first_computed_not_the_largest() -> None:
    theirs = outputs()
    ours = moved(moved(theirs, "step2.embedding_norm", 0, 9.0), "prefill.mlp", 2, 0.2)
    miss = compare.first_miss(compare.differences(ours, theirs, REQUESTS, BOUNDS))
    assert miss is not None
    assert str(miss) == "mlp by 2.00e-01 (prefill, request 1, position 0)"


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_infinitely_far_away(value: float) -> None:
    theirs = outputs()
    miss = compare.first_miss(compare.differences(moved(theirs, "step2.logits", 1, value), theirs, REQUESTS, BOUNDS))
    assert miss is not None
    assert miss.max_abs == torch.inf


def test_another_shape_is_infinitely_far_away() -> None:
    theirs = outputs()
    ours = {**theirs, "prefill.mlp": theirs["prefill.mlp"][:-1]}
    miss = compare.first_miss(compare.differences(ours, theirs, REQUESTS, BOUNDS))
    assert miss is not None
    assert (miss.stage, miss.max_abs) == ("mlp", torch.inf)


def test_another_draft_is_a_mismatch_unless_the_two_logits_tie() -> None:
    theirs = outputs()
    row = theirs["step2.logits"][1]
    row[:] = torch.tensor([0.0, 5.0, 4.7, 0.0, 0.0, 0.0])
    theirs["drafts"][1, 1] = 2
    assert compare.draft_mismatches(theirs, theirs, REQUESTS, 0.1) == ["request 1, draft 2: 1 for 2"]
    assert compare.draft_mismatches(theirs, theirs, REQUESTS, 0.2) == []


def test_bounds_of_a_low_precision_come_from_our_own_error_in_it() -> None:
    exact = with_rollout(outputs())
    rough = moved(moved(exact, "step2.mlp", 0, 0.25), "prefill.mlp", 0, 0.125)
    bounds = compare.bf16_tolerances(rough, exact, REQUESTS)
    assert bounds["mlp"] == pytest.approx(3 * 0.25)
    assert bounds["fusion"] == 0.0


def test_every_judge_has_a_named_tolerance_with_a_reason() -> None:
    assert set(compare.FP32) == {"vllm", "sglang", "reference", "transformers"}
    assert all(tolerance.name and tolerance.reason for tolerance in compare.FP32.values())
