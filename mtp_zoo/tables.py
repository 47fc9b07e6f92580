"""Plain-text tables for reports and the command line."""

from __future__ import annotations

from collections.abc import Sequence

UNBOUNDED = 100_000
"""Width of the page in characters; a table takes what its cells need."""


def render_table(
    title: str, headers: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()
) -> str:
    """A table as text, without colour and as wide as its cells; `right` lists the columns to align right."""
    import io

    from rich.console import Console
    from rich.table import Table

    table = Table()
    for position, header in enumerate(headers):
        table.add_column(header, justify="right" if position in right else "left")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    out = io.StringIO()
    # Cells come from files: nothing in them is markup, and no name is folded or cut.
    console = Console(file=out, width=UNBOUNDED, color_system=None, markup=False, emoji=False, highlight=False)
    console.print(table)
    return f"{title}\n{out.getvalue()}".rstrip("\n")
