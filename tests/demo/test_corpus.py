from __future__ import annotations

import ast
import zlib
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mtp_zoo.demo.corpus import Corpus, is_held_out, load_corpus, tokens
from mtp_zoo.errors import EmptyDatasetError

ASSETS = Path(__file__).parents[2] / "mtp_zoo" / "demo" / "assets" / "tiny-qwen3_5"
DOCSTRING = "A docstring that is long enough to be taken as prose of the demo."
TOPIC = "What the help of the interpreter says about one topic."


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(ASSETS)


@pytest.fixture
def stdlib(tmp_path: Path) -> Path:
    """A standard library of three modules, of which copy.py is held out, and one topic."""
    for name in ("heapq.py", "json/__init__.py", "copy.py"):
        write(tmp_path, name, module(name))
    write(tmp_path, "pydoc_data/topics.py", f"# generated\ntopics = {{'assert': {TOPIC!r}}}\n")
    return tmp_path


def module(name: str) -> str:
    return f'"""{DOCSTRING}"""\n# comment\nname = {name!r}\n'


def write(root: Path, name: str, text: str | bytes) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def documents(corpus: Corpus) -> dict[str, list[str]]:
    return {domain: list(found) for domain, found in corpus.documents.items()}


@pytest.mark.parametrize(
    ("name", "checksum", "held_out"),
    [
        ("copy.py", 88137940, True),
        ("http/server.py", 540179280, True),
        ("http/client.py", 563999942, False),
        ("json/decoder.py", 1136565175, False),
        ("json/__init__.py", 2012008009, False),
    ],
)
def test_a_path_is_held_out_when_ten_divides_its_checksum(name: str, checksum: int, held_out: bool) -> None:
    assert zlib.crc32(name.encode()) == checksum
    assert is_held_out(name) is held_out


def test_a_module_is_divided_into_docstrings_and_code(stdlib: Path) -> None:
    source = f'''
"""{DOCSTRING}"""
import os  # comment

class Thing:
    """Short."""

    async def act(self):
        """{DOCSTRING} (act)"""

    def keep(self):
        "{"x" * 60}"
        return """not a docstring"""

if os:
    def inner():
        """{DOCSTRING} (inner)"""
        return 1
'''
    write(stdlib, "heapq.py", source)
    corpus = load_corpus(stdlib)
    assert corpus.documents["prose"]["heapq.py"].split("\n\n") == [
        DOCSTRING,
        f"{DOCSTRING} (act)",
        f"{DOCSTRING} (inner)",
    ]
    assert corpus.documents["code"]["heapq.py"].splitlines() == [
        "import os",
        "",
        "class Thing:",
        "",
        "    async def act(self):",
        "        pass",
        "",
        "    def keep(self):",
        "        return 'not a docstring'",
        "if os:",
        "",
        "    def inner():",
        "        return 1",
    ]


def test_documents_come_in_sorted_order_and_topics_after_modules(stdlib: Path) -> None:
    assert documents(load_corpus(stdlib)) == {
        "prose": ["copy.py", "heapq.py", "json/__init__.py", "assert"],
        "code": ["copy.py", "heapq.py", "json/__init__.py"],
    }


def test_both_domains_hold_out_the_same_modules(stdlib: Path) -> None:
    corpus = load_corpus(stdlib)
    assert corpus.text("code", "held_out") == ["name = 'copy.py'"]
    assert corpus.text("code", "train") == ["name = 'heapq.py'", "name = 'json/__init__.py'"]
    assert corpus.text("prose", "held_out") == [DOCSTRING]
    assert corpus.text("prose", "train") == [DOCSTRING, DOCSTRING, TOPIC]


