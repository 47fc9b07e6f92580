"""Tables hold what was put into them, letter for letter."""

from __future__ import annotations

from mtp_zoo.tables import render_table


def test_a_table_is_plain_text() -> None:
    assert render_table("Heads", ("name", "bytes"), [("mtp.fc", 12), ("mtp.norm", 3_456)], right=(1,)) == (
        "Heads\n"
        "┏━━━━━━━━━━┳━━━━━━━┓\n"
        "┃ name     ┃ bytes ┃\n"
        "┡━━━━━━━━━━╇━━━━━━━┩\n"
        "│ mtp.fc   │    12 │\n"
        "│ mtp.norm │  3456 │\n"
        "└──────────┴───────┘"
    )


def test_no_name_is_folded_or_cut() -> None:
    name = "model." + "x" * 300
    assert any(f"│ {name} │" in line for line in render_table("t", ("name",), [(name,)]).splitlines())


def test_nothing_in_a_cell_is_markup() -> None:
    """Names come from files: an unmatched tag would raise, a matched one would vanish."""
    for cell in ("[/x]", "[red]a[/red]", ":smile:", "[1, 2]"):
        assert cell in render_table(f"of {cell}", (f"in {cell}",), [(cell,)]).splitlines()[4]
        assert render_table(f"of {cell}", (f"in {cell}",), []).startswith(f"of {cell}\n")


def test_a_table_without_rows_has_its_title_and_headers() -> None:
    assert render_table("none", ("a",), []).splitlines()[:3] == ["none", "┏━━━┓", "┃ a ┃"]
