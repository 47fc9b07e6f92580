"""The runner: which jobs it hands out, and what becomes of engines that are absent, agree, or do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from mtp_zoo.errors import ConformanceError
from mtp_zoo.spec import Engine
from mtp_zoo_conformance import ours, run
from mtp_zoo_conformance.cases import get_case
from mtp_zoo_conformance.engines.client import EnginePython
from mtp_zoo_conformance.inputs import Requests
from mtp_zoo_conformance.record import DIFFERS, NOT_JUDGED, PARITY

VLLM = EnginePython("vllm", Path("/nowhere/python"), managed=False)
Answer = Callable[[Mapping[str, Any]], dict[str, Any]]


def select(*tiers: Any, engines: tuple[Engine, ...] = ("vllm",)) -> run.Selection:
    return run.Selection(families=("qwen3_5",), engines=engines, tiers=tiers)


@pytest.fixture
def first_variant_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """One variant: the others take the same way."""
    import dataclasses

    case = get_case("qwen3_5")
    one = dataclasses.replace(case, variants=case.variants[:1])
    monkeypatch.setattr(run, "get_case", lambda name: one if name == case.family else get_case(name))


@pytest.fixture
def handed_out(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Any]]:
    """Jobs go to plain torch instead of an engine; the list collects them."""
    jobs: list[Mapping[str, Any]] = []

    def answer_all(
        engine: EnginePython, batch: Sequence[Mapping[str, Any]], folder: Path, *, advance: Callable[[], None]
    ) -> dict[str, dict[str, Any]]:
        jobs.extend(batch)
        for _ in batch:
            advance()
        return {job["id"]: answer(job) for job in batch}

    monkeypatch.setattr(run, "run_jobs", answer_all)
    return jobs


def answer(job: Mapping[str, Any]) -> dict[str, Any]:
    case = get_case("qwen3_5")
    checkpoint, folder = Path(job["checkpoint"]), Path(job["folder"])
    requests = Requests.random(vocab=512, hidden=64)
    tensors = load_file(checkpoint / "model.safetensors")
    out = case.reference(tensors, case.variants[0].text_config, requests)
    head = ours.load(case, checkpoint, engine="vllm")
    folder.mkdir(parents=True, exist_ok=True)
    save_file({**out, "tap": ours.tap(head, checkpoint, requests)}, folder / "outputs.safetensors")
    return {
        "id": job["id"],
        "status": "ok",
        "version": "9.9",
        "torch": "2",
        "device": "cpu",
        "backend": "PLAIN",
        "draft_class": case.engines["vllm"].draft_class,
        "unfilled": [],
        "shims": ["a stand-in"],
        "settings": ["eager"],
        "log": "/log",
    }


@pytest.mark.usefixtures("first_variant_only")
def test_an_engine_that_agrees_is_parity(handed_out: list[Mapping[str, Any]], tmp_path: Path) -> None:
    record = run.run(select("module"), {"vllm": VLLM}, tmp_path, limit=60)
    (job,) = handed_out
    assert (job["kind"], job["dtype"], job["steps"], job["limit"]) == ("module", "float32", 4, 60)
    assert Path(job["inputs"]).is_file()
    assert record.exit_code == PARITY
    assert {cell.verdict for cell in record.cells} == {"pass"}
    assert [(e.engine, e.version, e.backend, e.shims, e.settings) for e in record.engines] == [
        ("vllm", "9.9", "PLAIN", ("a stand-in",), ("eager",))
    ]
    assert record.seconds > 0


@pytest.mark.usefixtures("first_variant_only")
def test_an_engine_that_differs_is_found(
    handed_out: list[Mapping[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = answer

    def shifted(job: Mapping[str, Any]) -> dict[str, Any]:
        record = honest(job)
        path = Path(job["folder"]) / "outputs.safetensors"
        out = load_file(path)
        out["step3.mlp"][1] += 0.5
        save_file(out, path)
        return record

    monkeypatch.setattr(f"{__name__}.answer", shifted)
    record = run.run(select("module"), {"vllm": VLLM}, tmp_path, limit=60)
    assert record.exit_code == DIFFERS
    assert [(cell.stage, cell.reason) for cell in record.cells if cell.verdict == "differs"] == [
        ("mlp", "mlp by 5.00e-01 (step3, request 1); first to differ: mlp by 5.00e-01 (step3, request 1)")
    ]


@pytest.mark.usefixtures("first_variant_only")
def test_an_engine_that_is_absent_is_not_judged(tmp_path: Path) -> None:
    record = run.run(select("module", "serve", engines=("vllm", "sglang")), {}, tmp_path, limit=60)
    assert {(cell.engine, cell.tier, cell.verdict) for cell in record.cells} == {
        (engine, tier, "not_judged") for engine in ("vllm", "sglang") for tier in ("module", "serve")
    }
    assert record.exit_code == NOT_JUDGED
    assert record.engines == []


@pytest.mark.usefixtures("first_variant_only")
def test_tiers_without_an_engine_ask_none(handed_out: list[Mapping[str, Any]], tmp_path: Path) -> None:
    record = run.run(select("keys", "forward"), {"vllm": VLLM}, tmp_path, limit=60)
    assert handed_out == []
    assert {cell.tier for cell in record.cells} == {"keys", "forward"}
    assert record.exit_code == PARITY


def test_a_family_without_a_case_is_an_error(tmp_path: Path) -> None:
    selection = run.Selection(families=("nonesuch",), engines=(), tiers=("keys",))
    with pytest.raises(ConformanceError, match="family 'nonesuch': it has none"):
        run.run(selection, {}, tmp_path, limit=60)
