"""A run in words: verdicts, what lies nearest to its tolerance, what was ours, and what is not a plain pass."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from mtp_zoo_conformance import report, tables
from mtp_zoo_conformance.record import DIFFERS, NOT_JUDGED, PARITY, FlipResult, Record
from tests.conformance.records import cell, parity


@pytest.mark.parametrize(
    ("record", "code", "words"),
    [
        (parity(), PARITY, "Parity."),
        (Record(), NOT_JUDGED, "Nothing was judged."),
        (Record(cells=[cell("vllm", "module", "all", "not_judged", expected=True)]), NOT_JUDGED, "Nothing was judged."),
        (
            Record(cells=[*parity().cells, cell("vllm", "serve", "all", "not_judged")]),
            NOT_JUDGED,
            "Something could not be judged.",
        ),
        (
            Record(cells=[cell("vllm", "module", "mlp", "differs"), cell("vllm", "serve", "all", "not_judged")]),
            DIFFERS,
            "Judged, and something differs.",
        ),
        (
            Record(cells=parity().cells, sensitivity=[FlipResult("qwen3_5", "vllm", "recycle", False, 1e-6)]),
            DIFFERS,
            "Judged, and something differs.",
        ),
    ],
)
def test_the_end_of_a_run(record: Record, code: int, words: str) -> None:
    assert record.exit_code == code
    assert tables.end(record) == words


def test_a_row_names_the_stage_nearest_to_its_tolerance() -> None:
    record = Record(
        cells=[
            cell("vllm", "module", "fusion", diff=3e-5, tolerance=1e-4),
            cell("vllm", "module", "logits", diff=2e-3, tolerance=1e-2),
            cell("vllm", "module", "drafts"),
        ]
    )
    (row,) = tables.summary_rows(record)
    assert row == ("qwen3_5", "untied", "module", "vllm 0.32.0", "3/3", "fusion", "3.0e-05", "1.0e-04", "pass")


def test_a_bound_of_zero_is_far_exceeded_by_anything() -> None:
    counters = cell("vllm", "serve", "counters", "differs", diff=1.0, tolerance=0.0)
    (row,) = tables.summary_rows(Record(cells=[counters, cell("vllm", "serve", "x", diff=0.0, tolerance=0.0)]))
    assert row[5:] == ("counters", "1", "0", "DIFFERS")


def test_rows_stand_by_tier() -> None:
    shuffled = Record(
        cells=[
            cell("none", "keys", "claimed", variant="a"),
            cell("reference", "forward", "logits", variant="a"),
            cell("none", "keys", "claimed", variant="b"),
        ]
    )
    assert [row[1:3] for row in tables.summary_rows(shuffled)] == [("a", "keys"), ("b", "keys"), ("a", "forward")]


def test_a_part_that_is_not_judged_shows_in_the_verdict() -> None:
    verdicts = {row[1:4]: row[-1] for row in tables.summary_rows(parity())}
    assert verdicts["hybrid", "module", "vllm 0.32.0"] == "pass, 1 not judged"
    missing = Record(cells=[cell("vllm", "module", "tap", "not_judged"), cell("vllm", "module", "mlp")])
    assert tables.summary_rows(missing)[0][-1] == "not judged"


def test_what_several_cells_have_to_say_is_said_once() -> None:
    record = Record(
        cells=[
            cell("sglang", "module", "all", "not_judged", variant="a", reason="no environment"),
            cell("sglang", "module", "all", "not_judged", variant="b", reason="no environment"),
            cell("vllm", "module", "mlp", "differs", reason="by 5"),
        ]
    )
    assert list(tables.remarks(record)) == [
        ("qwen3_5, module, sglang 0.5.23", "a, b: not judged: no environment"),
        ("qwen3_5, module, vllm 0.32.0", "untied (mlp): DIFFERS: by 5"),
    ]


def test_flips_that_went_unseen_are_named() -> None:
    flips = [FlipResult("f", "vllm", "a", True, 0.5), FlipResult("f", "vllm", "b", False, 1e-6)]
    flips.append(FlipResult("f", "vllm", "c", True, None))
    assert tables.sensitivity_rows(Record(sensitivity=flips)) == [("f", "vllm", "2/3", "b", "1.0e-06", "b")]


def test_the_text_says_what_was_ours() -> None:
    text = report.text(parity())
    assert "ours, not the engine's: nothing" in text
    assert "ours, not the engine's: bodies of the sgl_kernel operators in plain torch" in text
    assert "hybrid (tap): not judged: bf16 only" in text
    several = dataclasses.replace(parity().engines[1], shims=("norms", "attention"))
    assert "  ours, not the engine's:\n      norms\n      attention" in report.text(Record(engines=[several]))
    assert "- ours, not the engine's:\n    - norms\n    - attention" in report.markdown(Record(engines=[several]))
    assert text.endswith("Parity. 321 s; mtp_zoo 0.1.0, torch 2.13.0+cpu, transformers 5.24.0")


@pytest.mark.parametrize("record", [parity(), Record()], ids=["full", "empty"])
def test_the_files_of_a_report(record: Record, tmp_path: Path) -> None:
    report.write(record, tmp_path / "report")
    assert Record.from_dict(json.loads((tmp_path / "report" / report.JSON).read_text())) == record
    page = (tmp_path / "report" / report.PAGE).read_text()
    assert page.count("<svg") == (3 if record.cells else 0)
    assert tables.end(record) in page


def test_a_difference_that_is_no_number_is_drawn_by_its_table_only(tmp_path: Path) -> None:
    record = parity()
    record.cells.append(cell("vllm", "module", "mlp", "differs", reason="not finite"))
    record.sensitivity.append(FlipResult("qwen3_5", "vllm", "recycle", True, None))
    report.write(record, tmp_path)
    assert "not finite" in (tmp_path / report.PAGE).read_text()


def test_the_markdown_has_a_column_for_every_judge() -> None:
    lines = report.markdown(parity()).splitlines()
    assert "| stage | reference 2.13.0 | vllm 0.32.0 | sglang 0.5.23 |" in lines
    assert "| logits | 2.1e-06 (2.0e-05) | 3.4e-06 (1.0e-04) | 8.9e-07 (1.0e-05) |" in lines
    assert "| drafts |  | pass |  |" in lines


def test_nothing_ends_a_cell_of_markdown_but_its_end() -> None:
    assert list(report.markdown_table(("a", "b"), [("x | y", "")])) == ["| a | b |", "|--|--|", "| x \\| y |  |"]
