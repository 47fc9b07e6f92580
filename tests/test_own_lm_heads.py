"""Heads whose depths have an lm_head of their own: loaded, trained, drafted with and exported as any other tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.nn import functional as F

import mtp_zoo as mz
from mtp_zoo import registry
from mtp_zoo.acceptance import replay, speculate
from mtp_zoo.errors import FamilyDefinitionError, HeadMismatchError
from mtp_zoo.head import DraftHead
from mtp_zoo.registry import Family, get_family, register
from mtp_zoo.rules import Rename, Skip
from tests.attaching import ids, load_model
from tests.heads import HIDDEN, VOCAB
from tests.tiny import tiny_config, tiny_tensors, write_checkpoint

NATIVE = "mtp.layers.{d}.shared_head.weight"
CANONICAL = "depths.{d}.lm_head.weight"
ONE_SUM = 1e-5
"""Relative: one sum over slots in another order, FP32."""


def kept(**changes: Any) -> Family:
    """Qwen3.5's family, with an lm_head in every depth."""
    base = get_family("qwen3_5")
    spec = dataclasses.replace(base.spec, private_head="kept")
    rules = (*base.rules, Rename(NATIVE, CANONICAL))
    return dataclasses.replace(
        base, **{"name": "own_head", "model_types": ("own_head",), "spec": spec, "rules": rules, **changes}
    )


