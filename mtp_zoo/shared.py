"""What a head borrows from its target: the embedding, the lm_head and the final norm.

The head never owns them. They are held outside the module tree, so they are in no state dict, in no optimiser and in no
cast of the head, and unless it is asked for they are cut from the graph: a head's loss does not move the target.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import align_module_device, has_offloaded_params
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mtp_zoo.arguments import (
    DEVICE,
    FLOAT_DTYPE,
    PATH,
    TEXT,
    checked,
    either,
    instance,
    optional,
    problems_of,
    refuse,
    shown,
)
from mtp_zoo.checkpoint import CheckpointIndex, TensorReader
from mtp_zoo.errors import ParallelError, SharedTensorError
from mtp_zoo.logits import PLAIN, LogitRule
from mtp_zoo.progress import progress
from mtp_zoo.quantization import refuse_quantized
from mtp_zoo.registry import Family, get_family, needed_by_head, resolve_family

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes in which products with the lm_head are computed; numbers of any other mean nothing without their scales."""


class SharedTensors:
    """Embedding [vocab, hidden], lm_head [vocab, hidden] and, where a family needs it, the final norm.

    Args:
        embedding: module that maps token ids to [.., hidden].
        lm_head: module whose `weight` is [vocab, hidden].
        final_norm: the target's last norm; needed by families whose tap lies before it.
        rule: what the target does behind its lm_head.

    Raises:
        SharedTensorError: a module without a matrix `weight`, with quantised or integer weights, or an lm_head with a bias.
    """

    def __init__(
        self,
        embedding: nn.Module,
        lm_head: nn.Module,
        final_norm: nn.Module | None = None,
        rule: LogitRule = PLAIN,
    ) -> None:
        _refuse_unusable(embedding, lm_head, final_norm, rule)
        self._modules = (embedding, lm_head)
        self._target: weakref.ref[Any] | None = None
        self.final_norm = final_norm
        self.rule = rule

    @classmethod
    def of(cls, target: Any) -> SharedTensors:
        """The shared tensors of a transformers model, by reference: a target that moves, or gets another embedding or lm_head
        (`resize_token_embeddings`), is followed.

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
        decoder = language_model(target)
        shared = cls(embedding, lm_head, getattr(decoder, "norm", None), LogitRule.of(decoder.config))
        shared._target = weakref.ref(target)
        return shared

    @property
    def target(self) -> Any:
        """The transformers model that they are of, while it lives; None for tensors without one."""
        return None if self._target is None else self._target()

    @property
    def embedding(self) -> nn.Module:
        """The module that embeds tokens, as the target has it now.

        Raises:
            SharedTensorError: the target got one that can't be used since.
        """
        return self._current()[0]

    @property
    def lm_head(self) -> nn.Module:
        """The module of the output projection, as the target has it now.

        Raises:
            SharedTensorError: the target got one that can't be used since.
        """
        return self._current()[1]

    def _current(self) -> tuple[nn.Module, nn.Module]:
        target = None if self._target is None else self._target()
        if target is not None:
            found = (target.get_input_embeddings(), target.get_output_embeddings())
            if found != self._modules:
                _refuse_unusable(*found, self.final_norm, self.rule)
                self._modules = found
        return self._modules

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle holds: the modules, and no tie to the target's other weights."""
        return {**vars(self), "_target": None}

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
        return self.projection(detach=True)

    def projection(self, *, detach: bool) -> Float[Tensor, "vocab hidden"]:
        """The output projection, with its graph unless it is detached; gathered where it is sharded over ranks.

        Raises:
            ParallelError: it is sharded and shall get a gradient; the gather would not reduce that over the ranks.
            SharedTensorError: it is offloaded and shall get a gradient, which would reach a copy.
        """
        weight = self._projection_weight(detach=detach)
        weight = weight.detach() if detach else weight
        if not isinstance(weight, DTensor):
            return weight
        if weight.requires_grad and torch.is_grad_enabled():
            raise ParallelError(
                "Lending the lm_head with its gradient: its weight is sharded again, so FSDP2 would not reduce the gradient.",
                remedy="Leave the lm_head in the group of the whole model (no fully_shard of its own), or detach 'lm_head'.",
            )
        return weight.full_tensor()

    def _projection_weight(self, *, detach: bool) -> Tensor:
        """The lm_head's weight; of an lm_head that accelerate offloads, a copy on the device on which it runs."""
        lm_head = self.lm_head
        if not has_offloaded_params(lm_head):
            return cast("Tensor", lm_head.weight)
        if not detach and torch.is_grad_enabled():
            raise SharedTensorError(
                "Lending the lm_head with its gradient: its weight is offloaded, so the gradient would reach a copy.",
                remedy="Detach 'lm_head', or keep it on a device (device_map).",
            )
        with align_module_device(lm_head):
            return cast("Tensor", lm_head.weight)

    def embed(self, input_ids: Int[Tensor, "batch seq"], *, detach: bool = True) -> Float[Tensor, "batch seq hidden"]:
        """Embeddings of the ids, with their graph unless it is cut.

        Forward hooks of the embedding, such as NEFTune's noise, are the target's own and do not reach the head; where the
        weight is sharded over ranks they run, since FSDP2 gathers it in one.
        """
        embedding = self.embedding
        look_up = embedding if isinstance(embedding.weight, DTensor) else embedding.forward
        with torch.set_grad_enabled(torch.is_grad_enabled() and not detach):
            return look_up(input_ids)

    def logits(
        self, states: Float[Tensor, "*batch hidden"], projection: Float[Tensor, "vocab hidden"] | None = None
    ) -> Float[Tensor, "*batch vocab"]:
        """Full logits, under another projection than the lm_head where one is given; for drafting and tests.

        Losses use chunks (`mtp_zoo.losses`).
        """
        weight = self.lm_head_weight if projection is None else projection
        return self.rule.apply_(states.to(weight.dtype) @ self.rule.entries(weight).T)


