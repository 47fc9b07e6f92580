"""`mtp_zoo.json`: what an exported checkpoint says of where its parts come from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mtp_zoo.errors import ExportError
from mtp_zoo.export_plan import PROVENANCE_NAME, ExportPlan
from mtp_zoo.version import __version__

if TYPE_CHECKING:
    from mtp_zoo.head import DraftHead


def refuse_unprintable(facts: Mapping[str, Any]) -> None:
    """Raise ExportError for facts that are not JSON, before anything is written."""
    try:
        json.dumps(facts, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ExportError(
            f"Writing {PROVENANCE_NAME}: the training summary is not JSON ({error}).",
            remedy="Pass numbers, strings, lists and tables only.",
        ) from error


def provenance(plan: ExportPlan, head: DraftHead, digests: Mapping[str, str], facts: Mapping[str, Any]) -> str:
    """The text of `mtp_zoo.json`; `digests` is the sha256 of each stored tensor of the head, `facts` what else it shall say."""
    content = {
        "mtp_zoo": __version__,
        "family": head.family.name,
        "depths": head.num_depths,
        "conventions": head.spec.describe(),
        "engine": head.engine,
        "head_bytes": sum(tensor.nbytes for tensor in plan.head),
        **facts,
        "tensors": {
            tensor.name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "sha256": digests[tensor.name]}
            for tensor in plan.head
        },
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
