"""Training data: records to rows of token ids with learn masks, held in memory.

    jsonl file or datasets directory -> records -> documents (ids, learn mask) -> rows of up to max_length tokens

The order of rows in training is the business of `batches.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mtp_zoo.batch import TokenBatch
from mtp_zoo.errors import ChatTemplateError, EmptyDatasetError
from mtp_zoo.progress import progress
from mtp_zoo.training.chat import ChatEncoder, Encoded, Message
from mtp_zoo.training.config import DataConfig
from mtp_zoo.training.records import Record, capped, read_records

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIRST_PREDICTED = 2
"""Position of the first token that a head can predict: depth 1 reads slot 0 and the embedding of token 1."""

OPEN_ROWS = 64
"""How many unfilled rows the packer looks at."""

ENCODED_AT_ONCE = 256


@dataclass(frozen=True)
class DataCounts:
    """What became of the data.

    Attributes:
        records: lines or dataset rows read.
        cut: documents longer than max_length.
        dropped: documents that held nothing to learn.
        documents: documents kept, the pieces of long texts counted one by one.
        rows: rows that they fill.
        tokens: their tokens, without padding.
        learnt: tokens of them that are to be learnt.
    """

    records: int
    cut: int
    dropped: int
    documents: int
    rows: int
    tokens: int
    learnt: int


@dataclass(frozen=True)
class Rows:
    """Rows of one or several documents each.

    Attributes:
        rows: token ids and learn masks of every document of every row.
        counts: what became of the records.
    """

    rows: Sequence[Sequence[Encoded]]
    counts: DataCounts

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, numbers: Iterable[int], *, pad_id: int = 0) -> TokenBatch:
        """The rows of these numbers, padded on the right to the longest of them."""
        documents = [[(ids.tolist(), learn.tolist()) for ids, learn in self.rows[number]] for number in numbers]
        return TokenBatch.from_rows(documents, pad_id=pad_id)

    def fingerprint(self) -> str:
        """sha256 over every row's ids, masks and document bounds."""
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(len(row).to_bytes(8, "little"))
            for ids, learn in row:
                digest.update(len(ids).to_bytes(8, "little") + ids.tobytes() + learn.tobytes())
        return digest.hexdigest()

    def largest_id(self) -> int:
        """The largest token id in any row."""
        return max(int(ids.max()) for row in self.rows for ids, _ in row)