def _refuse_unusable(embedding: Any, lm_head: Any, final_norm: Any, rule: Any) -> None:
    """Refuse modules that compute something other than a look-up in, or a product with, a float matrix."""
    kinds = {"final_norm": optional(instance("a module", nn.Module)), "rule": instance("a LogitRule", LogitRule)}
    problems = problems_of({"final_norm": final_norm, "rule": rule}, kinds)
    for role, module in (("embedding", embedding), ("lm_head", lm_head)):
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            problems.append(f"{role}: expected a module with a matrix 'weight', got {shown(module)}")
        elif weight.dtype not in FLOATS:
            problems.append(f"{role}: expected a weight in one of {FLOATS}, got {weight.dtype}")
    if getattr(lm_head, "bias", None) is not None:
        problems.append("lm_head: expected no bias, found one, which the losses and drafts would leave out")
    refuse(
        "Borrowing the embedding and the lm_head of a target",
        problems,
        SharedTensorError,
        "Pass a target with float embeddings and a plain lm_head; leave lm_head out of what a quantiser converts.",
    )


def language_model(target: Any) -> Any:
    """The decoder stack of a transformers model, also inside a vision-language model."""
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else target.model
    return getattr(decoder, "language_model", decoder)


@checked(
    "Loading the shared tensors",
    error=SharedTensorError,
    source=PATH,
    family=optional(either(TEXT, instance("a Family", Family))),
    dtype=optional(FLOAT_DTYPE),
    device=DEVICE,
    revision=optional(TEXT),
)
def load_shared(
    source: str | Path,
    *,
    family: str | Family | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    revision: str | None = None,
) -> SharedTensors:
    """Read the embedding, the lm_head and the final norm of a checkpoint, for callers without the target in memory.

    Raises:
        CheckpointError: the files can't be read as a checkpoint, or one that holds a shared tensor is damaged.
        SharedTensorError: one of them is missing or misshapen, or the config says untied and there is no lm_head.
        UnsupportedQuantizationError: one of them is stored quantised.
    """
    given = get_family(family) if isinstance(family, str) else family
    index = CheckpointIndex.open(source, revision=revision, need=partial(needed_by_head, family=given))
    chosen = given or resolve_family(index.names, index.config)
    names = shared_names(index, chosen)
    wanted = dict.fromkeys(names.values())
    index.check(wanted.__contains__)
    entries = index.require(wanted)
    refuse_quantized(entries, index.config, "shared tensors")
    factory = chosen.block.build(index.config)
    _check_shared(index, names, factory.config.hidden_size)
    reader = TensorReader(index)
    reader.fetch(entries)
    tensors: dict[str, Tensor] = {}
    with progress("Reading the shared tensors", total=len(wanted)) as advance:
        for entry in entries:
            tensors[entry.name] = reader.read(entry).to(device=device, dtype=dtype)
            advance()
    norm = factory.norm()
    norm.weight = nn.Parameter(tensors[names["final_norm"]], requires_grad=False)
    embedding = nn.Embedding.from_pretrained(tensors[names["embedding"]])
    lm_head = embedding if names["lm_head"] == names["embedding"] else _projection(tensors[names["lm_head"]])
    return SharedTensors(embedding, lm_head, norm, LogitRule.of(factory.config))


