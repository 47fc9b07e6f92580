"""Joint training: what the loss is, what gets a gradient, and what a model keeps of itself."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mtp_zoo as mz
from mtp_zoo.batch import IGNORED, TokenBatch
from mtp_zoo.errors import AttachError, NoMTPLossError, NotAttachedError, ObjectiveError
from mtp_zoo.loss_weight import configured_lambda
from mtp_zoo.objective import MTPObjective, step_counts
from mtp_zoo.targets import target_states
from tests.attaching import assert_same, gradients, ids, joint, load_model, make_checkpoint, twin
from tests.heads import tiny_head

LAMBDA = 0.25
CUTS = ("backbone", "embedding", "lm_head")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("joint") / "base")


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("joint") / "untied", tied=False)


def prompt_batch(rows: int = 2, length: int = 14, prompt: int = 4, seed: int = 0) -> dict[str, Tensor]:
    tokens = ids(rows, length, seed)
    return {"input_ids": tokens, "labels": torch.where(torch.arange(length) < prompt, IGNORED, tokens)}


# The loss


@pytest.mark.parametrize("depths", [1, 3])
def test_the_gradients_are_those_of_two_losses_computed_apart(root: Path, depths: int) -> None:
    model = joint(root, depths=depths, loss={"ce": 0.7, "kl": 0.3}, mtp_lambda=LAMBDA)
    alone, head = twin(model)
    batch = prompt_batch()
    out = model(**batch)
    out.loss.backward()
    tokens = TokenBatch.from_labels(batch["input_ids"], batch["labels"])
    hidden = target_states(alone, tokens, head.spec)
    mtp = MTPObjective(head, depths=depths, loss={"ce": 0.7, "kl": 0.3})(tokens, hidden).loss
    own = alone(**batch).loss
    own.backward()
    (LAMBDA * mtp).backward()
    torch.testing.assert_close(out.mtp_loss, mtp, atol=1e-5, rtol=0)
    torch.testing.assert_close(out.loss, own + LAMBDA * mtp, atol=1e-5, rtol=0)
    trunk = {name: grad for name, grad in gradients(model).items() if not name.startswith("mtp_head.")}
    assert_same(trunk, gradients(alone))
    assert_same(gradients(model.mtp_head), gradients(head))


@pytest.mark.parametrize("which", ["root", "untied"])
@pytest.mark.parametrize("cut", [(), *[(name,) for name in CUTS], CUTS[:2], CUTS[1:], CUTS[::2], CUTS])
def test_each_cut_closes_its_path_and_lambda_scales_nothing_else(
    which: str, cut: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    place: Path = request.getfixturevalue(which)
    batch = prompt_batch()

    def trunk_gradients(weight: float) -> dict[str, Tensor]:
        model = joint(place, detach=frozenset(cut), mtp_lambda=weight, depths=2)
        model(**batch).loss.backward()
        return {name: grad for name, grad in gradients(model).items() if not name.startswith("mtp_head.")}

    own, once, twice = (trunk_gradients(weight) for weight in (0.0, 1.0, 2.0))
    moved = {name for name in own if not torch.equal(own[name], once[name])}
    tied = which == "root"
    embedding = "backbone" not in cut or "embedding" not in cut or (tied and "lm_head" not in cut)
    expected = {"model.embed_tokens.weight"} if embedding else set()
    if not tied and "lm_head" not in cut:
        expected.add("lm_head.weight")
    if "backbone" not in cut:
        expected |= {name for name in own if name.startswith(("model.layers.", "model.norm."))}
    assert moved == expected
    # What the MTP loss adds is linear in lambda, and the model's own part is not scaled.
    assert_same(
        {name: twice[name] - own[name] for name in moved}, {name: 2 * (once[name] - own[name]) for name in moved}, 1e-3
    )


def test_lambda_is_the_given_one_then_the_configs_then_the_default(root: Path) -> None:
    assert joint(root).mtp.mtp_lambda == 0.2
    assert joint(root, mtp_lambda=0.05).mtp.mtp_lambda == 0.05
    model = load_model(root)
    model.config.mtp_loss_scaling_factor = 0.3
    assert configured_lambda(model.config.to_dict()) == 0.3
    assert mz.attach(model).mtp.mtp_lambda == 0.3
    assert "mtp_lambda=0.3" in repr(model.mtp)
    model.mtp.mode = "mtp_only"
    assert model.mtp.mtp_lambda == 1.0


# Accumulation


def uneven() -> list[dict[str, Tensor]]:
    return [prompt_batch(prompt=2), prompt_batch(prompt=11, seed=1), prompt_batch(prompt=14, seed=2)]


def whole(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def test_micro_batches_divided_by_the_items_of_the_step_equal_one_batch(root: Path) -> None:
    parts = uneven()
    items = int((whole(parts)["labels"][:, 1:] != IGNORED).sum())
    cut, one = joint(root, depths=2), joint(root, depths=2)
    for part in parts:
        cut(**part, num_items_in_batch=items).loss.backward()
    one(**whole(parts), num_items_in_batch=torch.tensor(items)).loss.backward()
    assert_same(gradients(cut), gradients(one))
    by_batch = joint(root, depths=2)
    for part in parts[:2]:
        (by_batch(**part).loss / 2).backward()
    largest = gradients(one)["mtp_head.depths.0.eh_proj.weight"]
    assert (gradients(by_batch)["mtp_head.depths.0.eh_proj.weight"] - largest).abs().max() > 0.01 * largest.abs().max()


def test_micro_batches_divided_by_the_slots_of_the_step_equal_one_batch(root: Path) -> None:
    parts = uneven()
    batches = [TokenBatch.from_labels(part["input_ids"], part["labels"]) for part in parts]
    counts = step_counts(batches, 2)
    cut, one = joint(root, depths=2), joint(root, depths=2)
    total = sum(cut(**part, mtp_counts=counts).mtp_loss for part in parts)
    total.backward()
    loss = one(**whole(parts)).mtp_loss
    loss.backward()
    torch.testing.assert_close(total, loss, atol=1e-5, rtol=0)
    assert_same(gradients(cut.mtp_head), gradients(one.mtp_head))


def test_items_divide_every_depth(root: Path) -> None:
    model = joint(root, depths=2, weights=(1.0, 1.0))
    out = model(**prompt_batch(), num_items_in_batch=20)
    stats = model.mtp.last.stats
    torch.testing.assert_close(out.mtp_loss.detach(), (stats.loss.sum() / 20).float(), atol=1e-5, rtol=0)


# Steps without labels


def test_without_labels_a_call_of_evaluation_is_the_models_own(root: Path) -> None:
    model, plain = joint(root).eval(), load_model(root).eval()
    tokens = ids(2, 9)
    out = model(input_ids=tokens)
    assert set(out.keys()) == set(plain(input_ids=tokens).keys())
    assert model.mtp.last is None
    assert model.mtp.metrics == {}


def test_a_training_call_without_labels_is_refused_unless_the_head_is_paused(root: Path) -> None:
    model, plain = joint(root), load_model(root)
    tokens = ids(2, 9)
    with pytest.raises(NoMTPLossError, match="neither"):
        model(input_ids=tokens)
    with torch.no_grad():
        assert "mtp_loss" not in model(input_ids=tokens)
    with model.mtp.paused():
        alone = model(input_ids=tokens)
        labelled = model(input_ids=tokens, labels=tokens)
    assert torch.equal(alone.logits, plain(input_ids=tokens).logits)
    assert "mtp_loss" not in labelled
    assert model(input_ids=tokens, labels=tokens).mtp_loss > 0


def test_a_mask_takes_the_place_of_labels(root: Path) -> None:
    """As in reinforcement learning, where the loss is the caller's."""
    model, labelled = joint(root), joint(root)
    batch = prompt_batch()
    out = model(input_ids=batch["input_ids"], mtp_mask=batch["labels"] != IGNORED)
    expected = labelled(**batch)
    assert torch.equal(out.mtp_loss, expected.mtp_loss)
    assert torch.equal(out.loss, model.mtp.mtp_lambda * out.mtp_loss)
    out.loss.backward()
    assert all(name.startswith("mtp_head.") for name in gradients(model))


