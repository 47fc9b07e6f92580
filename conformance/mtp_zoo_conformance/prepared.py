"""A variant made ready: its checkpoint and its requests on disk, shared by all tiers of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from mtp_zoo_conformance.case import ConformanceCase, Variant
from mtp_zoo_conformance.inputs import Requests
from mtp_zoo_conformance.tiny import write_checkpoint


@dataclass(frozen=True)
class Prepared:
    """A variant's files.

    Attributes:
        case, variant: what they belong to.
        folder: where they lie.
        checkpoint: directory with config.json and model.safetensors.
        requests: the inputs.
        inputs: the same as a file for workers.
    """

    case: ConformanceCase
    variant: Variant
    folder: Path
    checkpoint: Path
    requests: Requests
    inputs: Path

    @property
    def is_first(self) -> bool:
        """Whether this is the variant on which conventions are flipped."""
        return self.variant is self.case.variants[0]

    @property
    def dtype(self) -> torch.dtype:
        """What both sides compute in."""
        return getattr(torch, self.variant.dtype)


def prepare(case: ConformanceCase, variant: Variant, folder: Path) -> Prepared:
    """Write a variant's checkpoint and inputs under `folder`."""
    here = folder / case.family / variant.name
    checkpoint = here / "checkpoint"
    checkpoint.mkdir(parents=True, exist_ok=True)
    text = variant.text_config
    requests = Requests.random(vocab=text["vocab_size"], hidden=text["hidden_size"])
    write_checkpoint(case, variant, checkpoint)
    return Prepared(case, variant, here, checkpoint, requests, requests.save(here / "inputs.safetensors"))