def _check_shared(index: CheckpointIndex, names: Mapping[str, str], hidden: int) -> None:
    found = {role: index.entries[name].shape for role, name in names.items()}
    matrix = (*found["embedding"][:1], hidden)
    expected = {"embedding": matrix, "lm_head": matrix, "final_norm": (hidden,)}
    wrong = [
        f"{names[role]}: expected {list(shape)}, found {list(found[role])}"
        for role, shape in expected.items()
        if found[role] != shape
    ]
    if wrong:
        raise SharedTensorError(
            f"Reading the shared tensors of {index.root}: their shapes are not those of one model.",
            remedy="Restore the tensors, and the config.json that belongs to them, from the original checkpoint.",
            problems=wrong,
        )


def _projection(weight: Tensor) -> nn.Module:
    with torch.device("meta"):
        module = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


def shared_names(index: CheckpointIndex, family: Family) -> dict[str, str]:
    """Names of `embedding`, `lm_head` and `final_norm` in this checkpoint; a tied lm_head has the embedding's name.

    A name counts as present where the index lists it, also if no file holds it: reading then says which file is at fault.

    Raises:
        SharedTensorError: see `load_shared`.
        ModelConfigError: the config contradicts itself on whether lm_head is tied.
    """
    target, present = family.target, index.names
    prefixes = [prefix for prefix in target.prefixes if prefix + target.embedding in present]
    if not prefixes:
        raise SharedTensorError(
            f"Looking for the embedding of {index.root}: none of "
            f"{[prefix + target.embedding for prefix in target.prefixes]} is on disk.",
            remedy="Point at the whole checkpoint, not at a directory that holds only the head.",
        )
    embedding, norm = prefixes[0] + target.embedding, prefixes[0] + target.final_norm
    lm_heads = [name for name in target.lm_head if name in present]
    if not lm_heads and not index.config.tied:
        raise SharedTensorError(
            f"Looking for the lm_head of {index.root}: config.json says tie_word_embeddings is false, and none of "
            f"{list(target.lm_head)} is on disk.",
            remedy="Restore the lm_head, or set tie_word_embeddings to true if the model was trained tied.",
        )
    if norm not in present:
        raise SharedTensorError(
            f"Looking for the final norm of {index.root}: '{norm}' is not on disk.",
            remedy="Restore the tensor from the original checkpoint.",
        )
    lm_head = embedding if index.config.tied or not lm_heads else lm_heads[0]
    return {"embedding": embedding, "lm_head": lm_head, "final_norm": norm}