@pytest.mark.parametrize("training", [True, False])
def test_generation_is_untouched(root: Path, training: bool) -> None:
    plain, model = load_model(root).train(training), joint(root).train(training)
    prompt = ids(2, 6)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(prompt, **options), plain.generate(prompt, **options))


# The output


def test_training_outputs_hold_the_mtp_loss_as_fields_and_evaluation_as_attributes(root: Path) -> None:
    model, plain = joint(root), load_model(root)
    batch = prompt_batch()
    own = plain(**batch)
    out = model(**batch)
    assert isinstance(out, type(own))
    assert type(out).__name__ == type(own).__name__
    assert set(out.keys()) == set(own.keys()) | {"mtp_loss", "metrics"}
    rebuilt = type(out)(dict(out.items()))
    assert torch.equal(rebuilt.mtp_loss, out.mtp_loss)
    out = model.eval()(**batch)
    assert set(out.keys()) == set(own.keys())
    assert torch.equal(out.logits, plain.eval()(**batch).logits)
    assert out.mtp_loss > 0
    assert out.metrics["mtp/slots_1"] == 2 * 10


def test_metrics_are_those_of_the_sums_and_wait_for_nothing(root: Path) -> None:
    model = joint(root, depths=2)
    out = model(**prompt_batch())
    assert all(isinstance(value, Tensor) and value.ndim == 0 for value in out.metrics.values())
    found = {name: float(value) for name, value in out.metrics.items()}
    assert found == pytest.approx(model.mtp.last.stats.metrics(), rel=1e-6)
    assert model.mtp.metrics == model.mtp.last.stats.metrics()


