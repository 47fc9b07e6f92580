"""The model card: its section is written anew, everything else is the user's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtp_zoo.card import BEGIN, CARD_LIMIT, END, model_card, write_card
from mtp_zoo.errors import ExportError

COMMIT = "c" * 40
CACHED = f"/home/me/.cache/hub/models--acme--tiny/snapshots/{COMMIT}"
RECORD: dict[str, Any] = {
    "mtp_zoo": "9.9",
    "family": "qwen3_5",
    "depths": 3,
    "head_bytes": 1234567,
    "base": {"source": "acme/tiny", "path": CACHED, "revision": COMMIT},
    "head": None,
    "training": {"loss": 0.123456789, "data": "a|b\n<!-- mtp_zoo: end -->", "settings": {"steps": 6}},
    "tensors": {"mtp.fc.weight": {}},
}
FRONT = "---\nlicense: mit\ntags: [x]\n---\n"


def test_new_card_has_front_matter_and_one_section() -> None:
    card = model_card(None, RECORD)
    assert card.startswith("---\nbase_model: acme/tiny\ntags:\n- mtp_zoo\n- speculative-decoding\n---\n\n" + BEGIN)
    assert card.endswith(f"{END}\n")
    for line in (
        "| family | qwen3_5 |",
        "| depths | 3 |",
        "| size | 1,234,567 bytes in 1 tensors |",
        f"| trunk | acme/tiny at {COMMIT} |",
        "| training: loss | 0.123457 |",
        "| training: data | a\\|b &lt;!-- mtp_zoo: end --&gt; |",
        "| written by | mtp_zoo 9.9 |",
    ):
        assert line in card.splitlines()
    assert "num_speculative_tokens\": 3}'" in card
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in card


def test_directory_is_named_without_the_path_to_it() -> None:
    place = {"source": "/home/me/secret-project/base", "path": "/home/me/secret-project/base", "revision": None}
    card = model_card(None, {**RECORD, "base": place, "head": {**place, "path": CACHED, "revision": COMMIT}})
    assert "| trunk | base |" in card
    assert f"| head taken from | acme/tiny at {COMMIT} |" in card
    assert "secret-project" not in card
    assert "base_model" not in card


@pytest.mark.parametrize(
    ("old", "before", "after"),
    [
        ("", "", ""),
        (f"{FRONT}# Mine\n", f"{FRONT}# Mine\n\n", ""),
        ("# No line end", "# No line end\n\n", ""),
        ("# Mine\n\n", "# Mine\n\n", ""),
        (f"{FRONT}a\n{BEGIN}\nold\n{END}\nb\n", f"{FRONT}a\n", "b\n"),
        (f"a{BEGIN}{END}b", "a", "b"),
        (f"a\n{BEGIN}\nlost\n", "a\n\nlost\n\n", ""),
        (f"a\n{END}\nlost\n", "a\n\nlost\n\n", ""),
    ],
)
def test_what_is_outside_the_markers_is_kept_and_a_second_export_changes_nothing(
    old: str, before: str, after: str
) -> None:
    card = model_card(old, RECORD)
    section = card[len(before) : len(card) - len(after)]
    assert (card[: len(before)], card[len(card) - len(after) :]) == (before, after)
    assert section.startswith(BEGIN)
    assert section.endswith(f"{END}\n")
    assert card.count(BEGIN) == card.count(END) == 1
    assert model_card(card, RECORD) == card
    other = model_card(card, {**RECORD, "family": "other"})
    assert (other[: len(before)], other[len(other) - len(after) :]) == (before, after)
    assert "| family | other |" in other
    assert "qwen3_5" not in other


def test_line_ends_and_bytes_of_the_old_card_stay(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes(b"# caf\xe9\r\n")  # Latin-1
    card = write_card(tmp_path / "README.md", RECORD)
    assert card.startswith(b"# caf\xe9\r\n\r\n<!--")
    assert card.count(b"\n") == card.count(b"\r\n")
    (tmp_path / "README.md").write_bytes(card)
    assert write_card(tmp_path / "README.md", RECORD) == card


def test_missing_card_is_a_new_one_and_one_that_is_no_text_is_told(tmp_path: Path) -> None:
    assert write_card(tmp_path / "README.md", RECORD).startswith(b"---\n")
    (tmp_path / "README.md").mkdir()
    with pytest.raises(ExportError, match=r"README\.md: it is not a regular file"):
        write_card(tmp_path / "README.md", RECORD)
    (tmp_path / "README.md").rmdir()
    with (tmp_path / "README.md").open("wb") as stream:
        stream.truncate(CARD_LIMIT + 1)
    with pytest.raises(ExportError, match="the limit is"):
        write_card(tmp_path / "README.md", RECORD)
