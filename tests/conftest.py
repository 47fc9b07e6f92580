"""Settings of every test: shapes checked, no network, quiet libraries, one thread, known random numbers."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator

import hypothesis
import jaxtyping
import pytest

from tests.children import PRELOADED
from tests.shapes import CHECKER, modules_with_shapes

os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads it once, when it is imported

# How busy the machine is must not decide whether a law holds.
hypothesis.settings.register_profile(
    "any_speed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any_speed")


def pytest_configure(config: pytest.Config) -> None:
    """Prepare a process that runs tests; one that hands them to workers need not wait for imports of ten seconds."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        _load()


def _load() -> None:
    # While it imports a module of ours, the hook looks for bytecode under names of its own: what that module imports from
    # elsewhere would be compiled anew, 1,300 modules in every worker.
    for name in (*PRELOADED, "peft"):
        importlib.import_module(name)
    jaxtyping.install_import_hook(modules_with_shapes(), CHECKER)

    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Every test starts from the same random state and leaves none behind."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
