"""The documentation: links lead somewhere, examples run, commands exist and print what is shown."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from mtp_zoo.cli import app
from mtp_zoo.training.config import TrainConfig
from mtp_zoo.training.trainer import train
from tests.pages import DOCS, PAGES, ROOT, Fence, anchors, broken, fences, marked, prose, relative_links


def pages_with(kind: Callable[[Fence], bool]) -> Any:
    """Parametrises a test with the pages that hold such a code block."""
    pages = [page for page in PAGES if any(map(kind, fences(page)))]
    assert pages
    return pytest.mark.parametrize("page", pages, ids=lambda page: page.stem)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that looks like the root of a checkout and may be written to."""
    (tmp_path / "mtp_zoo" / "demo").mkdir(parents=True)
    (tmp_path / "mtp_zoo" / "demo" / "assets").symlink_to(ROOT / "mtp_zoo" / "demo" / "assets")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_blocks(page: Path) -> None:
    """Run the marked Python blocks of a page, one behind the other in one namespace."""
    names: dict[str, Any] = {"__name__": page.stem}
    for fence in marked(page, "run"):
        exec(compile(fence.code, str(page), "exec"), names)


def write_files(page: Path, folder: Path) -> None:
    for fence in marked(page, "file: "):
        (folder / fence.mark.removeprefix("file: ")).write_text(fence.code, encoding="utf-8")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert [found for target in relative_links(page) if (found := broken(page, target))] == []


def test_a_link_to_a_heading_that_is_gone_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` c\n\n[x](#a-b-c) [y](#gone) [z](gone.md)\n```text\n[q](no.md)\n```\n", encoding="utf-8")
    assert anchors(page) == {"a-b-c"}
    assert [broken(page, target) for target in relative_links(page)] == [
        None,
        "page.md: #gone: no such heading",
        "page.md: gone.md: no such file",
    ]


def test_the_navigation_lists_every_page() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(name for entry in nav for name in entry.values()) == [page.name for page in PAGES]


@pages_with(lambda fence: fence.mark == "run")
def test_marked_python_blocks_run(page: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(page, checkout)
    monkeypatch.setattr(sys, "stdout", sys.stderr)
    run_blocks(page)


def test_every_python_block_is_run_or_taken_from_a_file() -> None:
    marks = {fence.mark.split()[0] for page in PAGES for fence in fences(page) if fence.language == "python"}
    assert marks == {"run", "from"}


@pages_with(lambda fence: fence.mark.startswith("from "))
def test_excerpts_stand_in_the_file_that_they_name(page: Path) -> None:
    for fence in marked(page, "from "):
        source = (ROOT / fence.mark.removeprefix("from ")).read_text(encoding="utf-8")
        assert fence.code in source


def test_the_example_configuration_trains_and_the_commands_behind_it_work(checkout: Path) -> None:
    page = DOCS / "quickstart.md"
    write_files(page, checkout)
    config = TrainConfig.from_yaml("train.yaml")
    sources = [ROOT / "mtp_zoo" / name for name in ("batch.py", "head.py", "keymap.py")]
    lines = [json.dumps({config.data.text_field: source.read_text(encoding="utf-8")}) for source in sources]
    config.data.path.write_text("\n".join(lines), encoding="utf-8")
    train(config.model_copy(update={"steps": 2, "batch_size": 2}))

    named = re.findall(rf"`{config.run_dir}/([\w.]+)", prose(page))
    assert sorted({*named}) == sorted(path.name for path in config.run_dir.iterdir())
    behind = [line for line in commands(page) if re.match(r"mtp-zoo (eval trained|export) ", line)]
    assert len(behind) == 2
    for line in behind:
        result = invoke(line)
        assert result.exit_code == 0, result.output


def commands(page: Path) -> list[str]:
    return [line for fence in fences(page) if fence.language == "bash" for line in fence.code.splitlines()]


def invoke(line: str) -> Any:
    return CliRunner().invoke(app, shlex.split(line)[1:])


@pages_with(lambda fence: "mtp-zoo " in fence.code and fence.language == "bash")
def test_every_command_line_parses(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    for line in commands(page):
        program, *words = shlex.split(line)
        if program == "mtp-zoo":
            verb = group.commands[words[0]]
            verb.make_context(words[0], words[1:])


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {line.split()[1] for page in PAGES for line in commands(page) if line.startswith("make ")}
    assert named
    assert named <= targets


def test_every_benchmark_exists_and_is_listed() -> None:
    listed = {line.split()[1] for line in commands(DOCS / "benchmarks.md") if line.startswith("python ")}
    runnable = {
        f"benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()
    }
    assert listed == runnable


@pages_with(lambda fence: fence.mark.startswith("output of: "))
def test_shown_output_is_what_the_command_prints(page: Path, checkout: Path) -> None:
    for fence in marked(page, "output of: "):
        found = invoke(fence.mark.removeprefix("output of: ")).stdout
        assert [line.rstrip() for line in found.splitlines()] == fence.code.splitlines()
