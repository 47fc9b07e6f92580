from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mtp_zoo.training.config import TrainConfig
from mtp_zoo.training.curves import POINTS, thin, training_report
from mtp_zoo.training.report import Report

LOADING_ATTRIBUTES = {"src", "href", "xlink:href", "srcset", "data", "action", "poster"}


class Page(HTMLParser):
    """What a browser would load, the ids, the ids that are used, and the JSON blocks."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.scripts: dict[str, Any] = {}
        self._script: str | None = None
        self.feed(content)
        self.close()
        self.used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', content))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.loads += [value for name, value in attrs if name in LOADING_ATTRIBUTES and value and value[0] != "#"]
        if "id" in values:
            self.ids.append(str(values["id"]))
        if tag == "script":
            assert values["type"] == "application/json"
            self._script = str(values["id"])
        if tag in ("link", "iframe", "object", "embed", "base"):
            self.loads.append(tag)

    def handle_data(self, data: str) -> None:
        if self._script:
            self.scripts[self._script] = json.loads(data)
            self._script = None


def figure(points: int = 5) -> Any:
    from matplotlib.figure import Figure

    made = Figure(figsize=(4, 2))
    axes = made.add_subplot()
    axes.plot(range(points), [value**2 for value in range(points)], label="curve & more")
    axes.legend()
    return made


def step_metrics(step: int, *, held_out: bool = False) -> dict[str, float]:
    names = [f"mtp/{name}_{depth}" for name in ("loss", "acc", "match", "accept") for depth in (1, 2, 3)]
    values = {name: 1 / (step + place) for place, name in enumerate(names)}
    values |= {"mtp/accept_length": 1 + step / 100, "mtp/accept_length_sampled": 1 + step / 90}
    record = {"step": step, "loss": 3 / step, "lr": 1e-3, "grad_norm": 1.0, "tokens": 100, **values}
    return record | ({f"eval/{name}": value for name, value in values.items()} | {"eval/loss": 0.5} if held_out else {})


@pytest.fixture
def config() -> TrainConfig:
    data = {"path": "d", "text_field": "text"}
    return TrainConfig.from_dict({"model": "a<b", "out": "o", "run_dir": "r", "data": data, "steps": 30})


def test_a_report_loads_nothing_from_anywhere(tmp_path: Path, config: TrainConfig) -> None:
    metrics = [step_metrics(step, held_out=step % 10 == 0) for step in range(1, 31)]
    training_report(metrics, config, tmp_path / "report.html")
    content = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(content)
    assert page.loads == []
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", content)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_page_that_does_load_something_is_noticed() -> None:
    page = Page('<img src="http://x/y.png"><link rel="stylesheet" href="s.css"><a href="#inside"></a>')
    assert page.loads == ["http://x/y.png", "s.css", "link"]


def test_the_training_report_holds_the_data_of_its_curves(tmp_path: Path, config: TrainConfig) -> None:
    metrics = [step_metrics(step, held_out=step % 10 == 0) for step in range(1, 31)]
    training_report(metrics, config, tmp_path / "report.html", facts={"tokens per second": "12,345"})
    content = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert Page(content).scripts["metrics"] == metrics
    assert content.count("<svg") == 5
    for text in (
        "accept length",
        "depth 3, held out",
        "12,345",
        "optimizer.lr",
        "held out",
        "Training the head of a&lt;b",
    ):
        assert text in content


def test_curves_are_drawn_through_every_step(tmp_path: Path, config: TrainConfig) -> None:
    """Each training curve is a path of one point a step; three depths make three such paths in the loss figure."""
    metrics = [step_metrics(step) for step in range(1, 31)]
    training_report(metrics, config, tmp_path / "report.html")
    content = (tmp_path / "report.html").read_text(encoding="utf-8")
    loss = content.split("<h2>Loss</h2>")[1].split("</figure>")[0]
    lines = re.findall(r'<path d="(M [^"]*)" clip-path', loss)
    assert [line.count("L") + 1 for line in lines].count(30) == 3


def test_a_long_run_is_thinned_and_keeps_its_end_and_its_evaluations() -> None:
    metrics = [step_metrics(step, held_out=step == 4999) for step in range(1, 10_001)]
    shown = thin(metrics, POINTS)
    assert len(shown) <= POINTS + 2
    assert {1, 4999, 10_000} <= {int(m["step"]) for m in shown}
    assert thin(metrics[:POINTS], POINTS) == metrics[:POINTS]


def test_figures_are_wellformed_and_their_ids_do_not_clash() -> None:
    report = Report("t")
    report.figure(figure(), "one")
    report.figure(figure(), "two")
    content = report.html()
    page = Page(content)
    assert len(page.ids) == len(set(page.ids))
    assert page.used <= set(page.ids)
    for svg in re.findall(r"<svg.*?</svg>", content, flags=re.DOTALL):
        ElementTree.fromstring(svg.replace("xlink:href", "href"))


def test_figures_follow_the_colour_scheme() -> None:
    report = Report("t")
    report.figure(figure(), "one")
    content = report.html()
    assert "#000000" not in content
    assert "currentColor" in content
    assert "color-scheme: light dark" in content
    assert 'name="viewport"' in content


def test_text_and_cells_are_literal_but_for_code_and_bold() -> None:
    report = Report("a < b")
    report.text("**bold** and `x < y`\n<script>alert(1)</script>")
    report.table(("name", "value"), [("<b>", 1.23456789), ("c", 2)])
    report.data("numbers", {"text": "</script><b>"})
    content = report.html()
    assert "<p><strong>bold</strong> and <code>x &lt; y</code>\n&lt;script&gt;alert(1)&lt;/script&gt;</p>" in content
    assert '<tr><td>&lt;b&gt;</td><td class="number">1.235</td></tr>' in content
    assert "<title>a &lt; b</title>" in content
    assert Page(content).scripts["numbers"] == {"text": "</script><b>"}


def test_the_same_report_is_the_same_bytes() -> None:
    def page() -> str:
        report = Report("t")
        report.figure(figure(), "one")
        return report.html()

    assert page() == page()


def test_writing_replaces_the_old_report_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old", encoding="utf-8")
    Report("new").write(path)
    assert "<h1>new</h1>" in path.read_text(encoding="utf-8")
    assert list(tmp_path.iterdir()) == [path]
