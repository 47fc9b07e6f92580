"""The documentation's reference parts say what the code holds: fields, conventions, error classes, JSON output."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import re
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from mtp_zoo import errors
from mtp_zoo.acceptance import AcceptanceReport, PromptResult
from mtp_zoo.blocks import BlockSource
from mtp_zoo.cli import app
from mtp_zoo.demo.story import Stage, Story
from mtp_zoo.diagnosis.finding import Diagnosis, Finding
from mtp_zoo.exporter import ExportReport
from mtp_zoo.publishing import PushReport
from mtp_zoo.registry import Family
from mtp_zoo.spec import HeadSpec, PerEngine
from mtp_zoo.training.config import TrainConfig
from mtp_zoo.training.result import TrainResult
from tests.conformance.records import parity
from tests.pages import DOCS, ROOT, fences, headings, prose

SHIPPED = str(ROOT / "mtp_zoo/demo/assets/tiny-qwen3_5")


def load_script(name: str) -> Any:
    description = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert description is not None
    assert description.loader is not None
    module = importlib.util.module_from_spec(description)
    description.loader.exec_module(module)
    return module


def test_the_tables_of_fields_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["make_config_docs.py", "--check"])
    assert load_script("make_config_docs").main() == 0


def test_a_stale_table_is_found_and_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "quickstart.md"
    current = (DOCS / "quickstart.md").read_text(encoding="utf-8")
    page.write_text(current.replace("Peak learning rate", "Learning rate"), encoding="utf-8")
    script = load_script("make_config_docs")
    monkeypatch.setattr(sys, "argv", ["make_config_docs.py", "--check", "--page", str(page)])
    assert script.main() == 1
    monkeypatch.setattr(sys, "argv", ["make_config_docs.py", "--page", str(page)])
    assert script.main() == 0
    assert page.read_text(encoding="utf-8") == current


def test_the_pages_hold_the_recorded_conformance_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["make_conformance_docs.py", "--check"])
    assert load_script("make_conformance_docs").main() == 0


def test_another_run_is_recorded_in_both_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("docs/conformance.md", "README.md"):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    run = tmp_path / "run.json"
    run.write_text(json.dumps(parity().as_dict()), encoding="utf-8")
    script = load_script("make_conformance_docs")
    for words, code in ((["--check", str(run)], 1), ([str(run)], 0), (["--check"], 0)):
        monkeypatch.setattr(sys, "argv", ["make_conformance_docs.py", "--root", str(tmp_path), *words])
        assert script.main() == code
    assert "bodies of the sgl_kernel operators in plain torch" in (tmp_path / "docs/conformance.md").read_text()
    row = next(line for line in (tmp_path / "README.md").read_text().splitlines() if line.startswith("| `qwen3_5`"))
    assert row.split(" | ")[1:] == [
        "Qwen3.5 / 3.6 / 3.8, dense",
        "1 of 1 variants, 2.1e-06 (tolerance 2.0e-05), 2 of 2 flips caught",
        "2 of 2 variants, 3.4e-06 (tolerance 1.0e-04), 2 of 2 flips caught, 1 of 1 served runs",
        "1 of 1 variants, 8.9e-07 (tolerance 1.0e-05), 2 of 2 flips caught |",
    ]


def test_a_page_without_markers_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n", encoding="utf-8")
    with pytest.raises(ValueError, match="expected one"):
        load_script("make_conformance_docs").with_part(page, "")


def test_the_tables_hold_every_field_of_the_configuration() -> None:
    data = {"model": "m", "out": "o", "run_dir": "r", "steps": 1, "data": {"path": "p", "text_field": "t"}}
    fields = re.findall(
        r"^\| `([\w.]+)` \|", prose(DOCS / "quickstart.md").partition("## Every field")[2], re.MULTILINE
    )
    assert sorted(fields) == sorted(TrainConfig.from_dict(data).flat())


def rows(page: Path, heading: str) -> dict[str, list[str]]:
    """The first table under a heading: first cell without backticks -> the other cells."""
    text = prose(page).partition(f"## {heading}\n")[2]
    lines = takewhile(lambda line: line.startswith("|"), text[text.index("\n|") + 1 :].splitlines())
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][2:]
    return {name.strip("`"): rest for name, *rest in cells}


def test_every_convention_is_documented_with_its_values() -> None:
    table = rows(DOCS / "conventions.md", "HeadSpec: what shapes do not show")
    assert list(table) == [field.name for field in dataclasses.fields(HeadSpec)]
    for name, hint in get_type_hints(HeadSpec).items():
        per_engine = get_origin(hint) is PerEngine
        kind = get_args(hint)[0] if per_engine else hint
        assert ("per engine" in table[name][0]) == per_engine
        if name != "always_float":
            assert re.findall(r"`(\w+)`", table[name][0]) == list(get_args(kind))


def test_every_part_of_a_family_and_of_a_block_is_documented() -> None:
    page = DOCS / "add-a-family.md"
    assert list(rows(page, "The record")) == [field.name for field in dataclasses.fields(Family)]
    assert list(rows(page, "The block")) == [field.name for field in dataclasses.fields(BlockSource)]


def tree(kind: type[errors.MTPZooError], depth: int = 0) -> list[tuple[int, str]]:
    """(depth, name) of a class and all below it, in the order of their definition."""
    below = [entry for child in kind.__subclasses__() for entry in tree(child, depth + 1)]
    return [(depth, kind.__name__), *(entry for entry in below if hasattr(errors, entry[1]))]


def test_the_page_of_errors_draws_the_tree_of_classes() -> None:
    (drawn,) = [fence for fence in fences(DOCS / "errors.md") if fence.code.startswith("MTPZooError")]
    lines = drawn.code.splitlines()
    assert [((len(line) - len(line.lstrip())) // 4, line.strip()) for line in lines] == tree(errors.MTPZooError)


def test_the_docstring_of_errors_draws_the_same_tree() -> None:
    names = re.findall(r"\b(\w+Error)\b(?=\s{2,}|$)", inspect.getdoc(errors) or "", re.MULTILINE)
    assert names == [name for _, name in tree(errors.MTPZooError)]


def test_every_error_class_has_a_section_with_cause_and_remedy() -> None:
    page = DOCS / "errors.md"
    sections = re.split(r"^### ", prose(page), flags=re.MULTILINE)[1:]
    assert [section.split()[0] for section in sections] == [name for _, name in tree(errors.MTPZooError)]
    for section in sections:
        assert "**Cause.**" in section
        assert "**Remedy.**" in section


def example(verb: str) -> Any:
    """The JSON object under the heading of a command."""
    page = DOCS / "conventions.md"
    text = page.read_text(encoding="utf-8").partition(f"### `mtp-zoo {verb} --json`")[2]
    found = re.search(r"```json\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def assert_same_keys(shown: Any, found: Any) -> None:
    """Both hold the same keys at every level; of a list, the first entries are compared."""
    assert isinstance(found, dict) == isinstance(shown, dict)
    if isinstance(shown, dict):
        assert sorted(shown) == sorted(found)
        for key in shown:
            assert_same_keys(shown[key], found[key])
    elif isinstance(shown, list) and shown:
        assert_same_keys(shown[0], found[0])


@pytest.mark.parametrize("words", [["list"], ["inspect", SHIPPED], ["verify", SHIPPED]], ids=lambda words: words[0])
def test_the_json_of_a_command_has_the_documented_keys(words: list[str]) -> None:
    assert_same_keys(example(words[0]), json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout))


def test_the_json_of_a_result_has_the_documented_keys(tmp_path: Path) -> None:
    report = AcceptanceReport(1, (PromptResult((1, 0), (5, 6, 7), (5, 6, 7)),))
    story = Story((Stage("base", "prose", report, 0.1, 1.0, 0.1),), report, "", [], 1.0, tmp_path, tmp_path)
    trained = TrainResult(tmp_path, tmp_path, tmp_path, steps=1, seconds=1.0, tokens_per_second=1.0, metrics={})
    assert_same_keys(example("eval"), report.as_dict())
    assert_same_keys(example("conform"), parity().as_dict())
    assert_same_keys(example("demo"), story.as_dict())
    assert_same_keys(example("train"), trained.as_dict())
    for verb in ("export", "graft"):
        assert sorted(example(verb)) == sorted(field.name for field in dataclasses.fields(ExportReport))
    finding = Finding("MZ201", {"tensors": {"mtp.fc.weight": ""}})
    assert_same_keys(example("doctor"), Diagnosis("model", (finding,)).as_dict())
    assert sorted(example("push")) == sorted(field.name for field in dataclasses.fields(PushReport))


def test_every_command_has_an_example_of_its_json() -> None:
    group: Any = typer.main.get_command(app)
    verbs = [text.split()[1] for text in headings(DOCS / "conventions.md") if text.startswith("mtp-zoo ")]
    assert sorted(verbs) == sorted(group.commands)
