"""What a joint model's call returns: the model's own output, with the MTP loss added and named.

In training `mtp_loss` and `metrics` are fields, so that they outlive those who rebuild an output from its items, as mixed
precision does. In evaluation they are plain attributes: whoever walks the items there, as `Trainer` does for
`compute_metrics`, finds what the model alone returns.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mtp_zoo.errors import AttachError


def with_mtp(
    out: Any,
    mtp_loss: Tensor,
    weight: float,
    metrics: dict[str, Tensor],
    *,
    has_loss: bool,
    joint: bool,
    keys: bool,
) -> Any:
    """The output with `loss = own loss + weight * mtp_loss`.

    Args:
        out: a transformers output, or the tuple that `return_dict=False` gives.
        mtp_loss: the objective's loss.
        weight: lambda.
        metrics: of this call.
        has_loss: whether `out` holds a loss of the model's own.
        joint: whether that loss takes part; else, or where there is none, the weighted MTP loss is the loss.
        keys: whether `mtp_loss` and `metrics` are fields.
    """
    loss = weight * mtp_loss
    if has_loss and joint:
        loss = loss + (out[0] if isinstance(out, tuple) else out.loss)
    if isinstance(out, tuple):
        return (loss, *out[has_loss:])
    if keys:
        fields = {field.name: getattr(out, field.name) for field in dataclasses.fields(out)}
        return _extended(type(out))(**{**fields, "loss": loss, "mtp_loss": mtp_loss, "metrics": metrics})
    out.loss, out.mtp_loss, out.metrics = loss, mtp_loss, metrics
    return out


@cache
def _extended(kind: type) -> type:
    """A subclass of an output class with two more fields; its name is the original's."""
    added = [(name, Any, dataclasses.field(default=None)) for name in ("mtp_loss", "metrics")]
    whole = dataclasses.make_dataclass(kind.__name__, added, bases=(kind,))
    whole.__module__, whole.__qualname__ = kind.__module__, kind.__qualname__
    return whole


def is_fused(out: Any) -> bool:
    """Whether this is the output of TRL's fused lm_head: log-probabilities a token, out of which its trainers make a loss."""
    return hasattr(out, "log_probs") and hasattr(out, "label_mask")


def with_mtp_gradient(out: Any, mtp_sum: Tensor, metrics: dict[str, Tensor]) -> Any:
    """A fused output whose log-probabilities carry the gradient of the MTP loss to a trainer that ignores `loss`.

    `SFTTrainer` computes `-log_probs.sum() / n`, with an `n` and scalings of its own. One more column of zeros, through
    which `mtp_sum` gets the gradient of a negative log-likelihood, adds `mtp_sum / n` to that in every gradient. No value
    changes: the loss that it logs stays the model's own.

    Args:
        out: from the fused forward.
        mtp_sum: lambda times the weighted sum (no mean) of the depths' losses.
        metrics: of this call.

    Raises:
        AttachError: another trainer's output, whose loss is no sum of these log-probabilities.
    """
    if out.is_top1 is None or out.mean_logits is not None:
        raise AttachError(
            "Adding the MTP loss: the model was called by a TRL trainer that makes a loss of its own out of "
            "log-probabilities; expected SFTTrainer, whose loss is their sum.",
            remedy="Train the head with SFTTrainer, or in a loop of your own (examples/rl_step.py).",
        )
    carrier = torch.zeros_like(out.log_probs[:, :1])
    carrier[0, 0] = mtp_sum.detach() - mtp_sum
    out.log_probs = torch.cat([out.log_probs, carrier], dim=1)
    out.mtp_loss, out.metrics = mtp_sum.detach(), metrics
    return out
