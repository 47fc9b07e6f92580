"""Check the arguments of a public call before it starts any work, and report every bad one in one error.

    @checked("Loading a head", error=SettingsError, seed=whole(least=0), dtype=optional(float_dtype))
    def load_head(..., seed=0, dtype=None): ...

A rule judges one value: its type, its range, whether it is finite. What depends on several values at once, or on files, is
checked by the function itself. Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from mtp_zoo.errors import ArgumentError, MTPZooError

P = ParamSpec("P")
T = TypeVar("T")

REMEDY = "Correct the named arguments."
LONGEST = 80
"""Characters of a value's text in a message."""


@dataclass(frozen=True)
class Rule:
    """What one argument may be.

    Attributes:
        expected: the accepted values, as a noun phrase.
        accepts: returns whether a value is one of them; raises nothing for values of any type.
    """

    expected: str
    accepts: Callable[[Any], bool]


def whole(least: int, most: int | None = None) -> Rule:
    """Accept an int in a closed range; a bool is none."""
    limits = f">= {least}" if most is None else f"from {least} to {most}"
    return Rule(
        f"a whole number {limits}",
        lambda value: is_whole(value) and least <= value and (most is None or value <= most),
    )


def number(least: float | None = None, above: float | None = None) -> Rule:
    """Accept a finite int or float, at least `least` or greater than `above`."""
    bound = f" >= {least}" if least is not None else f" > {above}" if above is not None else ""
    return Rule(
        f"a finite number{bound}",
        lambda value: is_number(value) and (least is None or value >= least) and (above is None or value > above),
    )


def one_of(*values: object) -> Rule:
    """Accept one of a few values."""
    return Rule(f"one of {list(values)}", lambda value: _is_among(value, values))


def some_of(values: Collection[str]) -> Rule:
    """Accept a set, list or tuple of known names; a single string is refused, it would be read letter by letter."""
    return Rule(
        f"a set, list or tuple with some of {sorted(values)}",
        lambda given: (
            isinstance(given, (set, frozenset, list, tuple)) and all(_is_among(each, tuple(values)) for each in given)
        ),
    )


def instance(expected: str, *kinds: type) -> Rule:
    """Accept objects of these classes."""
    return Rule(expected, lambda value: isinstance(value, kinds))


def having(expected: str, *names: str) -> Rule:
    """Accept objects with these attributes, for duck-typed arguments such as a transformers model."""
    return Rule(expected, lambda value: not isinstance(value, type) and all(hasattr(value, name) for name in names))


def optional(rule: Rule) -> Rule:
    """Accept None too."""
    return Rule(f"{rule.expected}, or None", lambda value: value is None or rule.accepts(value))


def either(*rules: Rule) -> Rule:
    """Accept what one of several rules accepts."""
    return Rule(" or ".join(rule.expected for rule in rules), lambda value: any(rule.accepts(value) for rule in rules))


TARGET = having("a transformers model", "get_input_embeddings", "get_output_embeddings", "config")
DEPTHS = whole(least=1, most=256)
"""Draft depths; each costs memory and a pass, and no more than a handful are of use."""

INTEGER = Rule("a whole number", lambda value: is_whole(value))
FLAG = Rule("True or False", lambda value: isinstance(value, bool))
TEXT = Rule("a string that is not empty", lambda value: isinstance(value, str) and bool(value.strip()))
PATH = Rule(
    "a path that is not empty",
    lambda value: isinstance(value, (str, os.PathLike)) and bool(os.fspath(value)) and "\0" not in str(value),
)
LIST = Rule("a list or tuple", lambda value: isinstance(value, Sequence) and not isinstance(value, (str, bytes)))
SEVERAL = Rule("an iterable of names, not one name", lambda value: _is_several(value))
MAPPING = Rule("a mapping", lambda value: isinstance(value, Mapping))
FLOAT_DTYPE = Rule("a torch dtype for floats of at least 16 bits", lambda value: _is_float_dtype(value))
DEVICE = Rule("a torch device or its name", lambda value: _is_device(value))


def tuple_of(rule: Rule) -> Rule:
    """Accept a tuple, which may be empty, whose entries one rule accepts."""
    return Rule(
        f"a tuple, each entry {rule.expected}", lambda value: isinstance(value, tuple) and all(map(rule.accepts, value))
    )


NAMES = Rule(
    "a tuple of names", lambda value: bool(isinstance(value, tuple) and value) and all(map(TEXT.accepts, value))
)
"""At least one."""


def problems_of(values: Mapping[str, Any], rules: Mapping[str, Rule]) -> list[str]:
    """Return one line for every value that its rule does not accept."""
    return [
        f"{name}: expected {rule.expected}, got {shown(values[name])}"
        for name, rule in rules.items()
        if name in values and not rule.accepts(values[name])
    ]


def refuse(act: str, problems: Iterable[str], error: type[MTPZooError] = ArgumentError, remedy: str = REMEDY) -> None:
    """Raise `error` with all problems where there are any.

    Args:
        act: what was attempted, as a phrase ("Loading a head").
        problems: one line each.
        error: class to raise.
        remedy: what the caller can do.
    """
    found = list(problems)
    if found:
        raise error(f"{act}: some arguments can't be used.", remedy=remedy, problems=found)


def checked(
    act: str, *, error: type[MTPZooError] = ArgumentError, **rules: Rule
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that checks arguments by their rules before the function runs.

    Args:
        act: what the function does, as a phrase ("Loading a head").
        error: class of the error; its `problems` lists every bad argument.
        rules: by parameter name.

    Raises:
        LookupError: a rule for a parameter that the function does not have.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)
        if rules.keys() - signature.parameters.keys():
            raise LookupError(f"{function}: rules for unknown parameters {rules.keys() - signature.parameters.keys()}")

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            refuse(act, problems_of(signature.bind(*args, **kwargs).arguments, rules), error)
            return function(*args, **kwargs)

        return call

    return decorate


def check_fields(record: object, error: type[MTPZooError] = ArgumentError, **rules: Rule) -> None:
    """Check the fields of a dataclass when it is made.

    Raises:
        error: with every bad field.
    """
    refuse(f"Making a {type(record).__name__}", problems_of(vars(record), rules), error)


def shown(value: object) -> str:
    """Return a short text of any value, for a message."""
    kind = type(value).__name__
    if kind == "Tensor" or hasattr(value, "state_dict"):
        shape = f" {list(getattr(value, 'shape'))}" if hasattr(value, "shape") else ""  # noqa: B009
        return f"a {kind}{shape}"
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({kind})"


def is_whole(value: object) -> bool:
    """Return whether a value is an int and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether a value is a finite int or float and no bool."""
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _is_among(value: object, values: Iterable[object]) -> bool:
    """Compare by type too: 1 is not True, and a tensor is compared with nothing."""
    return any(type(value) is type(each) and value == each for each in values)


def _is_float_dtype(value: object) -> bool:
    import torch

    return isinstance(value, torch.dtype) and value in (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _is_device(value: object) -> bool:
    import torch

    if isinstance(value, torch.device):
        return True
    try:
        return isinstance(value, str) and bool(torch.device(value))
    except RuntimeError:
        return False


def _is_several(value: object) -> bool:
    """A generator is taken unread; whatever can be read twice is."""
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes)) or type(value).__name__ == "Tensor":
        return False
    return not isinstance(value, Collection) or all(isinstance(each, str) for each in value)