@pytest.mark.parametrize(
    "name",
    [
        "json/tests/test_json.py",
        "sqlite3/test/dbapi.py",
        "site-packages/numpy/__init__.py",
        "sitecustomize.py",
        "_sysconfigdata__linux_x86_64-linux-gnu.py",
        "test/test_heapq.py",
        "encodings/cp037.py",
        "idlelib/run.py",
    ],
)
def test_tests_tables_and_what_an_install_adds_stay_out(stdlib: Path, name: str) -> None:
    before = documents(load_corpus(stdlib))
    write(stdlib, f"{name.partition('/')[0]}/__init__.py" if "/" in name else name, module(name))
    write(stdlib, name, module(name))
    added = {name for found in documents(load_corpus(stdlib)).values() for name in found} - {
        name for found in before.values() for name in found
    }
    assert added <= {"sqlite3/__init__.py"}


@pytest.mark.parametrize(
    "content",
    [b"match = = 1\n", b"# -*- coding: no-such-codec -*-\n", b"name = '\xff'\n", b"name = '\0'\n"],
    ids=["syntax", "unknown encoding", "not utf-8", "null byte"],
)
def test_a_module_that_does_not_parse_is_skipped(stdlib: Path, content: bytes) -> None:
    write(stdlib, "heapq.py", content)
    assert documents(load_corpus(stdlib))["code"] == ["copy.py", "json/__init__.py"]


def test_an_old_escape_sequence_is_no_warning(stdlib: Path) -> None:
    write(stdlib, "heapq.py", "pattern = '\\d'\n")
    assert load_corpus(stdlib).documents["code"]["heapq.py"] == "pattern = '\\\\d'"


def test_a_python_without_topics_still_has_prose(stdlib: Path) -> None:
    (stdlib / "pydoc_data" / "topics.py").unlink()
    assert "assert" not in load_corpus(stdlib).documents["prose"]


def test_a_python_without_sources_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    write(tmp_path, "heapq.py", "value = 1\n")
    with pytest.raises(EmptyDatasetError) as caught:
        load_corpus(tmp_path)
    assert str(tmp_path) in caught.value.message
    assert caught.value.problems == ("prose, train", "prose, held_out", "code, held_out")


def test_the_running_python_has_enough_text_in_both_domains(corpus: Corpus) -> None:
    sizes = {
        (domain, split): sum(map(len, corpus.text(domain, split)))
        for domain in ("prose", "code")
        for split in ("train", "held_out")
    }
    assert sizes["prose", "train"] > 1_000_000
    assert sizes["code", "train"] > 2_500_000
    assert min(sizes["prose", "held_out"], sizes["code", "held_out"]) > 100_000


def test_the_running_python_s_code_has_no_docstring_and_no_comment(corpus: Corpus) -> None:
    for text in corpus.text("code", "held_out"):
        tree = ast.parse(text)
        assert text == ast.unparse(tree)
        owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        assert not [node for node in ast.walk(tree) if isinstance(node, owners) and ast.get_docstring(node) is not None]


def test_the_running_python_s_domains_share_no_document(corpus: Corpus) -> None:
    assert not set(corpus.text("prose", "train")) & set(corpus.text("code", "train"))
    assert "assert" in corpus.documents["prose"]
    assert "pydoc_data/topics.py" not in corpus.documents["code"]


def test_tokens_end_every_document_and_decode_to_it(tokenizer: PreTrainedTokenizerBase) -> None:
    texts = ["def f(x):\n    return x\n", "naïve → 日本\t\r\n", ""]
    stream = tokens(tokenizer, texts)
    assert stream.dtype == torch.int64
    ends = (stream == tokenizer.eos_token_id).nonzero().flatten().tolist()
    starts = [0, *(end + 1 for end in ends)]
    assert ends[-1] == len(stream) - 1
    assert [tokenizer.decode(stream[start:end]) for start, end in zip(starts, ends, strict=False)] == texts


def test_the_shipped_tokenizer_knows_both_domains(corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> None:
    for domain in ("prose", "code"):
        text = "".join(corpus.text(domain, "held_out"))
        assert len(text) / len(tokens(tokenizer, [text])) > 2.2
