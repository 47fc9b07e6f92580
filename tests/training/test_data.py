from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_zoo.errors import ChatTemplateError, DataError, EmptyDatasetError
from mtp_zoo.training.config import DataConfig
from mtp_zoo.training.data import OPEN_ROWS, cut, describe, hold_out, load_rows, pack, render_prompt
from tests.training.words import CHATML, VOCABULARY, make_tokenizer, words


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def texts(path: Path, *lines: str) -> Path:
    return write_lines(path, [{"text": line} for line in lines])


def text_config(path: Path, **changes: Any) -> DataConfig:
    return DataConfig(**{"path": path, "text_field": "text", "max_length": 8, **changes})


def chat(path: Path, **changes: Any) -> DataConfig:
    return DataConfig(**{"path": path, "messages_field": "messages", "max_length": 64, **changes})


def learnt_words(rows: Any) -> list[list[str]]:
    return [words(ids[learn].tolist()) for row in rows.rows for ids, learn in row]


def test_every_token_of_a_text_is_learnt(tmp_path: Path) -> None:
    rows, held = load_rows(text_config(texts(tmp_path / "a.jsonl", "hi how are you")), make_tokenizer(), seed=0)
    ((ids, learn),) = rows.rows[0]
    assert words(ids.tolist()) == ["hi", "how", "are", "you"]
    assert learn.tolist() == [True] * 4
    assert held is None


def test_packed_rows_keep_their_documents_apart(tmp_path: Path) -> None:
    path = texts(tmp_path / "a.jsonl", "hi how are you", "fine thanks you", "hello you are fine thanks")
    rows, _ = load_rows(text_config(path), make_tokenizer(), seed=0)
    tokens = rows.batch([0, 1])
    v = VOCABULARY
    assert tokens.input_ids.tolist() == [
        [v["hi"], v["how"], v["are"], v["you"], v["fine"], v["thanks"], v["you"]],
        [v["hello"], v["you"], v["are"], v["fine"], v["thanks"], 0, 0],
    ]
    assert tokens.doc_ids.tolist() == [[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, -1, -1]]
    assert tokens.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 4, 0, 0]]
    assert tokens.learn_mask.tolist() == [[True] * 7, [True] * 5 + [False] * 2]


def test_without_packing_a_document_is_a_row(tmp_path: Path) -> None:
    path = texts(tmp_path / "a.jsonl", "hi how are you", "fine thanks you")
    rows, _ = load_rows(text_config(path, pack=False), make_tokenizer(), seed=0)
    assert [len(row) for row in rows.rows] == [1, 1]


def test_long_texts_are_cut_into_pieces_and_long_conversations_at_their_end(tmp_path: Path) -> None:
    path = texts(tmp_path / "a.jsonl", "hi how are you fine thanks you")
    rows, _ = load_rows(text_config(path, max_length=3, pack=False), make_tokenizer(), seed=0)
    assert learnt_words(rows) == [["hi", "how", "are"], ["you", "fine", "thanks"]]
    assert (rows.counts.cut, rows.counts.dropped) == (1, 1)  # the last piece, "you", has nothing to predict it from

    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "fine thanks you"}]
    path = write_lines(tmp_path / "b.jsonl", [{"messages": messages}])
    rows, _ = load_rows(chat(path, max_length=11), make_tokenizer(CHATML), seed=0)
    assert learnt_words(rows) == [["fine", "thanks"]]


def test_rows_with_nothing_to_learn_are_dropped_and_counted(tmp_path: Path) -> None:
    path = texts(tmp_path / "a.jsonl", "", "hi", "hi you", "hi how are")
    rows, _ = load_rows(text_config(path), make_tokenizer(), seed=0)
    assert learnt_words(rows) == [["hi", "how", "are"]]
    assert describe(rows.counts) == "4 records, 1 documents in 1 rows, 3 tokens (3 learnt), 3 dropped, 0 cut"


