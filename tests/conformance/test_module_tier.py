"""Tier module without an engine: what becomes of a worker's record, whatever it says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mtp_zoo.errors import HeadMismatchError
from mtp_zoo.spec import Engine
from mtp_zoo_conformance import ours
from mtp_zoo_conformance.case import Twin
from mtp_zoo_conformance.cases import list_cases
from mtp_zoo_conformance.prepared import Prepared
from mtp_zoo_conformance.tiers import module

ENGINES: tuple[Engine, ...] = ("vllm", "sglang")


@pytest.fixture
def answered(prepared: Prepared, reference_outputs: Mapping[str, Tensor], tmp_path: Path) -> Prepared:
    """The variant, with plain torch's outputs where an engine's would lie."""
    head = ours.load(prepared.case, prepared.checkpoint, engine=None)
    tap = ours.tap(head, prepared.checkpoint, prepared.requests)
    for engine in ENGINES:
        (tmp_path / engine).mkdir()
        save_file({**reference_outputs, "tap": tap}, tmp_path / engine / "outputs.safetensors")
    return dataclasses.replace(prepared, folder=tmp_path)


def record(prepared: Prepared, engine: Engine, **changes: Any) -> dict[str, Any]:
    view = prepared.case.engines[engine]
    return {"status": "ok", "version": "1.2", "draft_class": view.draft_class, "unfilled": [], "log": "/l", **changes}


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_that_agrees_passes_every_stage_and_catches_every_flip(answered: Prepared, engine: Engine) -> None:
    cells, flips = module.judge(answered, engine, record(answered, engine))
    assert [cell.stage for cell in cells] == [
        "loads",
        "tap",
        *ours_stages(answered),
        "recycle",
        "logits",
        "rollout",
        "drafts",
    ]
    assert {(cell.verdict, cell.engine, cell.engine_version, cell.tier) for cell in cells} == {
        ("pass", engine, "1.2", "module")
    }
    assert {flip.flip for flip in flips} >= {"hidden_tap", "fuse_order", "norm_weight"}
    assert all(flip.caught for flip in flips)


def ours_stages(prepared: Prepared) -> list[str]:
    return list(prepared.case.stages)


def test_an_engine_that_computes_something_else_differs(
    answered: Prepared, reference_outputs: Mapping[str, Tensor]
) -> None:
    other = {name: value.clone() for name, value in reference_outputs.items()}
    other["prefill.logits"][5, 3] += 0.01
    save_file(other, answered.folder / "vllm" / "outputs.safetensors")
    cells, _ = module.judge(answered, "vllm", record(answered, "vllm"))
    (logits,) = (cell for cell in cells if cell.stage == "logits")
    assert (logits.verdict, logits.max_abs_diff) == ("differs", pytest.approx(0.01, rel=1e-3))
    assert "first to differ: logits by 1.00e-02 (prefill, request 0, position 5)" in logits.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"unfilled": ["model.fc.weight"]},
            "parameters of the draft that no tensor of the checkpoint filled: ['model.fc.weight']",
        ),
        (
            {"target_unfilled": ["lm_head"]},
            "parameters of the target that no tensor of the checkpoint filled: ['lm_head']",
        ),
        ({"draft_class": "EagleLlama"}, "expected the draft module Qwen3_5MTP, the engine built EagleLlama"),
    ],
)
def test_a_load_that_left_something_out_differs(answered: Prepared, changes: dict[str, Any], reason: str) -> None:
    cells, _ = module.judge(answered, "vllm", record(answered, "vllm", **changes))
    assert (cells[0].stage, cells[0].verdict, cells[0].reason) == ("loads", "differs", reason)


def test_a_head_that_our_side_refuses_differs_and_does_not_end_the_run(
    answered: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> object:
        raise HeadMismatchError("Reading the head: no.", remedy="None.")

    monkeypatch.setattr("mtp_zoo_conformance.ours.load", refused)
    cells, flips = module.judge(answered, "vllm", record(answered, "vllm"))
    assert [(cell.stage, cell.verdict) for cell in cells] == [("loads", "pass"), ("ours", "differs")]
    assert "our side does not run: Reading the head: no." in cells[1].reason
    assert flips == []


def test_a_leftover_that_the_case_expects_is_none(answered: Prepared) -> None:
    view = dataclasses.replace(answered.case.engines["vllm"], leftovers=(r"lm_head\..*",))
    assert module.loading_problems(record(answered, "vllm", unfilled=["lm_head.weight"]), view) == ""
    assert "fc" in module.loading_problems(record(answered, "vllm", unfilled=["lm_head.weight", "fc"]), view)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (None, "no environment: `mtp-zoo conform --install vllm` makes one, --engine-python uses one of yours"),
        ({"status": "timeout", "error": "ran past", "log": "/a/log.txt"}, "ran past; log: /a/log.txt"),
        ({"status": "died", "error": "signal 11", "log": "/a/log.txt"}, "signal 11; log: /a/log.txt"),
    ],
)
def test_what_did_not_run_is_not_judged_and_never_passes(
    answered: Prepared, found: dict[str, Any] | None, reason: str
) -> None:
    cells, flips = module.judge(answered, "vllm", found)
    assert [(cell.stage, cell.verdict, cell.reason, cell.expected) for cell in cells] == [
        ("all", "not_judged", reason, False)
    ]
    assert flips == []


def test_what_a_case_says_cannot_run_is_declared_and_not_asked_for(prepared: Prepared) -> None:
    variant = dataclasses.replace(prepared.variant, not_run={"vllm": "needs a GPU"})
    declared = dataclasses.replace(prepared, variant=variant)
    assert module.job(declared, "vllm", limit=1) is None
    assert module.job(declared, "sglang", limit=1) is not None
    cells, _ = module.judge(declared, "vllm", None)
    assert [(cell.verdict, cell.reason, cell.expected) for cell in cells] == [("not_judged", "needs a GPU", True)]


def test_a_target_that_cannot_run_leaves_the_tap_unjudged(answered: Prepared) -> None:
    variant = dataclasses.replace(answered.variant, no_target={"vllm": "BF16 only"})
    prepared = dataclasses.replace(answered, variant=variant)
    job = module.job(prepared, "vllm", limit=1)
    assert job is not None
    assert job["run_target"] is False
    cells, _ = module.judge(prepared, "vllm", record(answered, "vllm"))
    assert [(cell.verdict, cell.expected) for cell in cells if cell.reason == "BF16 only"] == [("not_judged", True)]


def test_what_an_engine_cannot_judge_is_a_cell_and_its_twin_is_in_the_job(answered: Prepared) -> None:
    made = Twin(config={"model_type": "x"}, without_fields=("y",), without_tensors=(), words="opened as x")
    view = dataclasses.replace(answered.case.engines["vllm"], twin=made, unjudged={"indexer": "needs a GPU"})
    case = dataclasses.replace(answered.case, engines={**answered.case.engines, "vllm": view})
    prepared = dataclasses.replace(answered, case=case)
    jobs = {engine: module.job(prepared, engine, limit=1) for engine in ENGINES}
    assert jobs["vllm"] is not None
    assert jobs["sglang"] is not None
    assert jobs["vllm"]["twin"] == {
        "config": {"model_type": "x"},
        "without_fields": ("y",),
        "without_tensors": (),
        "words": "opened as x",
    }
    assert jobs["sglang"]["twin"] is None
    cells, _ = module.judge(prepared, "vllm", record(answered, "vllm"))
    unjudged = [(cell.stage, cell.verdict, cell.reason, cell.expected) for cell in cells if cell.verdict != "pass"]
    assert unjudged == [("indexer", "not_judged", "needs a GPU", True)]
    assert all(cell.stage != "indexer" for cell in module.judge(prepared, "sglang", record(answered, "sglang"))[0])


def test_every_case_names_stages_that_both_sides_have() -> None:
    for case in list_cases():
        for view in case.engines.values():
            assert set(view.stages) == set(case.stages)


def test_the_judge_reads_low_precision_by_its_own_error(answered: Prepared) -> None:
    """The reference's FP32 outputs are within a BF16 head's own error; half a unit away is not."""
    rough = dataclasses.replace(answered, variant=dataclasses.replace(answered.variant, dtype="bfloat16"))
    cells, _ = module.judge(rough, "vllm", record(answered, "vllm"))
    judged = {cell.stage: cell for cell in cells}
    assert judged["logits"].verdict == "pass"
    assert judged["logits"].tolerance is not None
    assert 0.01 < judged["logits"].tolerance < 1.0
    assert rough.dtype == torch.bfloat16
