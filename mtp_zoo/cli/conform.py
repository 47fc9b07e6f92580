"""`mtp-zoo conform`: whether heads compute what plain torch, transformers, vLLM and SGLang compute."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from mtp_zoo.cli.output import JsonOption, quiet_transformers, show
from mtp_zoo.errors import ConformanceError, EnvironmentSetupError

if TYPE_CHECKING:
    from mtp_zoo.spec import Engine
    from mtp_zoo_conformance.engines.client import EnginePython
    from mtp_zoo_conformance.record import Record, Tier

PARITY, NOT_JUDGED = 0, 3
"""Exit codes, as in `mtp_zoo_conformance.record`, which takes long to import."""


class EngineName(str, Enum):
    """An engine."""

    vllm = "vllm"
    sglang = "sglang"


class TierName(str, Enum):
    """A tier; each needs more than the one before."""

    keys = "keys"
    forward = "forward"
    module = "module"
    serve = "serve"


def command(
    install: Annotated[
        list[EngineName] | None,
        typer.Option(help="Make this engine's environment from its pinned list, and stop; may be repeated."),
    ] = None,
    family: Annotated[
        list[str] | None, typer.Option(help="Judge this family; may be repeated. All by default.")
    ] = None,
    engine: Annotated[
        list[EngineName] | None, typer.Option(help="Let this engine judge; may be repeated. Both by default.")
    ] = None,
    tier: Annotated[list[TierName] | None, typer.Option(help="Run this tier; may be repeated. All by default.")] = None,
    engine_python: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[ENGINE=]PATH", help="Python of an environment of yours that has the engine; on its device."
        ),
    ] = None,
    plugin: Annotated[
        list[str] | None, typer.Option(metavar="MODULE", help="Import a module that registers a family and its case.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Directory for conformance.json and index.html.")] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Directory for checkpoints, outputs and logs; kept in any case.")
    ] = None,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one job of an engine may take.")] = 600,
    as_json: JsonOption = False,
) -> None:
    """Compare every head with plain torch, transformers, and the engines' own modules; serve what was exported.

    Exit code 0: parity. 1: judged, and something differs. 3: something could not be judged. 2: a wrong option.
    """
    engines: list[Engine] = [name.value for name in engine or EngineName]
    if install:
        _install([name.value for name in install], as_json=as_json)
        return
    own = _own_pythons(engine_python or [], engines)

    from mtp_zoo_conformance import report as reports
    from mtp_zoo_conformance.engines.environment import find
    from mtp_zoo_conformance.plugins import load_plugins
    from mtp_zoo_conformance.run import Selection, run

    quiet_transformers()
    load_plugins(plugin or [])
    tiers: tuple[Tier, ...] = tuple(name.value for name in tier or TierName)
    selection = Selection(families=tuple(family) if family else None, engines=tuple(engines), tiers=tiers)
    pythons: dict[Engine, EnginePython] = {name: found for name in engines if (found := own.get(name) or find(name))}
    _ = selection.cases  # an unknown family is told before anything is made
    if report is not None:
        _made("--report", report)  # and so is a place that can't be written to
    folder = _folder(keep)
    record = run(selection, pythons, folder, limit=limit)
    show(record.as_dict(), reports.text(record), as_json=as_json)
    if report is not None:
        _write(record, report)
    if keep is None and record.exit_code == PARITY:
        shutil.rmtree(folder)
    else:
        print(f"Checkpoints, outputs and logs: {folder}", file=sys.stderr)
    raise typer.Exit(record.exit_code)


def _install(engines: Sequence[Engine], *, as_json: bool) -> None:
    from mtp_zoo_conformance.engines.environment import install

    try:
        pythons = {engine: str(install(engine).python) for engine in engines}
    except EnvironmentSetupError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(NOT_JUDGED) from None
    show({"pythons": pythons}, "\n".join(f"{engine}: {path}" for engine, path in pythons.items()), as_json=as_json)


def _own_pythons(words: Sequence[str], engines: Sequence[Engine]) -> dict[Engine, EnginePython]:
    """Interpreters given on the command line, `ENGINE=PATH`, or `PATH` where one engine judges."""
    from mtp_zoo_conformance.engines.client import EnginePython

    found: dict[Engine, EnginePython] = {}
    for word in words:
        name, _, path = word.rpartition("=")
        if not name and len(engines) == 1:
            name = engines[0]
        if name not in engines:
            raise ConformanceError(
                f"Reading --engine-python {word}: expected ENGINE=PATH with ENGINE one of {', '.join(engines)}.",
                remedy="Name the engine, or judge with one engine only (--engine).",
            )
        python = (
            Path(path).expanduser().absolute()
        )  # not resolved: behind the link lies the interpreter without packages
        if not python.is_file():
            raise ConformanceError(
                f"Reading --engine-python {word}: there is no file {python}.",
                remedy="Point at the environment's bin/python.",
            )
        engine = cast("Engine", name)
        found[engine] = EnginePython(engine, python, managed=False)
    return found


def _folder(keep: Path | None) -> Path:
    """Where the run works: absolute, since workers have a working directory of their own."""
    return Path(tempfile.mkdtemp(prefix="mtp-zoo-conform-")) if keep is None else _made("--keep", keep).absolute()


def _made(option: str, folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(option, folder, error) from error
    return folder


def _write(record: Record, folder: Path) -> None:
    from mtp_zoo_conformance import report as reports

    try:
        reports.write(record, folder)
    except OSError as error:
        raise _unwritable("--report", folder, error) from error


def _unwritable(option: str, folder: Path, error: OSError) -> ConformanceError:
    return ConformanceError(
        f"Writing into {option} {folder}: {error.strerror}.", remedy="Name a directory that can be written."
    )
