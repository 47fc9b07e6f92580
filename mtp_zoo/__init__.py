"""mtp_zoo: load, train, export and measure the multi-token-prediction heads that language models ship.

Importing the package loads neither torch nor transformers; a name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mtp_zoo.version import __version__

if TYPE_CHECKING:
    from mtp_zoo.acceptance import replay, speculate
    from mtp_zoo.acceptance_report import AcceptanceReport
    from mtp_zoo.attacher import attach
    from mtp_zoo.batch import TokenBatch
    from mtp_zoo.checkpoint import CheckpointIndex
    from mtp_zoo.context_layout import pad_documents
    from mtp_zoo.context_parallel import ShardedBatch, split
    from mtp_zoo.detacher import detach
    from mtp_zoo.diagnosis.examination import doctor
    from mtp_zoo.diagnosis.finding import Diagnosis, Finding
    from mtp_zoo.draft_module import DraftModule
    from mtp_zoo.errors import MTPZooError
    from mtp_zoo.exporter import ExportReport, export
    from mtp_zoo.grafting import graft
    from mtp_zoo.head import DraftHead
    from mtp_zoo.journal import RollbackReport, rollback
    from mtp_zoo.keymap import KeyMap
    from mtp_zoo.load_report import LoadReport
    from mtp_zoo.loader import load_head
    from mtp_zoo.objective import MTPObjective, MTPOutput, step_counts
    from mtp_zoo.parallel import gather_head, shard_head
    from mtp_zoo.publishing import PushReport, push
    from mtp_zoo.registry import Family, get_family, list_families, register, resolve
    from mtp_zoo.rules import Rename, Skip, Split, Stack
    from mtp_zoo.shared import SharedTensors, load_shared
    from mtp_zoo.spec import HeadSpec, PerEngine
    from mtp_zoo.stats import MTPStats
    from mtp_zoo.targets import target_states
    from mtp_zoo.trainer_integration import trainer_class
    from mtp_zoo.training.config import TrainConfig
    from mtp_zoo.training.trainer import train
    from mtp_zoo.verification import Verification, verify

_HOME = {
    "AcceptanceReport": "acceptance_report",
    "CheckpointIndex": "checkpoint",
    "Diagnosis": "diagnosis.finding",
    "DraftHead": "head",
    "DraftModule": "draft_module",
    "ExportReport": "exporter",
    "Family": "registry",
    "Finding": "diagnosis.finding",
    "HeadSpec": "spec",
    "KeyMap": "keymap",
    "LoadReport": "load_report",
    "MTPObjective": "objective",
    "MTPOutput": "objective",
    "MTPStats": "stats",
    "MTPZooError": "errors",
    "PerEngine": "spec",
    "PushReport": "publishing",
    "Rename": "rules",
    "RollbackReport": "journal",
    "ShardedBatch": "context_parallel",
    "SharedTensors": "shared",
    "Skip": "rules",
    "Split": "rules",
    "Stack": "rules",
    "TokenBatch": "batch",
    "TrainConfig": "training.config",
    "Verification": "verification",
    "attach": "attacher",
    "detach": "detacher",
    "doctor": "diagnosis.examination",
    "export": "exporter",
    "gather_head": "parallel",
    "get_family": "registry",
    "graft": "grafting",
    "list_families": "registry",
    "load_head": "loader",
    "load_shared": "shared",
    "pad_documents": "context_layout",
    "push": "publishing",
    "register": "registry",
    "replay": "acceptance",
    "resolve": "registry",
    "rollback": "journal",
    "shard_head": "parallel",
    "speculate": "acceptance",
    "split": "context_parallel",
    "step_counts": "objective",
    "target_states": "targets",
    "train": "training.trainer",
    "trainer_class": "trainer_integration",
    "verify": "verification",
}

__all__ = [
    "AcceptanceReport",
    "CheckpointIndex",
    "Diagnosis",
    "DraftHead",
    "DraftModule",
    "ExportReport",
    "Family",
    "Finding",
    "HeadSpec",
    "KeyMap",
    "LoadReport",
    "MTPObjective",
    "MTPOutput",
    "MTPStats",
    "MTPZooError",
    "PerEngine",
    "PushReport",
    "Rename",
    "RollbackReport",
    "ShardedBatch",
    "SharedTensors",
    "Skip",
    "Split",
    "Stack",
    "TokenBatch",
    "TrainConfig",
    "Verification",
    "__version__",
    "attach",
    "detach",
    "doctor",
    "export",
    "gather_head",
    "get_family",
    "graft",
    "list_families",
    "load_head",
    "load_shared",
    "pad_documents",
    "push",
    "register",
    "replay",
    "resolve",
    "rollback",
    "shard_head",
    "speculate",
    "split",
    "step_counts",
    "target_states",
    "train",
    "trainer_class",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mtp_zoo' has no attribute '{name}'")
    return getattr(importlib.import_module(f"mtp_zoo.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
