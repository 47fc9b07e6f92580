"""Settings of every test: shapes checked, no network, quiet libraries, few threads, known random numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import jaxtyping

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported, so it comes before every other import

PACKAGE = Path(__file__).parents[1] / "mtp_zoo"


def modules_with_shapes() -> list[str]:
    """The modules that declare tensor shapes.

    The others have no shape to check, and some can't be checked at all: under the hook, names that are imported for the
    type checker alone (so that `import mtp_zoo` loads no torch) would be looked up at run time, as would protocols.
    """
    files = (path for path in PACKAGE.rglob("*.py") if "from jaxtyping import" in path.read_text(encoding="utf-8"))
    return sorted(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in files)


# The tower lets an int stand for a float, as type checkers do.
jaxtyping.install_import_hook(
    modules_with_shapes(), "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
)

import pytest  # noqa: E402 - nothing that might import the package may come before the hook
import torch  # noqa: E402
import transformers  # noqa: E402

torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Every test starts from the same random state and leaves none behind."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
