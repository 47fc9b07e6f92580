"""doctor of a repository: the same findings, from headers alone; nothing is mended there."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtp_zoo.diagnosis.examination import doctor
from mtp_zoo.diagnosis.fix import mend
from mtp_zoo.errors import ExportError
from tests.diagnosis.cases import CASES
from tests.hub.loopback import LoopbackHub, hub  # noqa: F401
from tests.tiny import tiny_config, tiny_tensors, write_checkpoint

CASES_THERE = ("MZ004", "MZ005", "MZ006", "MZ008", "MZ102", "MZ201", "MZ207", "MZ304")


@pytest.mark.parametrize("name", CASES_THERE)
def test_findings_are_those_of_the_directory(name: str, tmp_path: Path, hub: LoopbackHub) -> None:  # noqa: F811
    root = CASES[name].broken(tmp_path / "model")
    hub.publish("acme/tiny", hub.files_of(root))
    here, there = doctor(root), doctor("acme/tiny")
    assert [(f.id, f.facts) for f in there.findings] == [(f.id, f.facts) for f in here.findings]
    with pytest.raises(ExportError, match="no directory"):
        mend(there)


def test_numbers_are_read_only_where_that_is_asked_for(tmp_path: Path, hub: LoopbackHub) -> None:  # noqa: F811
    config = tiny_config(hidden=256, vocab=4096, num_attention_heads=8)
    values = tiny_tensors(config)
    head = {name: value for name, value in values.items() if name.startswith("mtp.")}
    size = sum(value.nbytes for value in head.values())
    root = write_checkpoint(tmp_path / "model", config, values, shards=2)
    hub.publish("acme/wide", hub.files_of(root))
    assert doctor("acme/wide").findings == ()
    by_headers = hub.sent("cdn")
    assert by_headers < size / 4
    assert [finding.id for finding in doctor("acme/wide", deep=True, against=root).findings] == ["MZ404"]
    assert size <= hub.sent("cdn") - by_headers <= 1.02 * size
