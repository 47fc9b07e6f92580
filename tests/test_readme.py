"""The README's example is run as it stands, in an empty directory beside the shipped checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
EXAMPLE = re.compile(r"```python\n(.*?)```", re.DOTALL)
CHECKPOINT = "mtp_zoo/demo/assets/tiny-qwen3_5"


def test_the_example_trains_and_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = EXAMPLE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert CHECKPOINT in code
    (tmp_path / "mtp_zoo").symlink_to(ROOT / "mtp_zoo")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert "mtp.fc.weight" in capsys.readouterr().out
    before = load_file(ROOT / CHECKPOINT / "model.safetensors")
    after: dict[str, object] = {}
    for file in (tmp_path / "trained").glob("*.safetensors"):
        after |= load_file(file)
    assert after.keys() == before.keys()
    changed = {name for name, tensor in before.items() if not tensor.equal(after[name])}
    assert changed
    assert all(name.startswith("mtp.") for name in changed)


def test_the_example_is_short() -> None:
    (code,) = EXAMPLE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len([line for line in code.splitlines() if line.strip()]) <= 22
