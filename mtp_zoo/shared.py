"""What a head borrows from its target: the embedding, the lm_head and the final norm.

The head never owns them. They are held outside the module tree, so they are in no state dict, in no optimiser and in no
cast of the head, and they are cut from the graph: a head's loss does not move the target.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mtp_zoo.errors import SharedTensorError


class SharedTensors:
    """Embedding [vocab, hidden], lm_head [vocab, hidden] and, where a family needs it, the final norm.

    Args:
        embedding: module that maps token ids to [.., hidden].
        lm_head: module whose `weight` is [vocab, hidden].
        final_norm: the target's last norm; needed by families whose tap lies before it.
    """

    def __init__(self, embedding: nn.Module, lm_head: nn.Module, final_norm: nn.Module | None = None) -> None:
        self.embedding = embedding
        self.lm_head = lm_head
        self.final_norm = final_norm

    @classmethod
    def of(cls, target: Any) -> SharedTensors:
        """The shared tensors of a transformers model, by reference: a target that moves is followed.

        Raises:
            SharedTensorError: the model has no input embedding or no output embedding.
        """
        embedding, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
        if embedding is None or lm_head is None:
            raise SharedTensorError(
                f"Taking the shared tensors of {type(target).__name__}: it has no "
                f"{'input' if embedding is None else 'output'} embedding.",
                remedy="Load the target with its language-model head (AutoModelForCausalLM).",
            )
        return cls(embedding, lm_head, getattr(language_model(target), "norm", None))

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedTensors:
        """A copied head borrows from the same target."""
        return self

    @property
    def tied(self) -> bool:
        """Whether embedding and lm_head are one tensor."""
        return self.embedding.weight is self.lm_head.weight

    @property
    def lm_head_weight(self) -> Float[Tensor, "vocab hidden"]:
        """The output projection, without a graph."""
        return cast("Tensor", self.lm_head.weight).detach()

    def embed(self, input_ids: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq hidden"]:
        """Embeddings of the ids, without a graph."""
        with torch.no_grad():
            return self.embedding(input_ids)

    def logits(self, states: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        """Full logits; for drafting and tests. Losses use chunks (`mtp_zoo.losses`)."""
        return states.to(self.lm_head_weight.dtype) @ self.lm_head_weight.T


def language_model(target: Any) -> Any:
    """The decoder stack of a transformers model, also inside a vision-language model."""
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else target.model
    return getattr(decoder, "language_model", decoder)
