"""The pytest entry, as another project runs it: from elsewhere, with a plugin of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_a_project_judges_its_own_family(tmp_path: Path) -> None:
    (tmp_path / "my_family.py").write_text(PLUGIN, encoding="utf-8")
    words = ["-p", "my_family", "-m", "keys or module", "-k", "mine or without_case", "-rfs", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--pyargs", "mtp_zoo_conformance", *words],
        cwd=tmp_path,
        env={**os.environ, "MTP_ZOO_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 2 passed, 4 skipped" in done.stdout
    failed = re.findall(r"^FAILED (.*)", done.stdout, re.MULTILINE)
    assert len(failed) == 1
    assert "test_a_registered_family_has_a_case[without_case]" in failed[0]
    assert "no environment: `mtp-zoo conform --install vllm` makes one" in done.stdout
