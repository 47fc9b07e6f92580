"""Stand-in for torchvision, for runs on text only.

transformers' image processors import it, and vLLM imports those with its Qwen3.5 classes, also for a model that sees no image.
PyPI has no torchvision that imports beside the pinned CPU build of torch. Names can be imported; any use raises.
"""

from collections.abc import Callable
from typing import Any

__version__ = "0.28.0"


def missing(name: str) -> Callable[..., Any]:
    """A function that says that it isn't there."""
    if name.startswith("__"):
        raise AttributeError(name)

    def call(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(
            f"torchvision is a stand-in here: {name} isn't available. Install torchvision to run images."
        )

    return call
