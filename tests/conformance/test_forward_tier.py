"""Tier forward: our head agrees with plain torch, and stops agreeing with every convention that is flipped."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from mtp_zoo_conformance import compare
from mtp_zoo_conformance.case import TAP
from mtp_zoo_conformance.flips import CONVENTIONS, Flip
from mtp_zoo_conformance.ours import load
from mtp_zoo_conformance.prepared import Prepared
from mtp_zoo_conformance.tiers.forward import judge
from mtp_zoo_conformance.tiers.judged import Judge, judge_flips, judge_outputs, our_outputs

PLAIN = Judge("reference", "0", "forward")


def test_our_head_agrees_with_plain_torch_at_every_stage(
    prepared: Prepared, reference_outputs: Mapping[str, Tensor]
) -> None:
    cells = judge_outputs(prepared, PLAIN, reference_outputs)
    assert [cell.stage for cell in cells] == [
        "embedding_norm",
        "hidden_norm",
        "fusion",
        "attention",
        "mlp",
        "output_norm",
        "recycle",
        "logits",
        "rollout",
        "drafts",
    ]
    assert {cell.verdict for cell in cells} == {"pass"}


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("fuse_order", r"fusion by .* \(prefill, .*\)"),
        ("recycle", r"recycle by .* \(prefill, .*\)"),
        ("position_rule", r"attention by .* \(step2, .*\)"),
        ("zero_first_embedding", r"embedding_norm by .* \(prefill, request \d, position 0\)"),
        ("norm_weight", r"embedding_norm by .* \(prefill, .*\)"),
        ("rotary_pairs", r"attention by .* \(prefill, .*\)"),
        ("rotary_base", r"attention by .* \(prefill, .*\)"),
        ("qk_norm", r"attention by .* \(prefill, .*\)"),
        ("kv_heads", r"attention by .* \(prefill, .*\)"),
        ("attention_gate", r"attention by .* \(prefill, .*\)"),
    ],
)
def test_a_flipped_convention_is_caught_at_its_own_stage(
    name: str, first: str, prepared: Prepared, reference_outputs: Mapping[str, Tensor]
) -> None:
    (flip,) = (flip for flip in (*CONVENTIONS, *prepared.case.flips) if flip.name == name)
    mine = our_outputs(prepared, PLAIN, reference_outputs, dtype=torch.float32, flip=flip)
    bounds = compare.fp32_tolerances("reference")
    miss = compare.first_miss(compare.differences(mine, reference_outputs, prepared.requests, bounds))
    assert miss is not None
    assert re.fullmatch(first, str(miss))


def test_the_flips_of_a_case_are_all_reported(prepared: Prepared, reference_outputs: Mapping[str, Tensor]) -> None:
    results = judge_flips(prepared, PLAIN, reference_outputs)
    assert {result.flip for result in results} == {
        *(flip.name for flip in CONVENTIONS if flip.name != "hidden_tap"),  # plain torch runs no target
        *(flip.name for flip in prepared.case.flips),
    }
    assert all(result.caught for result in results)


def test_the_tier_judges_the_tap_and_catches_another_one(prepared: Prepared) -> None:
    cells, flips = judge(prepared)
    assert [cell.verdict for cell in cells if cell.stage == TAP] == ["pass"]
    (flip,) = (result for result in flips if result.flip == "hidden_tap")
    assert flip.caught


def test_a_flip_that_changes_nothing_is_not_reported_as_caught(
    prepared: Prepared, reference_outputs: Mapping[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtp_zoo_conformance.tiers.judged.CONVENTIONS", (Flip("nothing", weights=lambda head: None),))
    results = {result.flip: result.caught for result in judge_flips(prepared, PLAIN, reference_outputs)}
    assert results.pop("nothing") is False
    assert all(results.values())


def test_a_damaged_weight_is_a_difference_with_its_first_stage(
    prepared: Prepared, reference_outputs: Mapping[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*args: object, **kwargs: object) -> object:
        head = load(*args, **kwargs)  # type: ignore[arg-type]
        head.get_submodule("depths.0.block.mlp.up_proj").weight.data[3] *= 2
        return head

    monkeypatch.setattr("mtp_zoo_conformance.ours.load", damaged)
    cells = {cell.stage: cell for cell in judge_outputs(prepared, PLAIN, reference_outputs)}
    assert [
        stage for stage in ("embedding_norm", "hidden_norm", "fusion", "attention") if cells[stage].verdict != "pass"
    ] == [
        "hidden_norm",  # the states of later steps carry the damage
        "fusion",
        "attention",
    ]
    assert cells["logits"].verdict == "differs"
    assert "first to differ: mlp by" in cells["logits"].reason
    assert "(prefill, request" in cells["logits"].reason