def test_a_dropped_document_has_no_open_gate_at_any_depth(tmp_path: Path) -> None:
    """The rule that drops documents is the batch's own: the third token is the first that depth 1 predicts."""
    path = texts(tmp_path / "a.jsonl", "hi how are")
    rows, _ = load_rows(text_config(path), make_tokenizer(), seed=0)
    tokens = rows.batch([0])
    assert tokens.slots(1).gate.sum() == 1
    assert tokens.slots(2).gate.sum() == 0


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "no records"),
        ([{"messages": [{"role": "user", "content": "hi"}]}], "no token in them that a head can learn"),
    ],
)
def test_data_with_nothing_to_learn_is_refused(tmp_path: Path, records: list[Any], message: str) -> None:
    with pytest.raises(EmptyDatasetError, match=message):
        load_rows(chat(write_lines(tmp_path / "a.jsonl", records)), make_tokenizer(CHATML), seed=0)


def test_all_malformed_lines_are_listed_by_number(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"text": "hi how are you"}\n{broken\n\n{"txt": "hi"}\n{"text": 3}\n[1, 2]\n{"text": "\xff"}\n{"text": "fine"'
    )
    with pytest.raises(DataError) as caught:
        load_rows(text_config(path), make_tokenizer(), seed=0)
    assert caught.value.message == f"Reading {path}: 6 malformed records among 7."
    assert [str(problem).split(":")[0] for problem in caught.value.problems] == [
        "line 2", "line 4", "line 5", "line 6", "line 7", "line 8",
    ]  # fmt: skip
    assert "line 4: expected a field 'text', got ['txt']" in str(caught.value)


def test_many_malformed_lines_are_capped_with_a_count(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("nonsense\n" * 100, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        load_rows(text_config(path), make_tokenizer(), seed=0)
    assert len(caught.value.problems) == 21
    assert caught.value.problems[-1] == "... and 80 more"


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ("hi", "expected a list of messages, got str"),
        ([], "expected a list of messages, got an empty list"),
        (["hi"], "message 0: expected an object with a role, got hi"),
        ([{"content": "hi"}], "message 0: expected an object with a role"),
        ([{"role": "user"}], "message 0: expected content or tool_calls, got ['role']"),
    ],
)
def test_malformed_messages_are_told_apart(tmp_path: Path, messages: Any, complaint: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"messages": messages}])
    with pytest.raises(DataError) as caught:
        load_rows(chat(path), make_tokenizer(CHATML), seed=0)
    assert f"line 1: {complaint}" in str(caught.value)


def test_messages_without_a_chat_template_are_refused_before_the_data_is_read(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        load_rows(chat(tmp_path / "absent.jsonl"), make_tokenizer(None), seed=0)


def test_all_conversations_that_a_template_refuses_are_listed(tmp_path: Path) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
    good = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "fine"}]
    bad = [{"role": "system", "content": "hi"}, *good]
    records = [{"messages": messages} for messages in (bad, good, bad)]
    with pytest.raises(ChatTemplateError, match="2 of 3 conversations") as caught:
        load_rows(chat(write_lines(tmp_path / "a.jsonl", records)), make_tokenizer(template), seed=0)
    assert [str(problem).split(":")[0] for problem in caught.value.problems] == ["line 1", "line 3"]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        load_rows(text_config(tmp_path / "absent.jsonl"), make_tokenizer(), seed=0)


def test_a_datasets_directory_gives_what_the_same_jsonl_gives(tmp_path: Path) -> None:
    """Arrow fills the keys that a message lacks with None; the template must not see them."""
    from datasets import Dataset

    template = CHATML.replace("{{ message.content }}", "{% if 'name' in message %}you {% endif %}{{ message.content }}")
    answer = {"role": "assistant", "content": "fine"}
    records = [
        {"messages": [{"role": "user", "content": "hi", "name": "a"}, answer]},
        {"messages": [{"role": "user", "content": "hi"}, answer]},
    ]
    Dataset.from_list(records).save_to_disk(tmp_path / "set")
    tokenizer = make_tokenizer(template)
    from_set, _ = load_rows(chat(tmp_path / "set", kind="dataset"), tokenizer, seed=0)
    from_lines, _ = load_rows(chat(write_lines(tmp_path / "a.jsonl", records)), tokenizer, seed=0)
    assert from_set.fingerprint() == from_lines.fingerprint()
    assert from_lines.counts.tokens == 13 + 12


