"""Reading the documentation's pages: code fences with the comment in front of them, headings, links."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))

FENCE = re.compile(
    r"(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE
)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE_SPAN = re.compile(r"`[^`\n]*`")


class Fence(NamedTuple):
    """A code block, and the comment on the line in front of it ("" where there is none)."""

    mark: str
    language: str
    code: str


def fences(page: Path) -> list[Fence]:
    """All code blocks of a page, in order."""
    found = FENCE.finditer(page.read_text(encoding="utf-8"))
    return [Fence(match["mark"] or "", match["language"], match["code"]) for match in found]


def marked(page: Path, mark: str) -> list[Fence]:
    """The code blocks whose comment starts with `mark`."""
    return [fence for fence in fences(page) if fence.mark.startswith(mark)]


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def headings(page: Path) -> list[str]:
    """The text of every heading, without backticks."""
    return [text.replace("`", "") for text in HEADING.findall(prose(page))]


def anchors(page: Path) -> set[str]:
    """What a link into the page may name, as mkdocs and GitHub make it from the headings."""
    slugs = [re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", text.lower()).strip()) for text in headings(page)]
    repeated = [slug for slug, count in Counter(slugs).items() if count > 1]
    assert not repeated, f"{page.name} has several headings that give one anchor: {repeated}"
    return set(slugs)


def relative_links(page: Path) -> Iterator[str]:
    """Targets of all links that do not lead to another site."""
    for target in LINK.findall(CODE_SPAN.sub("", prose(page))):
        if "://" not in target and not target.startswith("mailto:"):
            yield target


def broken(page: Path, target: str) -> str | None:
    """Why a relative link leads nowhere, or None."""
    file, _, anchor = target.partition("#")
    goal = (page.parent / file).resolve() if file else page
    if not goal.exists():
        return f"{page.name}: {target}: no such file"
    if anchor and anchor not in anchors(goal):
        return f"{page.name}: {target}: no such heading"
    return None
