"""`mtp-zoo push`: bring a repository on the Hub to the state of a checkpoint."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from mtp_zoo.cli.output import JsonOption, show


def command(
    checkpoint: Annotated[str, typer.Argument(help="Directory of a whole checkpoint.")],
    repository: Annotated[str, typer.Argument(help="Repository id (org/name); made where there is none.")],
    revision: Annotated[str | None, typer.Option(help="Branch; the main one where left out.")] = None,
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Visibility of a repository that is made now.")
    ] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Make a pull request instead of a commit.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Compare, and send nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Upload the files that differ, in one commit. Weight files that only the repository has are deleted there."""
    from mtp_zoo.publishing import push

    report = push(checkpoint, repository, revision=revision, private=private, create_pr=create_pr, dry_run=dry_run)
    would = "would be " if dry_run else ""
    lines = [
        *(f"{would}uploaded: {file}" for file in report.uploaded),
        *(f"{would}deleted: {file}" for file in report.deleted),
        f"unchanged files: {report.unchanged}",
        f"bytes {would}uploaded: {report.bytes_uploaded:,}",
        report.url or (f"at commit {report.commit}" if report.commit else "the repository would be made"),
    ]
    show(dataclasses.asdict(report), "\n".join(lines), as_json=as_json)
