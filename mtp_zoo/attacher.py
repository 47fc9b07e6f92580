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

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from mtp_zoo.arguments import (
    DEPTHS,
    FLOAT_DTYPE,
    PATH,
    checked,
    either,
    instance,
    number,
    one_of,
    optional,
    some_of,
)
from mtp_zoo.attach_call import add_tap, paused, trains
from mtp_zoo.attach_class import joint_class
from mtp_zoo.attach_peft import JointAdapter, adapter_class, base_model, check_adapter, load_adapter_head
from mtp_zoo.attach_state import HEAD, add_state_hooks
from mtp_zoo.corrections import correct_target, latent_norms
from mtp_zoo.ddp_parameters import check_reduced
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
        own_loss: the model's own loss in that call, without a graph; None where it computed none.
        model: the joint model.
        epsilons: what the model's latent norms had before `attach`.
        saved_like_trunk: whether `save_pretrained` writes the head in the trunk's dtype instead of its own.
    """

    def __init__(
        self, model: Any, objective: MTPObjective, given: float | None, *, saved_like_trunk: bool = False
    ) -> None:
        self.objective = objective
        self.model = model
        self.epsilons = [norm.variance_epsilon for norm in latent_norms(model)]
        self.saved_like_trunk = saved_like_trunk
        self.last: MTPOutput | None = None
        self.own_loss: Tensor | None = None
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
            trunk = {n: p for n, p in self.model.named_parameters() if not n.startswith(f"{HEAD}.")}
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
            AttachError: `model` is a replica; in training also: the head is frozen, adapters were put into it, or DDP does not
                reduce every gradient.
        """
        if model is not self.model:
            raise AttachError(
                "Training the head: the model is a replica, made by nn.DataParallel or by a shallow copy; expected the one "
                "that the head was attached to.",
                remedy="Start one process a device (torchrun, accelerate launch), or make a single device visible.",
            )
        head = self.objective.head
        names = [name for name, _ in head.named_parameters()]
        inside = [name for name in names if ".lora_" in name or ".base_layer." in name]
        training = trains(model)
        if inside or (training and not any(parameter.requires_grad for parameter in head.parameters())):
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
        if training:
            check_reduced()
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
    depths=DEPTHS,
    mtp_lambda=optional(number(least=0)),
    detach=some_of(DETACH),
    mode=one_of(*get_args(Mode)),
    head_dtype=optional(FLOAT_DTYPE),
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
    head_dtype: torch.dtype | None = None,
    **objective_options: Any,
) -> Any:
    """Put an MTP head beside a transformers causal language model, to be trained in one step with it.

    Args:
        model: a causal language model, alone or in a PEFT model; of a vision-language model, the text part is trained.
            It is changed in place: see the module. Norms of latent attention get the epsilon that engines use
            (`correct_target`).
        head: None loads what the model's own checkpoint ships; a path loads from there (a checkpoint, or the folder of a
            saved adapter); a `DraftHead` is taken as it is, on its device and in its dtype.
        depths, loss: see `MTPObjective`. The default trains depth 1 towards the text. `agreement`, which costs the target's
            logits, is off unless it is asked for or a loss compares with the target.
        mtp_lambda: weight of the MTP loss; None takes the config's, else 0.2, and 1 in `mtp_only`.
        detach: which paths from the MTP loss into the model are cut: `backbone`, `embedding`, `lm_head`; default all.
        mode: see `Mode`; `model.mtp.mode` changes it later. Under DDP, wrap the model again after that.
        head_dtype: dtype of a head that is loaded here. None gives FP32 master weights, whatever the model's dtype, since
            steps smaller than BF16 resolves are lost in a BF16 head; it is then saved in the trunk's dtype. It is loaded onto
            the device of the model's final norm.
        objective_options: further arguments of `MTPObjective`.

    Returns:
        `model`. Its forward takes `mtp_mask` (raw learn mask [batch, seq], for steps without labels) and `mtp_counts`
        (from `step_counts`) besides; a training call that brings neither labels nor a mask raises `NoMTPLossError`. With
        `num_items_in_batch`, as Trainer passes it, each depth's sum is divided by it.

    Raises:
        AttachError: the model has a head already, is no causal language model whose final norm can be tapped, or has
            adapters in its embedding or lm_head; the head is attached to another model; or the mode, the head's dtype or the
            reduction is none that exists here. The model is then as it was.
        HeadError, CheckpointError: the head can't be loaded, or does not fit.
        ObjectiveError: the objective can't be computed as asked.

    Example:
        >>> model = mz.attach(AutoModelForCausalLM.from_pretrained("Qwen/Qwen3.5-4B"), depths=3)     # doctest: +SKIP
        >>> out = model(input_ids=ids, labels=ids)                                                   # doctest: +SKIP
        >>> out.loss.backward(); print(model.mtp, out.metrics)                                       # doctest: +SKIP
    """
    base = base_model(model)
    _refuse(base, head, head_dtype, objective_options)
    if model is not base and isinstance(head, (str, Path)):
        check_adapter(model, head)
    own = head if isinstance(head, DraftHead) else _load(base, head, head_dtype or torch.float32)
    with own.borrowing(base):  # all that can fail comes before the model changes
        objective = MTPObjective(own, depths=depths, loss=loss, detach=detach, **objective_options)
        if "agreement" not in objective_options and all(set(mix) == {"ce"} for mix in objective.mixes):
            objective.agreement = False
        control = JointTraining(base, objective, mtp_lambda, saved_like_trunk=own is not head and head_dtype is None)
    _join(base, own, control)
    control.mode = mode
    if model is not base:
        model.__class__ = adapter_class(type(model))
    return model


def _join(base: Any, head: DraftHead, control: JointTraining) -> None:
    head.attach(base)
    correct_target(base)
    setattr(base, HEAD, head)
    base.mtp = control
    base.__class__ = joint_class(type(base))
    add_state_hooks(base)
    add_tap(base)
    if any(getattr(module, "gradient_checkpointing", False) for module in base.modules()):
        head.gradient_checkpointing_enable()


def _refuse(base: Any, head: Any, head_dtype: Any, options: Mapping[str, Any]) -> None:
    problems: list[str] = []
    if isinstance(head, DraftHead) and head_dtype is not None:
        problems.append("head_dtype: a DraftHead keeps its own; call head.to(dtype) before")
    if isinstance(head, DraftHead) and head.target is not None and getattr(head.target, HEAD, None) is head:
        problems.append(
            f"the head is attached to another {type(head.target).__name__}; call mz.detach on that one first"
        )
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


def _load(base: Any, head: str | Path | None, dtype: torch.dtype) -> DraftHead:
    source = head or base.config._name_or_path
    if not source:
        raise AttachError(
            f"Attaching a head: none was given, and the {type(base).__name__} does not say what it was loaded from.",
            remedy="Pass a head from load_head, or the path of the checkpoint that ships it.",
        )
    device = language_model(base).norm.weight.device
    device = torch.device("cpu") if device.type == "meta" else device
    beside = load_adapter_head(source, base.config._name_or_path)
    return load_head(source, dtype=dtype, device=device) if beside is None else beside.to(device, dtype)


__all__ = ["SFT_LAMBDA", "JointAdapter", "JointTraining", "Mode", "attach", "joint_class"]
