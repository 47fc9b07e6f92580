"""What tests of the conformance code share: one prepared variant, and its reference outputs."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from safetensors.torch import load_file
from torch import Tensor

from mtp_zoo_conformance.cases import get_case
from mtp_zoo_conformance.prepared import Prepared, prepare


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """The first variant of the dense Qwen3.5 case."""
    case = get_case("qwen3_5")
    return prepare(case, case.variants[0], tmp_path_factory.mktemp("conformance"))


@pytest.fixture(scope="session")
def reference_outputs(prepared: Prepared) -> Mapping[str, Tensor]:
    """What plain torch gives for it."""
    tensors = load_file(prepared.checkpoint / "model.safetensors")
    return prepared.case.reference(tensors, prepared.variant.text_config, prepared.requests)
