"""Copies of the target's embedding and lm_head inside a head: compared on load, left to the base by export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mtp_zoo as mz
from mtp_zoo import copies
from mtp_zoo.copies import Comparison
from mtp_zoo.errors import HeadNotFoundError
from mtp_zoo.inspection import inspect
from mtp_zoo.loader import load_head
from mtp_zoo.registry import get_family
from tests.exporting import same, stored, train
from tests.stored_forms import IN_STACK, Form, Tensors, copies_of, copy_rules, make, plain_form, write
from tests.tiny import write_checkpoint

EMBEDDING, LM_HEAD = "model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"
NBYTES = 512 * 64 * 2


def copied(family: str = "glm4_moe_lite", **form: Any) -> tuple[dict[str, Any], Tensors]:
    return make(Form(family, "one_by_one", copies=True, **form))


def compared(folder: Path, config: dict[str, Any], tensors: Tensors) -> dict[str, Comparison]:
    return dict(load_head(write_checkpoint(folder, config, tensors)).report.copies)


def at_end(tensors: Tensors, name: str) -> Tensors:
    """The tensor's last entry changed."""
    changed = tensors[name].clone()
    changed[-1, -1] += 1
    return {**tensors, name: changed}


# Load: skipped, said so, compared


def test_every_family_in_the_stack_knows_both_copies() -> None:
    for family in IN_STACK:
        assert {rule.copy_of for rule in copy_rules(get_family(family))} == {"embedding", "lm_head"}


@pytest.mark.parametrize("family", IN_STACK)
def test_copies_are_not_read_into_the_head_and_the_report_says_that_they_equal(family: str, tmp_path: Path) -> None:
    """https://github.com/ggml-org/llama.cpp/pull/16359"""
    head = load_head(write_checkpoint(tmp_path, *copied(family)))
    assert dict(head.report.skipped) == {
        EMBEDDING: "engines use the target's embedding",
        LM_HEAD: "engines use the target's lm_head",
    }
    assert dict(head.report.copies) == {
        EMBEDDING: Comparison("model.embed_tokens.weight", True, NBYTES, NBYTES),
        LM_HEAD: Comparison("lm_head.weight", True, NBYTES, NBYTES),
    }
    assert not {EMBEDDING, LM_HEAD} & {tensor.name for tensor in head.report.tensors}
    assert "skipped: engines use the target's lm_head; equals 'lm_head.weight'" in str(head.report)


@pytest.mark.parametrize("family", IN_STACK)
def test_a_head_without_copies_has_nothing_to_compare(family: str, tmp_path: Path) -> None:
    report = load_head(write(tmp_path, plain_form(family))).report
    assert (dict(report.skipped), dict(report.copies)) == ({}, {})


@pytest.mark.parametrize("name", [EMBEDDING, LM_HEAD])
def test_one_copy_may_be_there_alone(name: str, tmp_path: Path) -> None:
    config, tensors = copied()
    (other,) = {EMBEDDING, LM_HEAD} - {name}
    del tensors[other]
    found = compared(tmp_path, config, tensors)
    assert [(n, c.equal) for n, c in found.items()] == [(name, True)]


@pytest.mark.parametrize("name", [EMBEDDING, LM_HEAD])
def test_a_copy_that_differs_in_one_entry_is_named(name: str, tmp_path: Path) -> None:
    config, tensors = copied()
    head = load_head(write_checkpoint(tmp_path, config, at_end(tensors, name)))
    assert {n: c.equal for n, c in head.report.copies.items()} == {n: n != name for n in (EMBEDDING, LM_HEAD)}
    original = "model.embed_tokens.weight" if name == EMBEDDING else "lm_head.weight"
    assert f"; DIFFERS from '{original}'" in str(head.report)


@pytest.mark.parametrize(
    "change", [lambda value: value.float(), lambda value: value[:-1].clone()], ids=["dtype", "shape"]
)
def test_a_copy_of_another_dtype_or_shape_differs_without_being_read(change: Any, tmp_path: Path) -> None:
    config, tensors = copied()
    tensors[EMBEDDING] = change(tensors[EMBEDDING])
    found = compared(tmp_path, config, tensors)[EMBEDDING]
    assert (found.of, found.equal, found.compared) == ("model.embed_tokens.weight", False, 0)


def test_a_tied_targets_lm_head_is_its_embedding(tmp_path: Path) -> None:
    found = compared(tmp_path, *copied(tied=True))
    assert {n: (c.of, c.equal) for n, c in found.items()} == {
        EMBEDDING: ("model.embed_tokens.weight", True),
        LM_HEAD: ("model.embed_tokens.weight", True),
    }


def test_a_directory_with_the_head_alone_has_nothing_to_compare_with(tmp_path: Path) -> None:
    config, tensors = copied()
    alone = {name: value for name, value in tensors.items() if name.startswith("model.layers.2.")}
    head = load_head(write_checkpoint(tmp_path, config, alone))
    assert {c.of for c in head.report.copies.values()} == {None}
    assert "there is nothing here to compare it with" in str(head.report)


