"""Write the list of findings into docs/doctor.md: each with what `mtp-zoo doctor` prints of a tiny checkpoint that has it.

python scripts/make_doctor_docs.py           # rewrite the page
python scripts/make_doctor_docs.py --check   # change nothing; 1 where the page is stale

The checkpoints are those of the tests (tests/diagnosis/cases.py).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from mtp_zoo.diagnosis.examination import doctor  # noqa: E402
from mtp_zoo.diagnosis.finding import CATALOGUE, Finding  # noqa: E402
from tests.diagnosis.cases import CASES  # noqa: E402

START = "<!-- findings: written by scripts/make_doctor_docs.py -->\n"
END = "<!-- end of findings -->\n"


def main() -> int:
    """Rewrite the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "doctor.md", help="the page")
    arguments = parser.parse_args()
    old = arguments.page.read_text(encoding="utf-8")
    before, _, rest = old.partition(START)
    _, _, behind = rest.partition(END)
    new = f"{before}{START}{''.join(map(section, CATALOGUE))}{END}{behind}"
    if arguments.check:
        if old != new:
            print(f"{arguments.page} is stale: run `python scripts/make_doctor_docs.py`.", file=sys.stderr)
        return int(old != new)
    arguments.page.write_text(new, encoding="utf-8")
    return 0


def section(name: str) -> str:
    """One finding: what it means, what mends it, and how it looks."""
    kind, case = CATALOGUE[name], CASES[name]
    (shown,) = [finding for finding in example(name) if finding.id == name]
    notes = [f"**{kind.severity.capitalize()}.** {kind.because}"]
    notes += ["`--fix` mends it."] if case.fixed else []
    notes += ["Found with `--deep`."] if case.deep else []
    notes += ["Found with `--against`."] if case.base else []
    return f"\n### {name}: {kind.title}\n\n{' '.join(notes)}\n\n```text\n{shown}\n```\n"


def example(name: str) -> Iterator[Finding]:
    """The findings of the checkpoint that has this one, as of a directory called `model`."""
    case, here = CASES[name], Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            if case.base:
                case.base(Path("base"))
            case.broken(Path("model"))
            yield from doctor("model", deep=case.deep, against="base" if case.base else None).findings
        finally:
            os.chdir(here)


if __name__ == "__main__":
    sys.exit(main())