def test_a_tuple_is_a_tuple(root: Path) -> None:
    model = joint(root)
    batch = prompt_batch()
    found, expected = model(**batch, return_dict=False), model(**batch)
    assert torch.equal(found[0], expected.loss)
    assert torch.equal(found[1], expected.logits)


def test_positional_arguments_are_understood(root: Path) -> None:
    model = joint(root)
    batch = prompt_batch()
    assert torch.equal(model(batch["input_ids"], None, labels=batch["labels"]).loss, model(**batch).loss)


# What a model keeps of itself


def test_a_joint_model_is_what_it_was(root: Path) -> None:
    plain = load_model(root)
    kind, signature = type(plain), inspect.signature(plain.forward)
    model = mz.attach(plain)
    assert model is plain
    assert isinstance(model, kind)
    assert (type(model).__name__, type(model).__module__) == (kind.__name__, kind.__module__)
    assert type(mz.attach(load_model(root))) is type(model)
    found = inspect.signature(model.forward)
    assert list(found.parameters)[:-3] == list(signature.parameters)[:-1]
    assert list(found.parameters)[-3:] == ["mtp_mask", "mtp_counts", "kwargs"]
    assert inspect.signature(type(model).forward).parameters.keys() == {"self", *found.parameters}
    assert [name for name, _ in model.named_modules() if name.endswith("mtp_head")] == ["mtp_head"]


def test_a_copy_trains_on_its_own(root: Path) -> None:
    model = joint(root, detach=())
    copied = copy.deepcopy(model)
    batch = prompt_batch()
    copied(**batch).loss.backward()
    assert gradients(copied).keys() == {name for name, _ in model.named_parameters()}
    assert gradients(model) == {}


def test_replaced_embeddings_are_borrowed_again(root: Path) -> None:
    model = joint(root)
    model.resize_token_embeddings(160)
    model(**prompt_batch())
    assert model.mtp_head.shared.lm_head_weight.shape[0] == 160


def test_a_forward_that_others_wrap_adds_the_loss_once(root: Path) -> None:
    """As accelerate does for mixed precision."""
    model = joint(root)
    expected = model(**prompt_batch())
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    out = model(**prompt_batch())
    assert torch.equal(out.loss, expected.loss)
    del model.forward
    assert torch.equal(model(**prompt_batch()).loss, expected.loss)


# Modes


def test_mtp_only_keeps_no_graph_of_the_trunk_and_no_logits(root: Path) -> None:
    model = joint(root, mode="mtp_only")
    hidden: list[Tensor] = []
    model.model.norm.register_forward_hook(lambda _m, _i, output: hidden.append(output))
    packed: list[Tensor] = []
    batch = prompt_batch()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        out = model(**batch)
    in_head = len(packed)
    assert not hidden[0].requires_grad
    assert out.logits.shape[1] == 1
    assert torch.equal(out.loss, out.mtp_loss)
    out.loss.backward()
    assert gradients(model).keys() == {f"mtp_head.{name}" for name, _ in model.mtp_head.named_parameters()}
    model.mtp.mode = "joint"
    packed.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        model(**batch)
    assert len(packed) > 2 * in_head
    expected = joint(root)
    expected(**batch).mtp_loss.backward()


