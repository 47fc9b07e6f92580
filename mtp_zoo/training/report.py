"""Reports: one HTML file that needs nothing else, readable on a phone, in light and in dark.

    report = Report("Two runs")
    report.text("The second run has **twice** the batch.")
    report.table(("run", "loss"), [("a", 1.25), ("b", 1.21)])
    report.figure(figure, "Loss over steps.")
    report.write("report.html")

Figures are matplotlib's, inlined as SVG with their text as text. Figure is imported where it is used: this module loads
without matplotlib.
"""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_zoo.training.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem;
  color: light-dark(#1b1b1f, #e4e4e8); background: light-dark(#fff, #17171b); }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.2rem; margin-top: 2rem; }
p { white-space: pre-line; overflow-wrap: anywhere; }
figure { margin: 1.5rem 0; } figure svg { width: 100%; height: auto; }
figure svg text { fill: currentColor; font-family: inherit; }
figcaption, .scroll { font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; } th, td { padding: .25rem .75rem .25rem 0; text-align: left; }
th { border-bottom: 1px solid; } td { border-bottom: 1px solid #8884; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
code { background: #8882; padding: 0 .2em; border-radius: 3px; }
"""

INLINE_MARKS = ((re.compile(r"`([^`]+)`"), r"<code>\1</code>"), (re.compile(r"\*\*(.+?)\*\*"), r"<strong>\1</strong>"))


class Report:
    """An HTML page, built from top to bottom.

    Args:
        title: heading of the page.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._parts: list[str] = []
        self._figures = 0

    def heading(self, text: str) -> None:
        """A second-level heading."""
        self._parts.append(f"<h2>{html.escape(text)}</h2>")

    def text(self, text: str) -> None:
        """A paragraph, line breaks kept; `code` in backticks and **bold** are marked up, all else is literal."""
        content = html.escape(text, quote=False)
        for pattern, replacement in INLINE_MARKS:
            content = pattern.sub(replacement, content)
        self._parts.append(f"<p>{content}</p>")

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table; columns of numbers are aligned right. Floats are written with four significant digits."""
        columns = list(zip(*rows, strict=True)) or [()] * len(headers)
        kinds = [' class="number"' if column and all(map(_is_number, column)) else "" for column in columns]
        lines = [_row("th", headers, kinds), *(_row("td", row, kinds) for row in rows)]
        self._parts.append('<div class="scroll"><table>\n' + "\n".join(lines) + "\n</table></div>")

    def figure(self, figure: Figure, caption: str) -> None:
        """A matplotlib figure with a caption. Black becomes the page's text colour, and backgrounds transparent."""
        self._figures += 1
        svg = _inline_svg(figure, f"figure{self._figures}-", caption)
        self._parts.append(f"<figure>\n{svg}\n<figcaption>{html.escape(caption)}</figcaption>\n</figure>")

    def data(self, name: str, values: object) -> None:
        """Numbers for programs: JSON in a script element with the id `name`."""
        content = json.dumps(values).replace("<", "\\u003c")
        self._parts.append(f'<script type="application/json" id="{html.escape(name)}">{content}</script>')

    def html(self) -> str:
        """The whole page."""
        title = html.escape(self.title)
        head = (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        )
        return head + "\n".join(self._parts) + "\n</body>\n</html>\n"

    def write(self, path: str | Path) -> None:
        """Write the page; a reader never sees half of it."""
        write_atomic(Path(path), self.html())


def _row(tag: str, cells: Sequence[object], kinds: Sequence[str]) -> str:
    written = (f"<{tag}{kind}>{html.escape(_cell(cell))}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))
    return f"<tr>{''.join(written)}</tr>"


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_number(value: object) -> bool:
    return bool(re.fullmatch(r"[-+]?[\d,]*\.?\d+(e[-+]?\d+)?%?", _cell(value))) or value == ""


def _inline_svg(figure: Figure, prefix: str, label: str) -> str:
    """The figure as an <svg> element whose ids start with `prefix`, so that several fit on one page."""
    import matplotlib as mpl

    _make_transparent(figure)
    out = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg)
    svg = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{prefix}", svg)
    svg = svg.replace("#000000", "currentColor")
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1).strip()


def _make_transparent(figure: Any) -> None:
    figure.patch.set_alpha(0)
    for axes in figure.axes:
        axes.patch.set_alpha(0)
        legend = axes.get_legend()
        if legend is not None:
            legend.get_frame().set_alpha(0)
