"""TokenBatch: the mask contract. Every shift of a token axis in the library happens in this file.

Notation: `x[t]` is the token in slot t of a row, `h[t]` the target's state there. Depth k (1-based) reads the state of
slot t and the embedding of `x[t+k]`; its logits predict `x[t+k+1]`. So for one row of six tokens, of which the last three
are to be learnt (an answer behind a prompt):

    slot t             0    1    2    3    4    5
    x                  a    b    c    D    E    F
    learn_mask         0    0    0    1    1    1

    depth 1 reads      b    c    D    E    F    .
    depth 1 predicts   c    D    E    F    .    .
    depth 1 gate       0    1    1    1    0    0

    depth 2 reads      c    D    E    F    .    .
    depth 2 predicts   D    E    F    .    .    .
    depth 2 gate       1    1    1    0    0    0

The learn mask is raw: entry t says whether token t is to be learnt. It is never given shifted.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Int, Shaped
from numpy.typing import NDArray
from torch import Tensor

from mtp_zoo.arguments import check_fields
from mtp_zoo.batch_checks import (
    FIELDS,
    check_documents_of_rows,
    checked_collated,
    checked_labels,
    checked_mask,
    checked_rows,
    checked_text,
)
from mtp_zoo.document_sources import find_documents
from mtp_zoo.documents import (
    ACT,
    IGNORED,
    PADDING,
    Segment,
    as_bool,
    check_documents,
    check_lengths,
    check_shape,
    check_unshifted,
    count_positions,
    find_segments,
)
from mtp_zoo.errors import BatchError
from mtp_zoo.host_copies import moved, to_host
from mtp_zoo.loss_plan import DepthSlots, LossPlan, make_plan

Document: TypeAlias = "tuple[Sequence[int] | NDArray[np.int32], Sequence[bool] | NDArray[np.bool_]]"
"""Token ids of one document, and which of them are to be learnt."""

BatchT = TypeVar("BatchT", bound="TokenBatch")


def ahead(values: Shaped[Tensor, "batch seq *rest"], steps: int, fill: float) -> Shaped[Tensor, "batch seq *rest"]:
    """`out[:, t] = values[:, t + steps]`, and `fill` where `t + steps` is past the end.

    Example: `ahead([[5, 6, 7]], 1, fill=0)` is `[[6, 7, 0]]`; with `steps=3` or more all slots are `fill`.
    """
    out = torch.full_like(values, fill)
    out[:, : max(values.shape[1] - steps, 0)] = values[:, steps:]
    return out


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """A batch of token rows, each holding one or several documents and padding on either side.

    Build it on the CPU, as a DataLoader does, and move it with `to`: what says which slots count stays known to the host, and
    no forward pass waits for the device. Tensors that lie on a device are copied to the host once, when the batch is built.

    Attributes:
        input_ids: int64 token ids.
        learn_mask: True where the token itself is to be learnt.
        doc_ids: number of the document that the token belongs to, rising along the row; `PADDING` outside.
        position_ids: the target's position of every token; restarts with every document.
        placeholders: True where the token stands for an image or audio embedding: its own embedding is never read.

    Raises:
        BatchError: shapes that differ, documents that are interleaved or torn, learnt padding.
    """

    input_ids: Int[Tensor, "batch seq"]
    learn_mask: Bool[Tensor, "batch seq"]
    doc_ids: Int[Tensor, "batch seq"]
    position_ids: Int[Tensor, "batch seq"]
    placeholders: Bool[Tensor, "batch seq"] | None = None

    def __post_init__(self) -> None:
        check_fields(self, BatchError, **FIELDS)
        for name in ("input_ids", "learn_mask", "doc_ids", "position_ids"):
            check_shape(name, getattr(self, name), self.input_ids)
        object.__setattr__(self, "_host_copy", None if self.input_ids.device.type == "cpu" else self.to("cpu"))
        check_documents(self.host.doc_ids)
        if bool((self.host.learn_mask & (self.host.doc_ids == PADDING)).any()):
            raise BatchError(f"{ACT}: learn_mask is set on padding.", remedy="Clear it where attention_mask is 0.")
        _ = self.largest_label  # read now, from the host's copy, and not while a step runs

    @classmethod
    @checked_labels
    def from_labels(
        cls,
        input_ids: Tensor,
        labels: Tensor | None,
        attention_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_padded: Tensor | None = None,
        seq_idx: Tensor | None = None,
        placeholder_ids: Sequence[int] = (),
    ) -> TokenBatch:
        """A batch whose labels are the tokens themselves, with `IGNORED` where a token is not to be learnt.

        What says where documents lie is told apart at the top of `mtp_zoo/document_sources.py`; several at once must agree.

        Args:
            input_ids: [batch, seq].
            labels: [batch, seq]; unshifted, as transformers' collators make them. A label on padding is not learnt.
            attention_mask: [batch, seq], 1 on tokens and 0 on padding (left or right).
            position_ids: [batch, seq], the target's positions; unless another source tells documents apart, a position 0
                starts one. [1, seq] goes for every row; [3 or 4, batch, seq] are taken where all rotary axes agree.
            cu_seqlens: [documents + 1], for a single row: where each document's tokens start and end. A document without
                tokens is left out.
            cu_seqlens_padded: the same where documents are padded in place; then `cu_seqlens` counts tokens only.
            seq_idx: [batch, seq], number of each token's document, rising along the row; less than 0 on padding, unless
                another source marks that.
            placeholder_ids: token ids that stand for image or audio embeddings.

        Raises:
            BatchError: no labels, labels that are shifted or of another shape, a source that can be read in two ways, or
                sources that contradict each other.
        """
        if labels is None:
            raise BatchError(
                f"{ACT} from labels: got none, so nothing says which tokens are to be learnt.",
                remedy="Pass labels with -100 on prompts, or say TokenBatch.all_tokens(...) for plain text.",
            )
        check_shape("labels", labels, input_ids)
        layout = {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "cu_seqlens": cu_seqlens,
            "cu_seqlens_padded": cu_seqlens_padded,
            "seq_idx": seq_idx,
        }
        host: dict[str, Any] = to_host({"input_ids": input_ids, "labels": labels, **layout})
        learnt = host.pop("labels")
        check_unshifted(learnt, host["input_ids"])
        batch = cls.from_mask(learn_mask=learnt != IGNORED, **host, placeholder_ids=placeholder_ids)
        return batch.to(input_ids.device)

    @classmethod
    @checked_mask
    def from_mask(
        cls,
        input_ids: Tensor,
        learn_mask: Tensor,
        attention_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_padded: Tensor | None = None,
        seq_idx: Tensor | None = None,
        placeholder_ids: Sequence[int] = (),
    ) -> TokenBatch:
        """A batch with an explicit learn mask; the other arguments are those of `from_labels`."""
        layout = {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "cu_seqlens": cu_seqlens,
            "cu_seqlens_padded": cu_seqlens_padded,
            "seq_idx": seq_idx,
        }
        host: dict[str, Any] = to_host({"input_ids": input_ids, "learn_mask": learn_mask, **layout})
        ids, mask = host["input_ids"], host.pop("learn_mask")
        doc_ids, positions = find_documents(**host)
        learn = as_bool("learn_mask", mask, ids) & (doc_ids != PADDING)
        marks = torch.isin(ids, ids.new_tensor(placeholder_ids)) if len(placeholder_ids) else None
        return cls(ids, learn, doc_ids, positions, marks).to(input_ids.device)

    @classmethod
    @checked_collated
    def from_collated(cls, inputs: Mapping[str, Any], *, placeholder_ids: Sequence[int] = ()) -> TokenBatch:
        """A batch from what a collator of transformers or TRL gives, padded or flattened, by its own names.

        Reads `input_ids`, `labels`, `attention_mask`, `position_ids`, `seq_idx` and `cu_seq_lens_q` with
        `cu_seq_lens_k`; what else is in there is for the model.

        Raises:
            BatchError: see `from_labels`; or keys that are cut in other places than queries.
        """
        bounds = [inputs[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k") if inputs.get(name) is not None]
        if not all(torch.equal(queries, keys) for queries, keys in pairwise(bounds)):
            raise BatchError(
                f"{ACT}: cu_seq_lens_q and cu_seq_lens_k differ: {[each.tolist() for each in bounds]}.",
                remedy="Collate rows for training, in which a token's document is what it attends to.",
            )
        return cls.from_labels(
            inputs["input_ids"],
            inputs.get("labels"),
            inputs.get("attention_mask"),
            position_ids=inputs.get("position_ids"),
            cu_seqlens=next(iter(bounds), None),
            seq_idx=inputs.get("seq_idx"),
            placeholder_ids=placeholder_ids,
        )

    @classmethod
    @checked_text
    def all_tokens(cls, input_ids: Tensor, attention_mask: Tensor | None = None) -> TokenBatch:
        """Plain text: every token that is not padding is to be learnt."""
        return cls.from_mask(input_ids, torch.ones_like(input_ids, dtype=torch.bool), attention_mask)

    @classmethod
    @checked_rows
    def from_rows(cls, rows: Sequence[Sequence[Document]], *, length: int | None = None, pad_id: int = 0) -> TokenBatch:
        """Rows of documents laid end to end, padded on the right to `length` (default: the longest row).

        Raises:
            BatchError: a row that is longer than `length`, or a document whose mask has not one entry a token.
        """
        check_documents_of_rows(rows)
        sizes = [sum(len(ids) for ids, _ in row) for row in rows]
        longest = max(sizes, default=0)
        length = longest if length is None else length
        if longest > length:
            raise BatchError(
                f"Packing rows: expected at most {length} tokens a row, got {longest}.",
                remedy="Cut or move documents.",
            )
        input_ids = torch.full((len(rows), length), pad_id, dtype=torch.int64)
        learn = torch.zeros(len(rows), length, dtype=torch.bool)
        doc_ids = torch.full((len(rows), length), PADDING, dtype=torch.int64)
        for row, documents in enumerate(rows):
            start = 0
            for number, (ids, learnt) in enumerate(documents):
                check_lengths(row, number, ids, learnt)
                here = slice(start, start + len(ids))
                input_ids[row, here] = torch.tensor(ids, dtype=torch.int64)
                learn[row, here] = torch.tensor(learnt, dtype=torch.bool)
                doc_ids[row, here] = number
                start += len(ids)
        return cls(input_ids, learn, doc_ids, count_positions(doc_ids))

    @property
    def shape(self) -> tuple[int, int]:
        """(batch, seq)."""
        batch, seq = self.input_ids.shape
        return batch, seq

    def to(self: BatchT, device: torch.device | str) -> BatchT:
        """The same batch on another device; the host does not wait for it, and keeps its copy."""
        device = torch.device(device)
        if device == self.input_ids.device:
            return self
        if device.type == "cpu" and self.__dict__.get("_host_copy") is not None:
            return self.host
        batch = copy.copy(self)
        for cached in ("_plans", "_routes"):
            batch.__dict__.pop(cached, None)
        values = {field.name: moved(getattr(self, field.name), device) for field in fields(self)}
        batch.__dict__.update(values, _host_copy=None if device.type == "cpu" else self.host)
        return batch

    @property
    def host(self: BatchT) -> BatchT:
        """The same batch on the CPU."""
        return self.__dict__["_host_copy"] or self

    def plan(self, depths: int) -> LossPlan:
        """Which slots the losses of depths 1..`depths` read, as indices on the batch's device; made once."""
        if depths not in self._plans:
            here = self.host is self
            plan = self._make_plan(depths) if here else self.host.plan(depths).to(self.input_ids.device)
            self._plans[depths] = plan
        return self._plans[depths]

    def _make_plan(self, depths: int) -> LossPlan:
        return make_plan([self.slots(depth) for depth in range(1, depths + 1)], self.places(depths))

    @cached_property
    def _plans(self) -> dict[int, LossPlan]:
        return {}

    @cached_property
    def last_position(self) -> int:
        """The highest position of a token; -1 where there is none."""
        positions = self.host.position_ids
        return (
            int(torch.where(self.host.doc_ids != PADDING, positions, PADDING).max()) if positions.numel() else PADDING
        )

    def slots(self, depth: int) -> DepthSlots:
        """What `depth` (1-based) reads and predicts in every slot; see the table at the top of this file.

        A slot counts iff `t + depth + 1` is in range and in the same document, the token there is to be learnt, and none
        of the tokens `t + 1` to `t + depth`, which enter this depth and the ones before it, is a placeholder. A depth keeps
        every slot it can use; deeper ones do not shorten shallow ones.

        Example: of [10, 11, IMG, IMG, 12, 13, 14] depth 1 counts slots 0, 3 and 4, depth 2 slot 3, depth 3 none.
        """
        gate, enters = self._learnt_ahead(depth + 1), self._same_document(depth)
        if self.placeholders is not None:
            for step in range(1, depth + 1):
                gate &= ~ahead(self.placeholders, step, False)
            enters &= ~ahead(self.placeholders, depth, False)
        labels = torch.where(gate, ahead(self.input_ids, depth + 1, IGNORED), IGNORED)
        return DepthSlots(ahead(self.input_ids, depth, 0), labels, gate, enters)

    def reached(self, hidden: Shaped[Tensor, "batch seq hidden"], depths: int) -> Shaped[Tensor, "rows hidden"]:
        """The target's states from which it predicts what depths 1..`depths` predict; `places` says which is whose."""
        del depths
        return hidden.flatten(0, 1)

    def places(self, depths: int) -> list[Int[Tensor, "batch seq"]]:
        """For every depth each slot's row in `reached`, on the CPU.

        Depth k in slot t predicts the token that the target predicts from its state in slot t + k. Slots whose gate is
        closed may hold any row.

        Example: with one row of six tokens, slot 2 has row 3 at depth 1 and row 4 at depth 2.
        """
        rows = torch.arange(self.input_ids.numel()).view(self.shape)
        return [ahead(rows, depth, 0) for depth in range(1, depths + 1)]

    @cached_property
    def largest_label(self) -> int:
        """The highest token id that is trained on; less than 0 where there is none. Known to the host."""
        ids = torch.where(self.host.learn_mask, self.host.input_ids, IGNORED)
        return int(ids.max()) if ids.numel() else IGNORED

    def main_gate(self) -> Bool[Tensor, "batch seq"]:
        """Slots that the target's own next-token loss would count: token t+1 is learnt and of the same document."""
        return self._learnt_ahead(1)

    def _learnt_ahead(self, steps: int) -> Tensor:
        """Slots of a document whose token `steps` ahead is in the same one and to be learnt."""
        return self._same_document(steps) & ahead(self.learn_mask, steps, False)

    def _same_document(self, steps: int) -> Tensor:
        """Slots of a document whose token `steps` ahead is in the same one."""
        return (self.doc_ids == ahead(self.doc_ids, steps, PADDING)) & (self.doc_ids != PADDING)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The documents as stretches of slots; see `find_segments`."""
        return find_segments(self.host.doc_ids)
