"""The arguments of a causal language model's call as a TokenBatch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from mtp_zoo.batch import TokenBatch
from mtp_zoo.errors import AttachError

MEDIA = (
    "pixel_values",
    "pixel_values_videos",
    "pixel_values_images",
    "image_embeds",
    "image_grid_thw",
    "video_grid_thw",
    "input_features",
    "input_values",
)
"""Arguments that bring embeddings of something other than tokens."""

PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id", "image_token_index", "video_token_index")
"""Config fields that name the tokens in whose place such embeddings stand."""

LENGTHS = ("cu_seqlens", "cu_seq_lens_q")
"""Arguments under which collators pass the bounds of packed documents."""

CACHES = ("past_key_values", "cache")
"""Arguments that bring the keys and values of earlier calls: the older name, and the one of newer models."""


def token_batch(call: Mapping[str, Any], mask: Tensor | None, config: Any) -> TokenBatch:
    """The batch that a call describes.

    Args:
        call: the call's arguments by name.
        mask: raw learn mask [batch, seq] that replaces the labels, or None.
        config: the model's config; says which tokens are placeholders.

    Raises:
        AttachError: no token ids, images, a cache that holds tokens, or labels that were shifted already.
        BatchError: masks, labels and layout that contradict each other, or rotary positions whose axes differ.
    """
    _refuse(call, mask)
    input_ids = cast("Tensor", call["input_ids"])
    layout: dict[str, Any] = {
        "position_ids": call.get("position_ids"),
        "cu_seqlens": next((call[name] for name in LENGTHS if call.get(name) is not None), None),
        "seq_idx": call.get("seq_idx"),
        "placeholder_ids": placeholder_ids(config),
    }
    attention_mask = call.get("attention_mask")
    if mask is not None:
        return TokenBatch.from_mask(input_ids, mask, attention_mask, **layout)
    return TokenBatch.from_labels(input_ids, call.get("labels"), attention_mask, **layout)


def placeholder_ids(config: Any) -> tuple[int, ...]:
    """Ids of the tokens that stand for embeddings of images, videos or sound."""
    return tuple(value for name in PLACEHOLDERS if isinstance(value := getattr(config, name, None), int))


def _holds_tokens(cache: Any) -> bool:
    """Whether a cache has seen tokens in front of this call; one of recurrent layers alone counts none, but has states."""
    if cache is None:
        return False
    if not hasattr(cache, "get_seq_length"):
        return len(cache) > 0
    recurrent = [getattr(layer, "has_previous_state", False) for layer in getattr(cache, "layers", ())]
    return int(cache.get_seq_length()) > 0 or any(map(bool, recurrent))


def _refuse(call: Mapping[str, Any], mask: Tensor | None) -> None:
    problems = [f"{name}: media are not supported" for name in MEDIA if call.get(name) is not None]
    if call.get("input_ids") is None:
        problems.append("input_ids: missing; the depths read the ids of later tokens, which inputs_embeds do not hold")
    filled = [name for name in CACHES if _holds_tokens(call.get(name))]
    problems += [
        f"{name}: it holds tokens; the head would read the call as one document from position 0" for name in filled
    ]
    if mask is None and call.get("labels") is None:
        problems.append("labels: missing, and no mtp_mask; pass labels [batch, seq], not shifted")
    if call.get("shift_labels") is not None:
        problems.append("shift_labels: pass labels, not shifted; a sequence that is split over ranks is not supported")
    if problems:
        raise AttachError(
            "Computing the MTP loss of a call: it needs token ids and their labels, of text.",
            remedy="Call the model with input_ids and labels; train on media under `with model.mtp.paused()`.",
            problems=problems,
        )
