"""Plain-text tables for reports and the command line."""

from __future__ import annotations

from collections.abc import Sequence


def render_table(
    title: str, headers: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()
) -> str:
    """A table as text, without colour; `right` lists the columns to align right."""
    import io

    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for position, header in enumerate(headers):
        table.add_column(header, justify="right" if position in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    out = io.StringIO()
    Console(file=out, width=120, color_system=None).print(table)
    return out.getvalue().rstrip("\n")