# Large copies: a sample


@pytest.fixture
def small_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "SAMPLE", 1024)


@pytest.mark.usefixtures("small_sample")
def test_of_a_large_copy_a_sample_is_compared_and_the_report_says_how_much(tmp_path: Path) -> None:
    config, tensors = copied()
    head = load_head(write_checkpoint(tmp_path, config, tensors))
    assert {(c.equal, c.compared, c.total) for c in head.report.copies.values()} == {(True, 1024, NBYTES)}
    assert f"in the 1,024 of {NBYTES:,} bytes compared" in str(head.report)


@pytest.mark.usefixtures("small_sample")
def test_a_load_does_not_pay_for_large_copies(tmp_path: Path) -> None:
    config, tensors = copied()
    with_copies = load_head(write_checkpoint(tmp_path / "with", config, tensors)).report
    plain = {name: value for name, value in tensors.items() if name not in (EMBEDDING, LM_HEAD)}
    without = load_head(write_checkpoint(tmp_path / "without", config, plain)).report
    headers = sum(len(f'"{name}":') + 100 for name in (EMBEDDING, LM_HEAD))
    assert with_copies.head_bytes == without.head_bytes
    assert 0 < with_copies.bytes_read - without.bytes_read <= 4 * 1024 + headers


@pytest.mark.usefixtures("small_sample")
@pytest.mark.parametrize("row", [0, 511])
def test_a_sample_reaches_both_ends(row: int, tmp_path: Path) -> None:
    config, tensors = copied()
    tensors[EMBEDDING][row] += 1
    assert not compared(tmp_path, config, tensors)[EMBEDDING].equal


@pytest.mark.usefixtures("small_sample")
def test_inspect_compares_every_byte_on_request(tmp_path: Path) -> None:
    """A difference between the parts of a sample: a load does not see it and does not claim to."""
    config, tensors = copied()
    tensors[EMBEDDING][10] += 1
    base = write_checkpoint(tmp_path, config, tensors)
    assert load_head(base).report.copies[EMBEDDING].equal
    found = inspect(base, copies=True)
    assert (found.copies[EMBEDDING].equal, found.copies[LM_HEAD].equal) == (False, True)
    assert found.copies[LM_HEAD].compared == NBYTES
    assert f"copy {EMBEDDING}: DIFFERS from 'model.embed_tokens.weight'" in str(found)
    assert inspect(base).copies == {}


# Export: the base's copies, or none


@pytest.mark.parametrize("on_base", [False, True])
@pytest.mark.parametrize("on_origin", [False, True])
@pytest.mark.parametrize("family", IN_STACK)
def test_the_base_alone_decides_whether_there_are_copies(
    family: str, on_origin: bool, on_base: bool, tmp_path: Path
) -> None:
    """And they stay what they were, also where they differ from the target's and the head was trained."""
    origin = write(tmp_path / "origin", Form(family, "one_by_one", copies=on_origin))
    config, tensors = make(Form(family, "one_by_one", copies=on_base))
    if on_base:
        tensors = at_end(tensors, LM_HEAD)
    base = write_checkpoint(tmp_path / "base", config, tensors, shards=3)
    mz.export(train(load_head(origin)), base=base, out=tmp_path / "out")
    out = stored(tmp_path / "out")
    assert out.keys() == tensors.keys()
    assert {EMBEDDING, LM_HEAD} <= out.keys() if on_base else not {EMBEDDING, LM_HEAD} & out.keys()
    assert same(out, tensors, copies_of(family, tensors) if on_base else ())
    assert not same(out, tensors, ["model.layers.2.eh_proj.weight"])


def test_copies_do_not_count_as_a_head(tmp_path: Path) -> None:
    """A trainer that dropped the head and kept the copies leaves no head behind."""
    config, tensors = copied("deepseek_v3")
    gone = [n for n in tensors if n.startswith("model.layers.2.") and n not in (EMBEDDING, LM_HEAD)]
    kept = {name: value for name, value in tensors.items() if name not in gone}
    with pytest.raises(HeadNotFoundError):
        load_head(write_checkpoint(tmp_path, config, kept))


def test_a_new_head_leaves_the_copies_alone(tmp_path: Path) -> None:
    config, tensors = copied("glm_moe_dsa")
    base = write_checkpoint(tmp_path / "base", config, tensors)
    head = load_head(base, init="random")
    assert not torch.equal(head.weights()["depths.0.eh_proj.weight"], tensors["model.layers.2.eh_proj.weight"].float())
    mz.export(head, base=base, out=tmp_path / "out")
    assert same(stored(tmp_path / "out"), tensors, [EMBEDDING, LM_HEAD])
