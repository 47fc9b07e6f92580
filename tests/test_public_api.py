"""What `import mtp_zoo` promises: these names, documented, and no heavy import before one of them is used."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

import mtp_zoo
from mtp_zoo import errors
from mtp_zoo.errors import MTPZooError

HEAVY = (
    "torch",
    "transformers",
    "datasets",
    "matplotlib",
    "accelerate",
    "huggingface_hub",
    "numpy",
    "pydantic",
    "rich",
)


def run(code: str) -> str:
    """Standard output of a fresh interpreter, in which nothing has been imported yet."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_names_are_sorted_and_unique() -> None:
    assert mtp_zoo.__all__ == sorted(set(mtp_zoo.__all__))
    assert dir(mtp_zoo) == mtp_zoo.__all__


def test_the_list_and_what_resolves_are_one() -> None:
    assert sorted({*mtp_zoo._HOME, "__version__"}) == mtp_zoo.__all__
    for name, home in mtp_zoo._HOME.items():
        assert getattr(mtp_zoo, name) is getattr(importlib.import_module(f"mtp_zoo.{home}"), name)


def test_a_public_name_is_exported_from_where_it_is_defined() -> None:
    for name, home in mtp_zoo._HOME.items():
        assert getattr(mtp_zoo, name).__module__ == f"mtp_zoo.{home}"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'mtp_zoo' has no attribute 'load_heads'"):
        mtp_zoo.load_heads  # noqa: B018


@pytest.mark.parametrize("name", [name for name in mtp_zoo.__all__ if name != "__version__"])
def test_every_public_name_is_documented(name: str) -> None:
    thing = getattr(mtp_zoo, name)
    assert inspect.getdoc(thing)
    members = inspect.getmembers(thing, lambda member: callable(member) or isinstance(member, property))
    own = [m for key, m in members if inspect.isclass(thing) and not key.startswith("_") and key in vars(thing)]
    assert [member for member in own if not inspect.getdoc(member)] == []


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = f"import sys, mtp_zoo; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert run(code) == "[]"


@pytest.mark.parametrize(
    "module", ["errors", "spec", "keymap", "rules", "registry", "modelconfig", "families", "blocks"]
)
def test_a_family_can_be_declared_without_torch(module: str) -> None:
    code = f"import sys, mtp_zoo.{module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert run(code) == "[]"


def test_names_that_need_no_torch_do_not_load_it() -> None:
    code = (
        "import sys, mtp_zoo as mz; mz.get_family('qwen3_5'); mz.resolve, mz.CheckpointIndex, mz.HeadSpec; "
        "print('torch' in sys.modules)"
    )
    assert run(code) == "False"


def test_every_error_is_in_the_tree_and_in_the_drawing_of_it() -> None:
    drawn = errors.__doc__ or ""
    for name, thing in inspect.getmembers(errors, lambda member: getattr(member, "__module__", "") == errors.__name__):
        assert issubclass(thing, MTPZooError)
        assert name in drawn
        assert thing.__doc__
    with pytest.raises(TypeError, match="remedy"):
        MTPZooError("what was wrong")  # type: ignore[call-arg]


def test_an_error_shows_its_problems_a_line_each_and_its_remedy_last() -> None:
    error = MTPZooError("Doing a thing: expected 1, got 2.", remedy="Give 1.", problems=["a: 2", "b: 3"])
    assert str(error) == "Doing a thing: expected 1, got 2.\n  - a: 2\n  - b: 3\nRemedy: Give 1."
    assert (error.message, error.remedy, error.problems) == (
        "Doing a thing: expected 1, got 2.",
        "Give 1.",
        ("a: 2", "b: 3"),
    )