@pytest.fixture
def family() -> Iterator[Family]:
    yield register(kept())
    registry._FAMILIES.pop("own_head")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoint of two depths, untied."""
    config = tiny_config(dtype="float32", tied=False, depths=2)
    tensors = {name: value.float() for name, value in tiny_tensors(config, head_depths=2).items()}
    generator = torch.Generator().manual_seed(6)
    tensors |= {NATIVE.format(d=d): torch.randn(VOCAB, HIDDEN, generator=generator) for d in range(2)}
    return write_checkpoint(tmp_path / "base", config, tensors)


def stored(root: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in root.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def test_every_depth_loads_its_own_and_exports_it_bit_by_bit(family: Family, root: Path, tmp_path: Path) -> None:
    head = mz.load_head(root, family=family)
    base = stored(root)
    for d in range(2):
        assert torch.equal(head.weights()[CANONICAL.format(d=d)], base[NATIVE.format(d=d)])
    assert head.report.skipped == {}
    with torch.no_grad():
        head.depths[1].lm_head.weight.mul_(1.5)
    out = stored(Path(mz.export(head, root, tmp_path / "out").out))
    assert out.keys() == base.keys()
    assert torch.equal(out.pop(NATIVE.format(d=1)), base.pop(NATIVE.format(d=1)) * 1.5)
    assert [name for name, value in base.items() if not torch.equal(value, out[name])] == []


def test_one_that_is_missing_or_of_another_shape_is_named(family: Family, root: Path, tmp_path: Path) -> None:
    tensors = stored(root)
    config = tiny_config(dtype="float32", tied=False, depths=2)
    lost = {name: value for name, value in tensors.items() if name != NATIVE.format(d=1)}
    with pytest.raises(HeadMismatchError, match=r"mtp\.layers\.1\.shared_head\.weight"):
        mz.load_head(write_checkpoint(tmp_path / "lost", config, lost), family=family)
    cut = tensors | {NATIVE.format(d=0): tensors[NATIVE.format(d=0)][:100]}
    with pytest.raises(HeadMismatchError, match=r"mtp\.layers\.0\.shared_head\.weight"):
        mz.load_head(write_checkpoint(tmp_path / "cut", config, cut), family=family)


def attached(root: Path, family: Family) -> tuple[Any, DraftHead]:
    target = load_model(root).eval()
    return target, mz.load_head(root, family=family, target=target)


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_the_loss_reads_each_depth_s_own_and_the_target_s_distribution(
    family: Family, root: Path, loss: str, chunk_size: int | None
) -> None:
    """Against the same loss written with torch alone, three depths over two stored ones; gradients too."""
    target, head = attached(root, family)
    tokens = mz.TokenBatch.all_tokens(ids(2, 9))
    hidden = mz.target_states(target, tokens, head.spec)
    objective = mz.MTPObjective(head, depths=3, loss=loss, weights=[0.5, 0.3, 0.2], chunk_size=chunk_size)
    objective(tokens, hidden).loss.backward()
    assert target.lm_head.weight.grad is None
    found = {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}
    total = torch.zeros(())
    head.zero_grad()
    for k, (state, weight) in enumerate(zip(head(tokens, hidden, depths=3), (0.5, 0.3, 0.2), strict=True), start=1):
        logits = F.linear(state.normed, head.depths[(k - 1) % 2].lm_head.weight)[:, : -k - 1]
        if loss == "ce":
            each = F.cross_entropy(logits.flatten(0, 1), tokens.input_ids[:, k + 1 :].flatten())
        else:
            teacher = target.lm_head(hidden[:, k:-1]).log_softmax(-1).detach()
            each = (teacher.exp() * (teacher - logits.log_softmax(-1))).sum(-1).mean()
        total = total + weight * each
    total.backward()
    assert objective(tokens, hidden).loss.item() == pytest.approx(total.item(), rel=ONE_SUM)
    expected = {name: p.grad for name, p in head.named_parameters() if p.grad is not None}
    assert CANONICAL.format(d=1) in expected
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= ONE_SUM * value.abs().max() + 1e-8, name


def test_they_are_a_group_of_their_own(family: Family, root: Path) -> None:
    head = mz.load_head(root, family=family, trainable=["lm_head"])
    trained = {name for name, parameter in head.named_parameters() if parameter.requires_grad}
    assert trained == {CANONICAL.format(d=d) for d in range(2)}


@pytest.mark.parametrize("batch_size", [1, 3])
def test_drafts_are_chosen_with_them(family: Family, root: Path, batch_size: int) -> None:
    target, head = attached(root, family)
    with torch.no_grad():
        target.lm_head.weight[1:] = 0  # two tokens: a random draft is right about every second time
        for depth in head.depths:
            depth.lm_head.weight[2:] = 0
    asked = [row.tolist()[: 2 + number] for number, row in enumerate(ids(3, 6))]
    expected = replay(target, head, asked, k=3, max_new_tokens=12)
    found = speculate(target, head, asked, k=3, max_new_tokens=12, batch_size=batch_size)
    assert [prompt.accepted for prompt in found.prompts] == [prompt.accepted for prompt in expected.prompts]
    with torch.no_grad():
        head.depths[1].lm_head.weight.neg_()
    assert replay(target, head, asked, k=3, max_new_tokens=12) != expected


def test_a_copy_and_a_random_head_have_them_too(family: Family, root: Path) -> None:
    head = mz.load_head(root, family=family, init="random", depths=2)
    assert head.depths[1].lm_head.weight.shape == (VOCAB, HIDDEN)
    plain = mz.gather_head(head)
    assert plain is not None
    assert torch.equal(plain.depths[1].lm_head.weight, head.depths[1].lm_head.weight)


COPY = Skip("mtp.copy.weight", "a copy", copy_of="lm_head")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rules": get_family("qwen3_5").rules}, "lm_head: the spec says 'kept', no rule fills the head's own"),
        ({"spec": get_family("qwen3_5").spec}, "lm_head: the spec says 'absent', a rule fills the head's own"),
        ({"rules": (*kept().rules, COPY)}, "lm_head: the spec says 'kept', a rule skips a copy of it"),
        (
            {"spec": dataclasses.replace(kept().spec, private_embedding="kept")},
            "embedding: the spec says 'kept'; heads here embed with their target's embedding only",
        ),
    ],
)
def test_a_family_whose_spec_and_rules_disagree_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(FamilyDefinitionError) as caught:
        register(kept(**changes))
    assert problem in str(caught.value)
    assert "own_head" not in registry._FAMILIES
