"""attach: train an MTP head together with the transformers model that it drafts for.

    model = AutoModelForCausalLM.from_pretrained(path)
    mz.attach(model)                                # the head that the checkpoint ships
    out = model(input_ids=ids, labels=labels)       # out.loss = own loss + lambda * out.mtp_loss
    model.save_pretrained(place)                    # trunk and head, under the names that engines read

The model stays the object that it was. Its class becomes a subclass of the same name, whose `forward` adds the MTP loss
where labels (or `mtp_mask`) are given. Calls of evaluation without them, and generation, are the original's; a training call
without them raises, since it would leave the head behind (`model.mtp.paused()` for steps that train the model alone). The head
is the submodule `mtp_head`, so that optimisers and wrappers see it; `model.mtp` says how it is trained.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from mtp_zoo.arguments import PATH, checked, either, instance, number, one_of, optional, some_of, whole
from mtp_zoo.attach_call import add_tap, paused
from mtp_zoo.attach_forward import ForwardSlot, slotted
from mtp_zoo.attach_peft import JointAdapter, adapter_class, base_model, load_adapter_head
from mtp_zoo.attach_save import JointSaving
from mtp_zoo.attach_state import HEAD, add_state_hooks
from mtp_zoo.corrections import correct_target
from mtp_zoo.errors import AttachError
from mtp_zoo.head import DraftHead
from mtp_zoo.loader import load_head
from mtp_zoo.loss_weight import configured_lambda
from mtp_zoo.objective import DETACH, Cut, MTPObjective, MTPOutput
from mtp_zoo.shared import language_model

Mode: TypeAlias = Literal["joint", "mtp_only"]
"""What a step trains: model and head, or the head alone on a frozen model that keeps no graph."""

SFT_LAMBDA = 0.2
"""Weight of the MTP loss where neither the caller nor the config names one. In reinforcement learning, 0.1 is usual."""


class JointTraining:
    """How a joint model is trained; `model.mtp`.

    Attributes:
        objective: the MTP objective, over the head.
        last: loss (without a graph) and sums of the last call that computed an MTP loss.
    """

    def __init__(self, model: Any, objective: MTPObjective, given: float | None) -> None:
        self.objective = objective
        self.last: MTPOutput | None = None
        self._model = model
        self._given = given
        self._configured = configured_lambda(model.config.to_dict())
        self._mode: Mode = "joint"
        self._trained: dict[str, bool] = {}

    @property
    def mtp_lambda(self) -> float:
        """Weight of the MTP loss: the given one, else 1 in `mtp_only`, else the config's, else `SFT_LAMBDA`."""
        if self._given is not None:
            return self._given
        if self._mode == "mtp_only":
            return 1.0
        return SFT_LAMBDA if self._configured is None else self._configured

    @mtp_lambda.setter
    def mtp_lambda(self, value: float | None) -> None:
        self._given = value

    @property
    def mode(self) -> Mode:
        """`joint` or `mtp_only`; setting it freezes the trunk, or lets train what trained before."""
        return self._mode

    @mode.setter
    def mode(self, value: Mode) -> None:
        if value not in get_args(Mode):
            raise AttachError(
                f"Choosing what to train: expected one of {get_args(Mode)}, got {value!r}.", remedy="Name one of them."
            )
        if value != self._mode:
            trunk = {n: p for n, p in self._model.named_parameters() if not n.startswith(f"{HEAD}.")}
            if value == "mtp_only":
                self._trained = {name: parameter.requires_grad for name, parameter in trunk.items()}
            for name, parameter in trunk.items():
                parameter.requires_grad_(value == "joint" and self._trained.get(name, parameter.requires_grad))
            self._mode = value

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last call; empty before the first."""
        return self.last.metrics if self.last else {}

    def paused(self) -> AbstractContextManager[None]:
        """Let calls be the model's own, also in training: for steps that train the model without the head.

        It holds in the thread that enters it. Under DDP the head's parameters get no gradient in such a step: wrap the model
        with `find_unused_parameters=True`.

        Example:
            >>> with model.mtp.paused():                                     # doctest: +SKIP
            ...     logits = model(input_ids=ids, pixel_values=images).logits
        """
        return paused(self)

    def check(self, model: Any) -> None:
        """Look whether the head still stands beside `model` as `attach` left it; borrow replaced embeddings again.

        Raises:
            AttachError: the head is frozen, adapters were put into it, or `model` is a replica.
        """
        if model is not self._model:
            raise AttachError(
                "Training the head: the model is a replica, made by nn.DataParallel or by a shallow copy; expected the one "
                "that the head was attached to.",
                remedy="Start one process a device (torchrun, accelerate launch), or make a single device visible.",
            )
        head = self.objective.head
        names = [name for name, _ in head.named_parameters()]
        inside = [name for name in names if ".lora_" in name or ".base_layer." in name]
        if inside or not any(parameter.requires_grad for parameter in head.parameters()):
            raise AttachError(
                "Training the head: "
                + (f"adapters were put into it ({inside[0]})." if inside else "none of its parameters takes gradients.")
                + " Expected a head that trains fully, beside whatever adapters the model has.",
                remedy="Call get_peft_model(model, ...) first and mz.attach(peft_model, ...) on its result.",
            )
        if any(parameter.is_meta for parameter in head.parameters()):
            raise AttachError(
                "Training the head: its weights are offloaded; expected on a device; gradients would reach copies.",
                remedy="Offload or dispatch the model first and call mz.attach(model, ...) on the result.",
            )
        shared = head.shared
        if (shared.embedding, shared.lm_head) != (model.get_input_embeddings(), model.get_output_embeddings()):
            head.attach(model)

    def __repr__(self) -> str:
        objective = self.objective
        loss = f"depths={objective.depths}, mtp_lambda={self.mtp_lambda}, detach={sorted(objective.detach)}"
        return f"JointTraining(mode={self._mode!r}, {loss})"


@checked(
    "Attaching a head",
    error=AttachError,
    head=optional(either(PATH, instance("a DraftHead", DraftHead))),
    depths=whole(least=1),
    mtp_lambda=optional(number(least=0)),
    detach=some_of(DETACH),
    mode=one_of(*get_args(Mode)),
)
def attach(
    model: Any,
    head: DraftHead | str | Path | None = None,
    *,
    depths: int = 1,
    loss: str | Mapping[str, float] | Sequence[str | Mapping[str, float]] = "ce",
    mtp_lambda: float | None = None,
    detach: Collection[Cut] = DETACH,
    mode: Mode = "joint",
    **objective_options: Any,
) -> Any:
    """Put an MTP head beside a transformers causal language model, to be trained in one step with it.

    Args:
        model: a causal language model, alone or in a PEFT model; of a vision-language model, the text part is trained.
            It is changed in place: see the module. Norms of latent attention get the epsilon that engines use
            (`correct_target`).
        head: None loads what the model's own checkpoint ships; a path loads from there (a checkpoint, or the folder of a
            saved adapter); a `DraftHead` is taken as it is. The head keeps its dtype: `head.float()` before training
            gives FP32 master weights, without which steps smaller than BF16 can hold are lost.
        depths, loss: see `MTPObjective`. The default trains depth 1 towards the text.
        mtp_lambda: weight of the MTP loss; None takes the config's, else 0.2, and 1 in `mtp_only`.
        detach: which paths from the MTP loss into the model are cut: `backbone`, `embedding`, `lm_head`; default all.
        mode: see `Mode`; `model.mtp.mode` changes it later.
        objective_options: further arguments of `MTPObjective`.

    Returns:
        `model`. Its forward takes `mtp_mask` (raw learn mask [batch, seq], for steps without labels) and `mtp_counts`
        (from `step_counts`) besides; a training call that brings neither labels nor a mask raises `NoMTPLossError`. With
        `num_items_in_batch`, as Trainer passes it, each depth's sum is divided by it.

    Raises:
        AttachError: the model has a head already, is no causal language model whose final norm can be tapped, or has
            adapters in its embedding or lm_head; or the mode or the reduction is none that exists here.
        HeadError, CheckpointError: the head can't be loaded, or does not fit.
        ObjectiveError: the objective can't be computed as asked.

    Example:
        >>> model = mz.attach(AutoModelForCausalLM.from_pretrained("Qwen/Qwen3.5-4B"), depths=3)     # doctest: +SKIP
        >>> out = model(input_ids=ids, labels=ids)                                                   # doctest: +SKIP
        >>> out.loss.backward(); print(model.mtp, out.metrics)                                       # doctest: +SKIP
    """
    base = base_model(model)
    _refuse(base, objective_options)
    head = _head(base, head)
    head.attach(base)
    correct_target(base)
    objective = MTPObjective(head, depths=depths, loss=loss, detach=detach, **objective_options)
    setattr(base, HEAD, head)
    base.mtp = JointTraining(base, objective, mtp_lambda)
    base.__class__ = joint_class(type(base))
    add_state_hooks(base)
    add_tap(base)
    if any(getattr(module, "gradient_checkpointing", False) for module in base.modules()):
        head.gradient_checkpointing_enable()
    base.mtp.mode = mode
    if model is not base:
        model.__class__ = adapter_class(type(model))
    return model


def _refuse(base: Any, options: Mapping[str, Any]) -> None:
    problems: list[str] = []
    if hasattr(base, HEAD):
        problems.append("it has an MTP head already")
    if options.get("reduction", "global") == "micro_batch":
        problems.append("reduction='micro_batch': num_items_in_batch and mtp_counts say what a step is divided by")
    if getattr(base, "get_output_embeddings", lambda: None)() is None:
        problems.append(f"{type(base).__name__} has no lm_head; load it with AutoModelForCausalLM")
    elif not hasattr(language_model(base), "norm"):
        problems.append(f"{type(language_model(base)).__name__} has no final norm under the name 'norm'")
    else:
        shared = {"embedding": base.get_input_embeddings(), "lm_head": base.get_output_embeddings()}
        wrapped = [name for name, module in shared.items() if any("." in n for n, _ in module.named_parameters())]
        problems += [f"{name}: adapters are in it; the head borrows it as it is" for name in wrapped]
    if problems:
        raise AttachError(
            "Attaching a head: the model or what is asked for does not fit.",
            remedy="Pass a causal language model without a head, with adapters on its decoder layers only.",
            problems=problems,
        )


def _head(base: Any, head: DraftHead | str | Path | None) -> DraftHead:
    if isinstance(head, DraftHead):
        return head
    source = head or base.config._name_or_path
    if not source:
        raise AttachError(
            f"Attaching a head: none was given, and the {type(base).__name__} does not say what it was loaded from.",
            remedy="Pass a head from load_head, or the path of the checkpoint that ships it.",
        )
    return load_adapter_head(source, base.config._name_or_path) or load_head(source)


class _Joint(JointSaving):
    """What a joint model's class has in front of its original."""

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        """As for the trunk; the head recomputes whole depths, since a layer alone does not see the state of the chain."""
        super()._set_gradient_checkpointing(enable, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        head: DraftHead = getattr(self, HEAD)
        for module in head.modules():
            if hasattr(module, "gradient_checkpointing"):
                setattr(module, "gradient_checkpointing", False)  # noqa: B010 - nn.Module declares tensors only
        head.gradient_checkpointing_enable(enable)


@functools.cache
def joint_class(original: type) -> type:
    """The class of a joint model; one for each class that models have, of the same name."""
    own = {
        "forward": ForwardSlot(lambda: original.forward),  # pyright: ignore[reportAttributeAccessIssue]
        **{name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")},
    }
    return slotted(type(original))(original.__name__, (_Joint, original), own)


__all__ = ["SFT_LAMBDA", "JointAdapter", "JointTraining", "Mode", "attach", "joint_class"]