def test_a_datasets_directory_without_the_column_or_with_splits_is_refused(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    data = Dataset.from_list([{"body": "hi"}])
    data.save_to_disk(tmp_path / "set")
    DatasetDict({"train": data}).save_to_disk(tmp_path / "splits")
    complaints = {"set": "expected a column 'text'", "splits": "got the splits", "none": "not a datasets directory"}
    for name, message in complaints.items():
        with pytest.raises(DataError, match=message):
            load_rows(text_config(tmp_path / name, kind="dataset"), make_tokenizer(), seed=0)


def test_the_held_out_share_is_drawn_by_record_and_is_apart(tmp_path: Path) -> None:
    lines = [f"hi how are you {word}" for word in ("fine", "thanks", "hello", "user", "system", "assistant")]
    path = texts(tmp_path / "a.jsonl", *lines)
    config = text_config(path, eval_fraction=0.3, max_length=5, pack=False)
    rows, held = load_rows(config, make_tokenizer(), seed=1)
    assert held is not None
    last = {row[-1] for row in learnt_words(rows)}
    held_last = {row[-1] for row in learnt_words(held)}
    assert len(held_last) == 2
    assert last.isdisjoint(held_last)
    assert len(last | held_last) == 6
    again = load_rows(config, make_tokenizer(), seed=1)[1]
    other = load_rows(config, make_tokenizer(), seed=2)[1]
    assert again is not None
    assert other is not None
    assert again.fingerprint() == held.fingerprint() != other.fingerprint()


@given(records=st.integers(2, 50), fraction=st.floats(0.001, 0.999))
def test_a_held_out_share_leaves_something_on_both_sides(records: int, fraction: float) -> None:
    assert 1 <= len(hold_out(records, fraction, seed=0)) <= records - 1


def test_held_out_data_may_come_from_a_file_of_its_own(tmp_path: Path) -> None:
    train, held = texts(tmp_path / "a.jsonl", "hi how are you"), texts(tmp_path / "b.jsonl", "fine thanks you")
    _, rows = load_rows(text_config(train, eval_path=held), make_tokenizer(), seed=0)
    assert rows is not None
    assert learnt_words(rows) == [["fine", "thanks", "you"]]


def test_a_prompt_is_what_stands_in_front_of_the_learnt_tokens(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "fine"}]
    tokenizer = make_tokenizer(CHATML)
    rows, _ = load_rows(chat(write_lines(tmp_path / "a.jsonl", [{"messages": messages}])), tokenizer, seed=0)
    ((ids, learn),) = rows.rows[0]
    assert render_prompt(tokenizer, messages[:1]) == ids[: learn.argmax()].tolist()
    with pytest.raises(ChatTemplateError, match="the template refuses them"):
        render_prompt(make_tokenizer("{{ raise_exception('no') }}"), messages)


def test_packing_is_greedy_first_fit() -> None:
    assert pack([5, 4, 3, 2], 7) == [[0, 3], [1, 2]]
    assert pack([7, 7], 7) == [[0], [1]]


@given(lengths=st.lists(st.integers(1, 16), max_size=300))
def test_packing_holds_every_document_once_and_no_row_overflows(lengths: list[int]) -> None:
    rows = pack(lengths, 16)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert all(sum(lengths[number] for number in row) <= 16 for row in rows)
    if len(rows) < OPEN_ROWS:  # with every row still open, two rows that fit into one would have been one
        loads = sorted(sum(lengths[number] for number in row) for row in rows)
        assert len(loads) < 2 or loads[0] + loads[1] > 16


@given(length=st.integers(0, 30), limit=st.integers(1, 10))
def test_cut_pieces_join_to_the_document(length: int, limit: int) -> None:
    document = (np.arange(length, dtype=np.int32), np.ones(length, dtype=bool))
    pieces = cut(document, limit, whole=False)
    assert np.concatenate([ids for ids, _ in pieces]).tolist() == list(range(length))
    assert all(len(ids) <= limit for ids, _ in pieces)
    assert [ids.tolist() for ids, _ in cut(document, limit, whole=True)] == [list(range(min(length, limit)))]


def test_the_fingerprint_sees_ids_masks_and_document_bounds(tmp_path: Path) -> None:
    def prints(*lines: str, **changes: Any) -> str:
        rows, _ = load_rows(text_config(texts(tmp_path / "a.jsonl", *lines), **changes), make_tokenizer(), seed=0)
        return rows.fingerprint()

    base = prints("hi how are", "you fine thanks")
    assert base == prints("hi how are", "you fine thanks")
    assert len({base, prints("hi how you", "you fine thanks"), prints("hi how are you fine thanks")}) == 3
    assert base != prints("hi how are", "you fine thanks", pack=False)
