"""The pytest entry, as another project runs it: from elsewhere, with a plugin of its own."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.children import run_forked

PLUGIN = """
import dataclasses
from mtp_zoo.families.qwen3_5 import FAMILY
from mtp_zoo.registry import register
from mtp_zoo_conformance.cases import get_case, register_case

register(dataclasses.replace(FAMILY, name="without_case", model_types=("without_case",)))
register(dataclasses.replace(FAMILY, name="mine", model_types=("mine",)))
case = get_case("qwen3_5")
register_case(dataclasses.replace(case, family="mine", variants=case.variants[:1], inventories=()))
"""


def _pytest(folder: str, words: list[str]) -> None:
    """What `python -m pytest words` does in the folder."""
    os.chdir(folder)
    os.environ["MTP_ZOO_CACHE"] = f"{folder}/cache"
    sys.path.insert(0, folder)
    sys.exit(pytest.main(words))


@pytest.mark.slow
def test_a_project_judges_its_own_family(tmp_path: Path) -> None:
    (tmp_path / "my_family.py").write_text(PLUGIN, encoding="utf-8")
    words = ["-p", "my_family", "-m", "keys or module", "-k", "mine or without_case", "-rfs", "-p", "no:cacheprovider"]
    done = run_forked(tmp_path, _pytest, str(tmp_path), ["--pyargs", "mtp_zoo_conformance", *words])
    assert done.status == 1, done.stdout + done.stderr
    assert "1 failed, 2 passed, 4 skipped" in done.stdout
    failed = re.findall(r"^FAILED (.*)", done.stdout, re.MULTILINE)
    assert len(failed) == 1
    assert "test_a_registered_family_has_a_case[without_case]" in failed[0]
    assert "no environment: `mtp-zoo conform --install vllm` makes one" in done.stdout
