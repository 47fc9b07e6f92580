"""The frozen target and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mtp_zoo.corrections import correct_target
from mtp_zoo.errors import DataError
from mtp_zoo.shared import SharedTensors
from mtp_zoo.training.data import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_target(root: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> PreTrainedModel:
    """The causal language model of a checkpoint directory, in eval mode, with every parameter frozen.

    It computes what engines compute, see `mtp_zoo.corrections.correct_target`.
    """
    from transformers import AutoModelForCausalLM

    target: Any = AutoModelForCausalLM.from_pretrained(root, dtype=dtype, local_files_only=True)
    correct_target(target)
    return target.to(device).eval().requires_grad_(False)


def load_tokenizer(root: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint directory.

    Raises:
        DataError: there is none that transformers can load.
    """
    from transformers import AutoTokenizer

    remedy = "Put the tokenizer's files next to the weights."
    try:
        tokenizer = AutoTokenizer.from_pretrained(root, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"Loading the tokenizer of {root}: {reason}", remedy=remedy) from error
    if not tokenizer("text")["input_ids"]:  # where the files are absent, transformers makes one without a vocabulary
        raise DataError(f"Loading the tokenizer of {root}: there is no vocabulary.", remedy=remedy)
    return tokenizer


def check_vocabulary(rows: Rows, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that gives ids which the target has no embedding for.

    Raises:
        DataError: naming the largest id.
    """
    entries = SharedTensors.of(target).lm_head_weight.shape[0]
    largest = rows.largest_id()
    if largest >= entries:
        raise DataError(
            f"Reading the data: expected token ids below {entries}, got {largest} ({tokenizer.decode([largest])!r}).",
            remedy="Use the tokenizer that the model was trained with.",
        )
