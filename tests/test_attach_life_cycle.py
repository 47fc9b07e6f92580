"""A joint model is copied, pickled, refused and detached without a trace."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

import mtp_zoo as mz
from mtp_zoo.errors import AttachError, MTPZooError
from tests.attaching import ids, joint, load_model, make_checkpoint, weights

pytestmark = [  # PEFT calls methods of transformers by names that will go, and warns of tied embeddings
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore:.*a tied layer is part of the adapter:UserWarning"),
]

TOKENS = ids(2, 12)
RATE = 1e-5
"""A learning rate whose steps BF16 does not resolve in most entries."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("life") / "base")


def adapted(root: Path) -> Any:
    return get_peft_model(load_model(root), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def traces(model: Any) -> dict[str, Any]:
    """Everything that attach may change, in a form that compares."""
    return {
        "modules": [(name, type(module)) for name, module in model.named_modules()],
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "hooks": {
            name: {
                field: list(hooks.values())
                for field, hooks in vars(module).items()
                if field.endswith("hooks") and hooks
            }
            for name, module in model.named_modules()
        },
        "state": [(name, value.numpy().tobytes()) for name, value in model.state_dict().items()],
        "training": [(name, parameter.requires_grad) for name, parameter in model.named_parameters()],
        "epsilons": [getattr(module, "variance_epsilon", None) for module in model.modules()],
        "config": model.config.to_dict(),
    }


def loss_of(model: Any) -> Tensor:
    return model(input_ids=TOKENS, labels=TOKENS).loss.detach()


def pickled(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("again", [pickled, copy.deepcopy], ids=["pickle", "deepcopy"])
@pytest.mark.parametrize("make", [joint, lambda root: mz.attach(adapted(root))], ids=["plain", "peft"])
def test_a_copy_of_a_joint_model_is_a_joint_model_of_its_own(
    again: Callable[[Any], Any], make: Callable[[Path], Any], root: Path
) -> None:
    model = make(root)
    loss = loss_of(model)
    other = again(model)
    assert type(other) is type(model)
    assert torch.equal(loss_of(other), loss)
    base, copied = (getattr(each, "get_base_model", lambda each=each: each)() for each in (model, other))
    assert copied.mtp.model is copied
    assert copied.mtp.objective.head is copied.mtp_head
    assert copied.mtp_head.target is copied
    assert base.mtp_head.target is base
    other(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert torch.equal(loss_of(model), loss)
    assert not torch.equal(loss_of(other), loss)


@pytest.mark.parametrize("mode", ["joint", "mtp_only"])
@pytest.mark.parametrize("make", [load_model, adapted], ids=["plain", "peft"])
def test_detach_leaves_no_trace_of_attach(make: Callable[[Path], Any], mode: Any, root: Path) -> None:
    model = make(root)
    before = traces(model)
    mz.attach(model, mode=mode)
    loss_of(model)
    attached = model.get_base_model().mtp_head if make is adapted else model.mtp_head
    head = mz.detach(model)
    assert head is attached
    assert traces(model) == before
    mz.attach(model, head)
    loss_of(model)


def test_a_wrapped_forward_stays_after_detach(root: Path) -> None:
    model = joint(root)
    calls: list[int] = []
    inner = model.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return inner(*args, **kwargs)

    model.forward = counted
    mz.detach(model)
    assert not hasattr(model(input_ids=TOKENS, labels=TOKENS), "mtp_loss")
    assert calls == [1]


def test_a_detached_model_steps_without_a_word_of_its_head(root: Path) -> None:
    model = joint(root)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    mz.detach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):  # HeadGradientWarning would be an error
        optimizer.step()


def test_detaching_what_has_no_head_is_refused(root: Path) -> None:
    with pytest.raises(AttachError, match="has none"):
        mz.detach(load_model(root))


FAILING: dict[str, dict[str, Any]] = {
    "mode": {"mode": "typo"},
    "loss": {"loss": "nonsense"},
    "loss of a given head": {"head": "given", "loss": "nonsense"},
    "depths": {"depths": 0},
    "option": {"reduction": "micro_batch"},
    "detach": {"detach": ["layers"]},
    "place": {"head": "/nowhere"},
    "dtype": {"head_dtype": torch.int8},
    "dtype of a given head": {"head": "given", "head_dtype": torch.float32},
}


@pytest.mark.parametrize("options", FAILING.values(), ids=FAILING)
def test_an_attach_that_fails_changes_nothing(options: dict[str, Any], root: Path) -> None:
    model = load_model(root)
    head = mz.load_head(root)
    before = traces(model)
    with pytest.raises(MTPZooError):
        mz.attach(model, **{**options, **({"head": head} if options.get("head") == "given" else {})})
    assert traces(model) == before
    assert head.target is None
    mz.attach(model, head)
    loss_of(model)


def test_a_wrong_lambda_in_the_config_changes_nothing(root: Path) -> None:
    model = load_model(root)
    model.config.mtp_loss_weight = -1.0
    before = traces(model)
    with pytest.raises(MTPZooError):
        mz.attach(model)
    assert traces(model) == before


def test_a_head_is_attached_to_one_model(root: Path) -> None:
    first, second = joint(root), load_model(root)
    with pytest.raises(AttachError, match=r"attached to another[\s\S]*mz.detach"):
        mz.attach(second, first.mtp_head)
    assert first.mtp_head.target is first
    mz.attach(second, mz.detach(first))
    loss_of(second)


def test_a_frozen_joint_model_is_evaluated(root: Path) -> None:
    model = joint(root)
    expected = loss_of(model.eval())
    model.requires_grad_(False)
    assert torch.equal(loss_of(model), expected)
    with torch.no_grad():
        assert torch.equal(loss_of(model.train()), expected)
    with pytest.raises(AttachError, match="none of its parameters"):
        loss_of(model.train())


def test_small_steps_move_every_entry_of_a_head_that_attach_loads(tmp_path: Path) -> None:
    root = make_checkpoint(tmp_path / "base", dtype=torch.bfloat16)
    model = joint(root)
    optimizer = torch.optim.AdamW(model.mtp_head.parameters(), lr=RATE, weight_decay=0.0)
    before = weights(model.mtp_head)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    graded = {name: parameter.grad != 0 for name, parameter in model.mtp_head.named_parameters()}
    moved = {name: value != before[name] for name, value in weights(model.mtp_head).items()}
    assert all(torch.equal(moved[name], graded[name]) for name in moved)


@pytest.mark.parametrize("asked", [None, torch.float32, torch.bfloat16])
def test_master_weights_are_saved_in_the_trunks_dtype_unless_asked(asked: torch.dtype | None, tmp_path: Path) -> None:
    model = joint(make_checkpoint(tmp_path / "base", dtype=torch.bfloat16), head_dtype=asked)
    assert model.mtp_head.depths[0].eh_proj.weight.dtype == (asked or torch.float32)
    with torch.no_grad():
        model.mtp_head.depths[0].eh_proj.weight.mul_(1.001)
    model.save_pretrained(tmp_path / "out")
    saved = mz.load_head(tmp_path / "out")
    written = torch.float32 if asked == torch.float32 else torch.bfloat16
    assert saved.origin.dtypes["depths.0.eh_proj.weight"] == {torch.float32: "F32", torch.bfloat16: "BF16"}[written]
    masters = {name: value.to(written) for name, value in model.mtp_head.state_dict().items()}
    assert all(torch.equal(value, masters[name]) for name, value in saved.state_dict().items())


def test_a_loaded_head_lives_on_the_models_device(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    load = mz.attacher.load_head
    monkeypatch.setattr(mz.attacher, "load_head", lambda *a, **o: asked.append(o["device"]) or load(*a, **o))
    model = load_model(root)
    mz.attach(model)
    assert asked == [model.model.norm.weight.device]


@pytest.mark.parametrize(("options", "measured"), [({}, False), ({"agreement": True}, True), ({"loss": "kl"}, True)])
def test_agreement_is_measured_where_it_is_asked_for(options: dict[str, Any], measured: bool, root: Path) -> None:
    out = joint(root, **options)(input_ids=TOKENS, labels=TOKENS)
    assert ("mtp/match_1" in out.metrics) is measured
