"""doctor: open a checkpoint, run every check, and report all that was found at once."""

from __future__ import annotations

import shlex
from pathlib import Path

from mtp_zoo.arguments import FLAG, PATH, TEXT, checked, optional
from mtp_zoo.checkpoint import CheckpointIndex
from mtp_zoo.checkpoint_source import locate
from mtp_zoo.diagnosis.comparison import check_against
from mtp_zoo.diagnosis.configuration import check_configuration
from mtp_zoo.diagnosis.files import check_files
from mtp_zoo.diagnosis.finding import Diagnosis, Finding
from mtp_zoo.diagnosis.numbers import check_numbers
from mtp_zoo.diagnosis.scales import check_scales
from mtp_zoo.diagnosis.subject import Subject
from mtp_zoo.diagnosis.tensors import check_tensors
from mtp_zoo.errors import BrokenCheckpointError, ModelConfigError, UnsafeCheckpointError
from mtp_zoo.index_file import read_index
from mtp_zoo.journal import JOURNAL, UPDATE
from mtp_zoo.safetensors_header import collector_paused

BY_HEADERS = (check_files, check_configuration, check_tensors, check_scales)


@checked("Examining a checkpoint", source=PATH, revision=optional(TEXT), deep=FLAG, against=optional(PATH))
def doctor(
    source: str | Path, *, revision: str | None = None, deep: bool = False, against: str | Path | None = None
) -> Diagnosis:
    """Find out what is wrong with a checkpoint that should hold a head.

    Headers, index and config.json are read, and samples of the head's copies of the model's matrices. Nothing is changed.

    Args:
        source: checkpoint directory, hub-cache tree, or repository id; on the Hub, all headers are read.
        revision: branch, tag or commit of a repository; its main branch where not given.
        deep: read every tensor of the head, and compare its copies whole.
        against: the checkpoint that the head was trained from; both heads are read and compared.

    Raises:
        SourceNotFoundError: there is no checkpoint at `source` or `against`.
        HubReadError: the Hub can't be reached, or does not give what was asked for.
        CheckpointError: `against` can't be read as a checkpoint; what is wrong with `source` is reported.
    """
    if (Path(source).expanduser() / UPDATE / JOURNAL).exists():
        facts = {"journal": f"{UPDATE}/{JOURNAL}"}
        return Diagnosis(str(source), (Finding("MZ014", facts, f"mtp-zoo rollback {shlex.quote(str(source))}"),))
    with collector_paused():  # from the first header to the last check of it
        try:
            subject = Subject(CheckpointIndex.open(source, revision=revision), deep)
        except (BrokenCheckpointError, ModelConfigError, UnsafeCheckpointError) as error:
            return Diagnosis(str(source), (_unopened(source, revision, error),))
        found = [finding for check in BY_HEADERS for finding in check(subject)]
    found += check_numbers(subject) if deep else ()
    found += () if against is None else check_against(subject, against)
    once = {str(finding): finding for finding in found}  # one bad field of config.json stops several checks
    return Diagnosis(str(source), tuple(sorted(once.values(), key=lambda finding: finding.id)))


def _unopened(
    source: str | Path, revision: str | None, error: BrokenCheckpointError | ModelConfigError | UnsafeCheckpointError
) -> Finding:
    """The finding for what stops everything else."""
    problems = [str(problem) for problem in error.problems]
    facts = {"reason": error.message, **({"problems": problems} if problems else {})}
    if isinstance(error, UnsafeCheckpointError):
        return Finding("MZ013", facts, error.remedy)
    if isinstance(error, ModelConfigError):
        return Finding("MZ101", facts, error.remedy)
    try:
        read_index(locate(source, revision).root)
    except BrokenCheckpointError:
        return Finding("MZ001", facts, f"mtp-zoo doctor {shlex.quote(str(source))} --fix")
    return Finding("MZ003", facts, error.remedy)
