"""transformers' Trainer for joint models: no decay on the head's norms, separate clipping, and the head's metrics in its logs.

    trainer = mz.trainer_class(Trainer)(model=mz.attach(model), args=arguments, ...)

A plain Trainer trains a joint model too. It knows norms by name, and so decays two of the head's; and it clips trunk and head
by one norm over both, so that the head's gradient scales the trunk's update also where every way from the MTP loss into the
trunk is cut.
"""

from __future__ import annotations

import functools
from typing import Any

from accelerate.utils import DistributedType
from torch.nn.utils import clip_grad_norm_

from mtp_zoo.arguments import Rule, checked
from mtp_zoo.attach_peft import base_model
from mtp_zoo.attach_state import HEAD
from mtp_zoo.errors import SettingsError
from mtp_zoo.stats import MTPStats

CLIPPED_IN_PARTS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP)
"""Under these the gradients are clipped by torch; engines such as DeepSpeed clip by themselves."""

TRAINER = Rule(
    "transformers' Trainer or a class derived from it",
    lambda value: (
        isinstance(value, type) and all(hasattr(value, name) for name in ("_clip_grad_norm", "evaluation_loop"))
    ),
)


def _in_head(name: str) -> bool:
    return f".{HEAD}." in f".{name}"


class _JointTrainer:
    """What the class of a trainer of joint models has in front of its original."""

    _mtp_sums: MTPStats | None = None

    def get_decay_parameter_names(self: Any, model: Any) -> list[str]:
        """As the original's, without the norms and biases of the head."""
        flat = {name for name, parameter in model.named_parameters() if parameter.ndim <= 1 and _in_head(name)}
        names = super().get_decay_parameter_names(model)  # pyright: ignore[reportAttributeAccessIssue]
        return [name for name in names if name not in flat]

    def _clip_grad_norm(self: Any, model: Any) -> Any:
        """Clip trunk and head to `max_grad_norm` each; returns the trunk's norm, which is the one that is logged."""
        kind, named = self.accelerator.distributed_type, list(model.named_parameters())
        trunk = [parameter for name, parameter in named if not _in_head(name)]
        head = [parameter for name, parameter in named if _in_head(name)]
        first_fsdp = kind == DistributedType.FSDP and not self.accelerator.is_fsdp2
        if kind not in CLIPPED_IN_PARTS or first_fsdp or not head or all(p.grad is None for p in trunk):
            return super()._clip_grad_norm(model)  # pyright: ignore[reportAttributeAccessIssue]
        norm = self.accelerator.clip_grad_norm_(trunk, self.args.max_grad_norm)  # unscales every gradient, once
        clip_grad_norm_(head, self.args.max_grad_norm)
        return norm

    def compute_loss(self: Any, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """As the original's; in evaluation, the loss is the model's own."""
        control = base_model(self.accelerator.unwrap_model(model, keep_torch_compile=False)).mtp
        before = control.last
        result = super().compute_loss(model, inputs, *args, **options)  # pyright: ignore[reportAttributeAccessIssue]
        if control.last is before:
            return result
        self._mtp_sums = control.last.stats if self._mtp_sums is None else self._mtp_sums + control.last.stats
        if model.training or control.own_loss is None:
            return result
        return (control.own_loss, result[1]) if isinstance(result, tuple) else control.own_loss

    def evaluation_loop(self: Any, dataloader: Any, description: str, *args: Any, **options: Any) -> Any:
        """As the original's, with the head's metrics over the data set among its metrics."""
        training, self._mtp_sums = self._mtp_sums, None
        try:
            out = super().evaluation_loop(dataloader, description, *args, **options)  # pyright: ignore[reportAttributeAccessIssue]
            prefix = options.get("metric_key_prefix", "eval")
            out.metrics.update({f"{prefix}_{name}": value for name, value in self._mtp_metrics().items()})
        finally:
            self._mtp_sums = training
        return out

    def log(self: Any, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """As the original's; beside the loss of training, the head's metrics since the last of these."""
        if "loss" in logs:
            logs.update(self._mtp_metrics())
            self._mtp_sums = None
        super().log(logs, *args, **options)  # pyright: ignore[reportAttributeAccessIssue]

    def _mtp_metrics(self: Any) -> dict[str, float]:
        """Sums over counts of the calls since the last log, over all ranks; the only place that waits for the device."""
        return {} if self._mtp_sums is None else self._mtp_sums.all_reduce().metrics()


@checked("Making a trainer of joint models", error=SettingsError, original=TRAINER)
@functools.cache
def trainer_class(original: type) -> type:
    """Derive from a Trainer one that treats the head of a joint model as a part of its own.

    - The head's norms and biases are not decayed.
    - `max_grad_norm` is applied to trunk and head separately, so that with every way cut, the trunk is updated exactly as it
      would be alone; `grad_norm` in the logs is the trunk's. DeepSpeed and FSDP1 clip by themselves, both together.
    - Logs hold `mtp/loss_1`, `mtp/acc_1`, .. with `loss`, and `eval_mtp/loss_1`, .. with `eval_loss`: sums over counts, over
      micro-batches, steps and ranks. `eval_loss` is the model's own loss; `loss` is the joint one.

    Args:
        original: transformers' `Trainer`, TRL's `SFTTrainer`, or a class derived from them.

    Raises:
        SettingsError: it is none, or of a transformers that clips elsewhere.

    Example:
        >>> trainer = mz.trainer_class(Trainer)(model=mz.attach(model), args=arguments)                     # doctest: +SKIP
    """
    return type(original)(original.__name__, (_JointTrainer, original), {"__module__": original.__module__})
