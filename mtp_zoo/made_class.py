"""Classes that are made at run time around a model's own, and objects of them in pickles and copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class Made:
    """Base of such a class. Its objects are pickled by the original class and the function that makes theirs."""

    _made_from: ClassVar[tuple[Callable[[type], type], type]]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """As the original's, with the class replaced by how to make it."""
        made: Any = super().__reduce_ex__(max(int(protocol), 2))
        return (_empty, self._made_from, *made[2:])


def original_class(kind: type) -> type | None:
    """The class that `kind` was made around; None for any other, also for a class derived from a made one."""
    made = vars(kind).get("_made_from")
    return None if made is None else made[1]


def _empty(make: Callable[[type], type], original: type) -> Any:
    kind: Any = make(original)
    return kind.__new__(kind)