def test_the_mtp_gradients_of_both_modes_are_the_same(root: Path) -> None:
    batch = prompt_batch()
    only, both = joint(root, mode="mtp_only"), joint(root)
    only(**batch).loss.backward()
    both(**batch).mtp_loss.backward()
    assert_same(gradients(only.mtp_head), gradients(both.mtp_head))


def test_the_second_stage_trains_what_trained_before(root: Path) -> None:
    model = load_model(root)
    model.model.embed_tokens.weight.requires_grad_(False)
    mz.attach(model, mode="mtp_only")
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if name.startswith("mtp_head.")
    }
    model.mtp.mode = "joint"
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"model.embed_tokens.weight"}


def test_evaluation_of_a_frozen_trunk_gives_logits(root: Path) -> None:
    model = joint(root, mode="mtp_only").eval()
    batch = prompt_batch()
    out = model(**batch)
    assert out.logits.shape[1] == batch["input_ids"].shape[1]
    assert torch.equal(out.loss, out.mtp_loss)


def test_recomputing_layers_changes_no_gradient(root: Path) -> None:
    """https://github.com/NVIDIA/Megatron-LM/pull/4765: a differentiable input that a checkpoint does not see."""
    batch = prompt_batch()
    plain, recomputed = joint(root, depths=3, detach=()), joint(root, depths=3, detach=())
    recomputed._set_gradient_checkpointing(
        gradient_checkpointing_func=lambda *args: torch.utils.checkpoint.checkpoint(*args, use_reentrant=False)
    )
    assert recomputed.model.layers[0].gradient_checkpointing
    plain(**batch).loss.backward()
    recomputed(**batch).loss.backward()
    assert_same(gradients(recomputed), gradients(plain))
    assert recomputed.mtp_head._checkpointing
    recomputed._set_gradient_checkpointing(enable=False)
    assert not recomputed.mtp_head._checkpointing


def test_autocast_reaches_the_head(root: Path) -> None:
    model = joint(root)
    seen: list[torch.dtype] = []
    model.mtp_head.depths[0].eh_proj.register_forward_hook(lambda _m, _i, output: seen.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(**prompt_batch())
    out.loss.backward()
    assert seen == [torch.bfloat16]
    assert torch.isfinite(out.loss)


# Refusals


def test_what_does_not_fit_is_refused(root: Path) -> None:
    with pytest.raises(AttachError, match="fit") as caught:
        mz.attach(joint(root), reduction="micro_batch")
    assert len(caught.value.problems) == 2
    bare = load_model(root)
    bare.config._name_or_path = ""
    with pytest.raises(AttachError, match="loaded from"):
        mz.attach(bare)
    with pytest.raises(AttachError, match="mtp_only"):
        joint(root, mode="both")
    with pytest.raises(ObjectiveError, match="loss"):
        joint(root, loss="mse")


def test_a_model_without_an_lm_head_is_refused(root: Path) -> None:
    with pytest.raises(AttachError, match="fit") as caught:
        mz.attach(load_model(root).model)
    assert "lm_head" in str(caught.value)


def test_a_head_that_borrows_nothing_says_so(root: Path) -> None:
    """https://github.com/vllm-project/speculators/pull/452: borrowed tensors must never be garbage"""
    head = mz.load_head(root)
    tokens = TokenBatch.all_tokens(ids(1, 6))
    with pytest.raises(NotAttachedError):
        MTPObjective(head, depths=1, loss="ce")(tokens, torch.zeros(1, 6, head.hidden_size))


def test_a_frozen_head_is_refused(root: Path) -> None:
    model = joint(root)
    model.requires_grad_(False)
    with pytest.raises(AttachError, match="gradients"):
        model(**prompt_batch())


def test_a_replica_is_refused(root: Path) -> None:
    """As nn.DataParallel makes them, which Trainer uses where it sees several devices."""
    model = joint(root)
    replica = model._replicate_for_data_parallel()
    with pytest.raises(AttachError, match="replica"):
        replica(**prompt_batch())


def test_a_head_of_another_width_is_refused(root: Path) -> None:
    with pytest.raises(mz.MTPZooError, match="hidden size"):
        mz.attach(load_model(root), tiny_head(hidden=32))
