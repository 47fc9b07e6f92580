"""Whether the head of one checkpoint belongs on the trunk of another: everything that can be told from headers and texts.

decides    family, width, depth and heads of the trunk, shapes of embedding, lm_head and final norm, shapes of the head,
           tokens and their ids
is told    what the head's block computes with (RoPE, epsilon, routing) where the trunk has been given other values, tokens
           that one side lacks, what could not be compared
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mtp_zoo.checkpoint import CheckpointIndex, TensorEntry
from mtp_zoo.errors import GraftMismatchError, MTPZooError
from mtp_zoo.exporter import misfits
from mtp_zoo.keymap import FLOAT_DTYPES
from mtp_zoo.loader import plan_head
from mtp_zoo.quantization import FP8
from mtp_zoo.registry import Family, Resolution, TargetNames, resolve, resolve_family
from mtp_zoo.site import TRUNK_LAYERS, behind_prefix, find_site
from mtp_zoo.vocabulary import compare_vocabularies, read_vocabulary, some

TRUNK_FIELDS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
"""Numbers of transformers' config that make two trunks different models."""

BLOCK_FIELDS = (
    "rope_parameters",
    "rms_norm_eps",
    "hidden_act",
    "num_experts_per_tok",
    "norm_topk_prob",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
)
"""What the head's block computes with beside its weights; engines take it from the trunk's config."""


def check_graft(donor: CheckpointIndex, receiver: CheckpointIndex) -> tuple[str, ...]:
    """Refuse a head and a trunk that do not belong to one model.

    Args:
        donor: holds the head; headers of what `needed_by_head` names are enough.
        receiver: holds the trunk.

    Returns:
        What differs and does not stop the graft, in words.

    Raises:
        HeadNotFoundError and the other errors of `load_head`: the donor's head can't be read.
        HeadLayerError: an old head of the receiver begins at another layer than its config says.
        GraftMismatchError: with every fact that differs.
    """
    resolution = resolve(donor.names, donor.config)
    family = resolution.family
    problems = list(_family(family, receiver))
    problems += _trunk(family, donor, receiver) if not problems else ()
    problems += _shapes(donor, receiver, resolution) if not problems else ()
    told, notices = _vocabulary(donor, receiver, family.target)
    problems += told
    if problems:
        raise GraftMismatchError(
            f"Grafting the {family.name} head of {donor.source} into {receiver.source}: they are not of one model, "
            f"{len(problems)} facts differ.",
            remedy=f"Take the head from the checkpoint that {receiver.source} was made from.",
            problems=problems,
        )
    return (*donor.storage.notices, *notices, *_surroundings(family, donor, receiver))


def _family(family: Family, receiver: CheckpointIndex) -> Iterator[str]:
    try:
        found = resolve_family(receiver.names, receiver.config)
    except MTPZooError as error:
        yield error.message
        return
    if found is not family:
        yield f"family: the head is {family.name}, model_type {list(receiver.config.model_types)} is {found.name}"


def _trunk(family: Family, donor: CheckpointIndex, receiver: CheckpointIndex) -> Iterator[str]:
    """Numbers of the two configs, then shapes of the tensors that a head borrows."""
    ours, theirs = (_built(family, index) for index in (donor, receiver))
    for field in TRUNK_FIELDS:
        if pair := _differ(ours, theirs, field):
            yield f"{field}: {pair}"
    layers = [index.config.count(TRUNK_LAYERS) for index in (donor, receiver)]
    if layers[0] != layers[1]:
        yield f"{TRUNK_LAYERS}: the head's trunk has {layers[0]}, this one {layers[1]}"
    left, right = (_borrowed(index, family.target) for index in (donor, receiver))
    if "embedding" not in right:
        yield f"embedding: none of {sorted(family.target.names)} is in {receiver.source}"
    for role in sorted(left.keys() & right.keys()):
        one, other = left[role], right[role]
        if one.shape[-1:] != other.shape[-1:]:
            yield f"{role}: {one.name} is {list(one.shape)} beside the head, {other.name} {list(other.shape)} here"


def _built(family: Family, index: CheckpointIndex) -> Any:
    """transformers' config of the head's block, in which defaults and older spellings are filled in."""
    return family.block.build_config(index.config)


def _differ(ours: Any, theirs: Any, field: str) -> str | None:
    one, other = getattr(ours, field, None), getattr(theirs, field, None)
    return None if one == other else f"the head's trunk has {one}, this one {other}"


def _borrowed(index: CheckpointIndex, target: TargetNames) -> dict[str, TensorEntry]:
    """The tensors that a head borrows, by role, as far as they are there and stored in their own shape."""
    names: Mapping[str, tuple[str, ...]] = {
        "embedding": tuple(prefix + target.embedding for prefix in target.prefixes),
        "final norm": tuple(prefix + target.final_norm for prefix in target.prefixes),
        "lm_head": target.lm_head,
    }
    present = {role: [index.entries[name] for name in known if name in index.entries] for role, known in names.items()}
    return {role: found[0] for role, found in present.items() if found and found[0].dtype in (*FLOAT_DTYPES, FP8)}


def _shapes(donor: CheckpointIndex, receiver: CheckpointIndex, resolution: Resolution) -> list[str]:
    head, _, _ = plan_head(donor, resolution)
    return misfits(head, find_site(resolution.family, receiver.names, receiver.config), receiver)


def _vocabulary(donor: CheckpointIndex, receiver: CheckpointIndex, target: TargetNames) -> tuple[list[str], list[str]]:
    """Problems and notices. Rows may differ only where the tokens are known to be the same: padding, or tokens added since."""
    resized = _resized(donor, receiver, target)
    left, right = read_vocabulary(donor), read_vocabulary(receiver)
    if left is None or right is None:
        lacking = " and ".join(index.source for index, found in ((donor, left), (receiver, right)) if found is None)
        unknown = f"tokens were not compared: no tokenizer.json or vocab.json that can be read in {lacking}"
        return [f"{fact}, and {unknown}" for fact in resized], [] if resized else [unknown]
    found = compare_vocabularies(left, right)
    notices = list(resized)
    if found.renamed:
        notices.append(f"{len(found.renamed)} added tokens have other texts here, ids {some(found.renamed)}")
    for where, lacking in (("beside the head", found.only_left), ("here", found.only_right)):
        if lacking:
            notices.append(f"{len(lacking)} tokens are only {where}: {some([*map(repr, lacking)])}")
    clashes = found.conflicts
    return [f"tokens: {len(clashes)} differ beside the head and here: {some(clashes)}"] if clashes else [], notices


def _resized(donor: CheckpointIndex, receiver: CheckpointIndex, target: TargetNames) -> list[str]:
    left, right = (_borrowed(index, target) for index in (donor, receiver))
    return [
        f"{role} has {left[role].shape[0]} rows beside the head and {right[role].shape[0]} here"
        for role in ("embedding", "lm_head")
        if role in left and role in right and left[role].shape[0] != right[role].shape[0]
    ]


def _surroundings(family: Family, donor: CheckpointIndex, receiver: CheckpointIndex) -> Iterator[str]:
    """What a head meets on this trunk that it did not learn with, and what of an older head is left under wrong names."""
    ours, theirs = (_built(family, index) for index in (donor, receiver))
    for field in BLOCK_FIELDS:
        if pair := _differ(ours, theirs, field):
            yield f"{field}: {pair}, and engines take this one"
    lost = sorted(name for name in receiver.entries if behind_prefix(family, name))
    if lost:
        yield (
            f"{len(lost)} tensors here look like a head under another prefix, {lost[0]} for one, and stay: engines may refuse "
            "names that they do not know"
        )
