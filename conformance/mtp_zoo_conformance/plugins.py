"""Cases of other projects: modules that register a family and its case when they are imported.

A project names such a module in its packaging, and it is always there:

    [project.entry-points."mtp_zoo.conformance"]
    my_family = "my_package.my_family_conformance"

or on the command line, `mtp-zoo conform --plugin my_package.my_family_conformance`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path

from mtp_zoo.errors import ConformanceError

GROUP = "mtp_zoo.conformance"


def load_plugins(modules: Iterable[str] = ()) -> None:
    """Import what installed projects register under the entry point `mtp_zoo.conformance`, and the named modules.

    Modules of the working directory are found too, as by `python -m`.

    Raises:
        ConformanceError: one can't be imported.
    """
    for point in entry_points(group=GROUP):
        _import(point.value.partition(":")[0], f"entry point '{point.name}'")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    for module in modules:
        _import(module, "--plugin")


def _import(module: str, named_by: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:  # code of others, run on import: whatever it raises, it did not register its case
        raise ConformanceError(
            f"Importing the plugin {module} ({named_by}): {type(error).__name__}: {error}",
            remedy="Name an importable module that registers a family and its conformance case.",
        ) from error
