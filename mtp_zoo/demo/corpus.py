"""Real text that every machine has: the standard library of the Python that runs.

Two domains that a small model tells apart at once, cut from the same modules:

    prose   the docstrings of a module that are longer than 60 characters, one document a module,
            and the topics of `help()`, one document a topic
    code    the module without its docstrings and comments, as `ast.unparse` writes it, one document a module

A document is held out when the checksum of its path (or topic) says so. So both domains hold out the same modules, and
there is no list to keep:

    crc32("http/client.py") % 10 == 0    -> "held_out"
    else                                 -> "train"

The text depends on the Python that runs and on nothing else: modules are taken in sorted order from
`sys.stdlib_module_names`, so site-packages, test folders and files that a distribution adds do not enter.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mtp_zoo.errors import EmptyDatasetError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

Domain = Literal["prose", "code"]
Split = Literal["train", "held_out"]

MIN_DOCSTRING = 60
TOPICS = "pydoc_data/topics.py"
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
# Tables rather than text, or packages that distributions split off and Python versions drop.
LEFT_OUT = frozenset(
    {"encodings", "pydoc_data", "idlelib", "lib2to3", "distutils", "tkinter", "turtledemo", "ensurepip", "_pyrepl"}
)


@dataclass(frozen=True)
class Corpus:
    """The documents of both domains.

    Attributes:
        documents: domain -> (path or topic -> text), sorted by path or topic.
    """

    documents: Mapping[Domain, Mapping[str, str]]

    def text(self, domain: Domain, split: Split) -> list[str]:
        """The documents of one domain on one side of the split, always in the same order."""
        want = split == "held_out"
        return [text for name, text in self.documents[domain].items() if is_held_out(name) == want]


def load_corpus(stdlib: Path | None = None, *, tenths: int = 10) -> Corpus:
    """Read the corpus; the whole of it takes some seconds.

    A module that can't be read or parsed by the running Python is skipped.

    Args:
        stdlib: the standard library's directory; the running Python's own by default.
        tenths: how many tenths of the modules to read, 2 to 10: the one that is held out, and as many more to train on.

    Raises:
        EmptyDatasetError: a domain lacks training or held-out text (a Python without its sources).
    """
    root = stdlib or Path(sysconfig.get_paths()["stdlib"])
    prose: dict[str, str] = {}
    code: dict[str, str] = {}
    for path in _modules(root):
        name = path.relative_to(root).as_posix()
        if _tenth(name) >= tenths:
            continue
        docstrings, source = _divide(path)
        if docstrings:
            prose[name] = "\n\n".join(docstrings)
        if source:
            code[name] = source
    corpus = Corpus({"prose": prose | _topics(root / TOPICS), "code": code})
    _check(corpus, root)
    return corpus


def tokens(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> torch.Tensor:
    """The documents as one stream of token ids, each followed by the tokenizer's end-of-text token.

    Returns:
        int64, [tokens].
    """
    import torch

    encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    end = [tokenizer.eos_token_id]
    return torch.tensor([token for document in encoded for token in (*document, *end)], dtype=torch.int64)


def is_held_out(name: str) -> bool:
    """Whether the document of that path or topic is held out from training."""
    return _tenth(name) == 0


def _tenth(name: str) -> int:
    return zlib.crc32(name.encode()) % 10


def _modules(root: Path) -> Iterator[Path]:
    for name in sorted(sys.stdlib_module_names - LEFT_OUT):
        if (root / f"{name}.py").is_file():
            yield root / f"{name}.py"
        if (root / name / "__init__.py").is_file():
            yield from sorted(
                path for path in (root / name).rglob("*.py") if TEST_FOLDERS.isdisjoint(path.relative_to(root).parts)
            )


def _divide(path: Path) -> tuple[list[str], str]:
    """A module's longer docstrings, and its code without any docstring; both empty where it can't be parsed."""
    tree = _parse(path)
    if tree is None:
        return [], ""
    docstrings: list[str] = []
    for node in _blocks(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring is not None:
                docstrings.append(docstring)
                node.body = node.body[1:] or [ast.Pass()]
    return [text for text in docstrings if len(text) > MIN_DOCSTRING], ast.unparse(tree)


def _blocks(node: ast.AST) -> Iterator[ast.AST]:
    """The node and every statement below it, in source order; expressions, most of the tree, are not visited."""
    yield node
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, field, ()):
            yield from _blocks(child)


def _topics(path: Path) -> dict[str, str]:
    """The texts of `help(topic)`: the one dictionary that the file assigns."""
    tree = _parse(path)
    if tree is None:
        return {}
    topics = next((ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign)), {})
    return dict(sorted(topics.items()))


def _parse(path: Path) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            # An old escape sequence in somebody else's module is no news for the reader of the demo.
            warnings.simplefilter("ignore")
            return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def _check(corpus: Corpus, root: Path) -> None:
    sides: list[tuple[Domain, Split]] = [(d, s) for d in ("prose", "code") for s in ("train", "held_out")]
    empty = [f"{domain}, {split}" for domain, split in sides if not corpus.text(domain, split)]
    if empty:
        raise EmptyDatasetError(
            f"Reading text from the standard library in {root}: expected documents in each domain and split, "
            "found none in those below.",
            remedy="Run with a Python that has its standard library installed as source files.",
            problems=empty,
        )
