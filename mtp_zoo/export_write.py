"""The bytes of an exported checkpoint: files of the base linked or shortened, the head's shard, the small texts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mtp_zoo.card import write_card
from mtp_zoo.checkpoint import INDEX_NAME, CheckpointIndex, TensorReader, torch_dtype
from mtp_zoo.export_changes import Changes
from mtp_zoo.export_plan import CARD_NAME, PROVENANCE_NAME, ExportPlan, ShardPlan
from mtp_zoo.index_file import encode_index
from mtp_zoo.keymap import native_tensors
from mtp_zoo.modelconfig import ModelConfig
from mtp_zoo.overlay import Overlay, Piece
from mtp_zoo.provenance import encode_record, provenance
from mtp_zoo.quantized_tensors import encoded_like

if TYPE_CHECKING:
    from mtp_zoo.head import DraftHead


@dataclass
class Written:
    """What was written of the head: the sha256 of each tensor, the names of those that kept the base's FP8 bytes, and what
    the export changes."""

    digests: dict[str, str] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    changes: Changes = field(default_factory=Changes)


def write_files(
    overlay: Overlay, plan: ExportPlan, weights: Mapping[str, torch.Tensor], index: CheckpointIndex, *, others: bool
) -> Written:
    """Everything but the texts.

    Args:
        overlay: where to.
        plan: what.
        weights: the head's numbers, by canonical name.
        index: of the base.
        others: whether files that are no weights come along.
    """
    written, reader = Written(), TensorReader(index)
    for shard in plan.shards:
        if shard.action == "link":
            overlay.link(index.root / shard.source, shard.name)
        else:
            overlay.rewrite(shard.name, _shorter(shard, reader))
    for path in plan.others if others else ():
        overlay.copy(index.root / path, path)
    stored = written.changes.watch(_stored_tensors(plan, weights, reader, written.kept), index)
    overlay.write(plan.head_file, _head_bytes(plan, stored, written.digests))
    return written


def _shorter(shard: ShardPlan, reader: TensorReader) -> Iterator[Piece]:
    yield shard.header
    for entry in shard.entries:
        yield from reader.raw(entry)


def _head_bytes(
    plan: ExportPlan, stored: Iterator[tuple[str, torch.Tensor]], digests: dict[str, str]
) -> Iterator[Piece]:
    yield plan.head_header
    for name, value in stored:
        raw = value.reshape(-1).view(torch.uint8).numpy().data
        digests[name] = hashlib.sha256(raw).hexdigest()
        del value
        yield raw
        del raw


def _stored_tensors(
    plan: ExportPlan, weights: Mapping[str, torch.Tensor], reader: TensorReader, kept: set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors as they are stored, in the order of the plan; `kept` gets the names of those in the base's own bytes.

    None is held here while the next one is made.
    """
    dtypes = {tensor.name: torch_dtype(tensor.dtype) for tensor in plan.head}
    for name, native in native_tensors(plan.bindings, weights):
        value = native.cpu()
        base = plan.form.quantized.get(name)
        del native
        if base is None:
            value = value.to(dtypes[name])
            yield name, value
            del value
            continue
        encoded = encoded_like(value, base, reader)
        del value
        kept |= {name} if encoded.kept else set()
        yield name, encoded.weight
        yield base.scale.name, encoded.scale
        del encoded


def texts(
    plan: ExportPlan, head: DraftHead, config: ModelConfig, digests: Mapping[str, str], facts: Mapping[str, Any]
) -> dict[str, bytes]:
    """The small files that are made anew, by name; a config.json that is right already is none of them.

    Args:
        plan: of the export.
        head: what is exported.
        config: the base's.
        digests: sha256 of each stored tensor of the head.
        facts: what else the provenance shall say.
    """
    made = {name: _json(content) for name, content in plan.patch.files.items()}
    declared = head.family.count_field
    counted = declared is None or config.count(declared) == head.num_depths
    if not counted or plan.patch.config is not None:
        patched = config if plan.patch.config is None else ModelConfig(plan.patch.config, config.path)
        made["config.json"] = _json(
            patched.raw if counted or declared is None else patched.with_value(declared, head.num_depths)
        )
    made[INDEX_NAME] = encode_index(plan.weight_map, {"total_size": plan.total_size}).encode()
    record = provenance(plan, head, digests, facts)
    made[PROVENANCE_NAME] = encode_record(record).encode()
    made[CARD_NAME] = write_card(config.path.parent / CARD_NAME, record)
    return made


def write_texts(overlay: Overlay, config: ModelConfig, made: Mapping[str, bytes]) -> None:
    """Write what `texts` made, and bring the base's config.json along where that is not among it."""
    if "config.json" not in made:
        overlay.copy(config.path, "config.json")
    for name, text in made.items():
        overlay.write(name, [text])


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
