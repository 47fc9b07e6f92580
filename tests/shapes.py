"""Run-time check of the tensor shapes and dtypes that signatures declare; the import hook of conftest.py applies it.

Only shapes are checked. Other types are the type checker's, and tests hand over wrong ones on purpose, to see the typed
error that users get.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from beartype import beartype
from jaxtyping import AbstractArray

PACKAGE = Path(__file__).parents[1] / "mtp_zoo"
CHECKER = f"{__name__}.check_shapes"
"""What jaxtyping's import hook decorates functions with; it takes a name, not a function."""


def modules_with_shapes() -> list[str]:
    """The modules that declare a tensor shape; in others the hook would cost time at every call and check nothing."""
    files = (path for path in PACKAGE.rglob("*.py") if "from jaxtyping import" in path.read_text(encoding="utf-8"))
    return sorted(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in files)


def check_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, checked where an annotation holds a jaxtyping array; its other annotations mean nothing here."""
    hints = function.__annotations__
    if not any(map(declares_shape, hints.values())):
        return function
    function.__annotations__ = {name: hint if declares_shape(hint) else Any for name, hint in hints.items()}
    return beartype(function)


def declares_shape(hint: Any) -> bool:
    """Whether the annotation is a jaxtyping array, or holds one."""
    return (isinstance(hint, type) and issubclass(hint, AbstractArray)) or any(map(declares_shape, get_args(hint)))