def load_rows(config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> tuple[Rows, Rows | None]:
    """Read, tokenise, hold out and pack: (training rows, held-out rows or None).

    The held-out share is drawn by record, so no piece of one text is on both sides.

    Raises:
        DataError: the data can't be read, or records are malformed; every one is listed by its place.
        ChatTemplateError: see `ChatEncoder`.
        EmptyDatasetError: nothing to learn in the training or in the held-out data.
    """
    encoder = ChatEncoder(tokenizer) if config.messages_field is not None else None

    def encode(path: Path) -> list[list[Encoded]]:
        records = read_records(path, config)
        return encode_messages(records, encoder, path) if encoder else encode_texts(records, tokenizer)

    documents = encode(config.path)
    if config.eval_path is not None:
        held = encode(config.eval_path)
        return build_rows(documents, config, config.path), build_rows(held, config, config.eval_path)
    if config.eval_fraction is None:
        return build_rows(documents, config, config.path), None
    held_numbers = hold_out(len(documents), config.eval_fraction, seed)
    kept = [record for number, record in enumerate(documents) if number not in held_numbers]
    held = [record for number, record in enumerate(documents) if number in held_numbers]
    return build_rows(kept, config, config.path), build_rows(held, config, config.path)


def hold_out(records: int, fraction: float, seed: int) -> frozenset[int]:
    """Numbers of the held-out records: at least one, and never all."""
    count = min(max(1, round(records * fraction)), max(records - 1, 0))
    return frozenset(np.random.default_rng([seed, records]).permutation(records)[:count].tolist())


def encode_texts(records: Sequence[Record], tokenizer: PreTrainedTokenizerBase) -> list[list[Encoded]]:
    """One document a text; every token is learnt. Special tokens are added as the tokenizer does by itself."""
    documents: list[list[Encoded]] = []
    starts = range(0, len(records), ENCODED_AT_ONCE)
    with progress("Tokenising", total=len(starts)) as advance:
        for start in starts:
            texts = [text for _, text, _ in records[start : start + ENCODED_AT_ONCE]]
            for ids in tokenizer(texts, verbose=False)["input_ids"]:
                documents.append([(np.array(ids, dtype=np.int32), np.ones(len(ids), dtype=bool))])
            advance()
    return documents


def encode_messages(records: Sequence[Record], encoder: ChatEncoder, path: Path) -> list[list[Encoded]]:
    """The documents of every conversation, usually one.

    Raises:
        ChatTemplateError: conversations that the template can't render; all are listed.
    """
    documents: list[list[Encoded]] = []
    problems: list[str] = []
    remedy = ""
    with progress("Tokenising", total=len(records)) as advance:
        for place, messages, options in records:
            try:
                documents.append(encoder.encode(messages, **options))
            except ChatTemplateError as error:
                problems.append(f"{place}: {error.message}")
                remedy = error.remedy
            advance()
    if problems:
        raise ChatTemplateError(
            f"Reading {path}: {len(problems)} of {len(records)} conversations can't be rendered.",
            remedy=remedy,
            problems=capped(problems),
        )
    return documents


def build_rows(records: Sequence[Sequence[Encoded]], config: DataConfig, path: Path) -> Rows:
    """Cut, drop and pack documents.

    Raises:
        EmptyDatasetError: nothing is left.
    """
    whole = config.messages_field is not None
    pieces = [piece for record in records for document in record for piece in cut(document, config.max_length, whole)]
    kept = [piece for piece in pieces if piece[1][FIRST_PREDICTED:].any()]
    if not kept:
        raise EmptyDatasetError(
            f"Reading {path}: {len(records)} records, and no token in them that a head can learn.",
            remedy="Give documents of at least three tokens, with assistant messages where only those are learnt.",
        )
    lengths = [len(ids) for ids, _ in kept]
    layout = pack(lengths, config.max_length) if config.pack else [[number] for number in range(len(kept))]
    counts = DataCounts(
        records=len(records),
        cut=sum(len(ids) > config.max_length for record in records for ids, _ in record),
        dropped=len(pieces) - len(kept) + sum(not record for record in records),
        documents=len(kept),
        rows=len(layout),
        tokens=sum(lengths),
        learnt=sum(int(learn.sum()) for _, learn in kept),
    )
    return Rows([[kept[number] for number in row] for row in layout], counts)


def cut(document: Encoded, length: int, whole: bool) -> list[Encoded]:
    """Pieces of at most `length` tokens; with `whole` only the first, for what makes no sense without its beginning.

    Example: 7 tokens at length 3 are pieces of 3, 3 and 1.
    """
    ids, learn = document
    starts = range(0, 1 if whole else max(len(ids), 1), length)
    return [(ids[start : start + length], learn[start : start + length]) for start in starts]


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Numbers of the documents of every row: greedy first fit, in the order given.

    Of the rows that still have room the `OPEN_ROWS` newest are tried, the emptiest kept where one must be closed.

    Example: lengths [5, 4, 3, 2] at capacity 7 fill the rows [0, 3] and [1, 2].
    """
    rows: list[list[int]] = []
    room: dict[int, int] = {}
    for number, length in enumerate(lengths):
        row = next((row for row, left in room.items() if left >= length), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room[row] = capacity
        rows[row].append(number)
        room[row] -= length
        if len(room) > OPEN_ROWS:
            del room[min(room, key=lambda row: room[row])]
    return rows


def describe(counts: DataCounts) -> str:
    """One line for people: "12 records, 11 documents in 3 rows, 4,000 tokens (1,200 learnt), 1 dropped, 0 cut"."""
    c = {name: f"{value:,}" for name, value in asdict(counts).items()}
    return (
        f"{c['records']} records, {c['documents']} documents in {c['rows']} rows, {c['tokens']} tokens "
        f"({c['learnt']} learnt), {c['dropped']} dropped, {c['cut']} cut"
    )


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], options: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of one conversation that the model is to answer; see `ChatEncoder.prompt` and `template_options`."""
    return ChatEncoder(tokenizer).prompt(messages, **(options or {}))
