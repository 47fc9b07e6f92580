"""A call of a joint model has its own state, reads no earlier call, and none trains the model around the head."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from torch import Tensor

import mtp_zoo as mz
from mtp_zoo.attach_batch import CACHES, token_batch
from mtp_zoo.batch import TokenBatch
from mtp_zoo.errors import AttachError, NoMTPLossError, SharedTensorError
from mtp_zoo.objective import MTPObjective
from mtp_zoo.targets import target_states
from tests.attaching import SAME_LOSS, assert_trained_alike, ids, load_model, make_checkpoint, step

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kinds = ["full_attention", "full_attention"]
    return make_checkpoint(tmp_path_factory.mktemp("wrapped") / "base", layer_types=kinds)


@pytest.fixture(scope="module")
def batch() -> dict[str, Tensor]:
    return {"input_ids": ids(2, 12), "labels": ids(2, 12)}


@pytest.fixture(scope="module")
def expected(root: Path, batch: dict[str, Tensor]) -> tuple[float, float, dict[str, Tensor]]:
    return step(mz.attach(load_model(root)), batch)


# Around the slot


def kept_forward(root: Path) -> tuple[Any, Any]:
    model = load_model(root)
    forward = model.forward
    return mz.attach(model), forward


def forward_of_the_original_class(root: Path) -> tuple[Any, Any]:
    model = mz.attach(load_model(root))
    original = next(kind for kind in type(model).__mro__[1:] if "forward" in vars(kind))
    return model, MethodType(original.forward, model)


def decoder_alone(root: Path) -> tuple[Any, Any]:
    model = mz.attach(load_model(root))
    return model, lambda input_ids, labels: model.model(input_ids=input_ids)


@pytest.mark.parametrize("around", [kept_forward, forward_of_the_original_class, decoder_alone])
def test_a_training_pass_around_the_slot_is_an_error(
    around: Callable[[Path], tuple[Any, Any]], root: Path, batch: dict[str, Tensor]
) -> None:
    model, run = around(root)
    with pytest.raises(NoMTPLossError, match="went around"):
        run(**batch)
    with torch.no_grad():
        run(**batch)
    with model.mtp.paused():
        run(**batch)
    model.eval()
    run(**batch)


# One call, and no other


def test_calls_of_other_threads_and_models_do_not_meet(root: Path, batch: dict[str, Tensor], expected: Any) -> None:
    model, other = mz.attach(load_model(root)), mz.attach(load_model(root))
    inside, done = threading.Event(), threading.Event()
    training = threading.current_thread()
    found: list[Any] = []

    def wait(*_: Any) -> None:
        if threading.current_thread() is training:
            inside.set()
            assert done.wait(60)

    def infer() -> None:
        try:
            assert inside.wait(60)
            with torch.no_grad():
                found.append(model(input_ids=batch["input_ids"][:, :5]))
            found.append(step(other, batch))
        finally:
            done.set()

    handle = model.model.layers[0].register_forward_hook(wait)
    thread = threading.Thread(target=infer)
    thread.start()
    trained = step(model, batch)
    thread.join()
    handle.remove()
    inference, elsewhere = found
    assert "mtp_loss" not in inference
    assert inference.logits.shape[1] == 5
    assert_trained_alike(trained, expected)
    assert_trained_alike(elsewhere, expected)


def test_a_cache_that_holds_tokens_is_refused_and_an_empty_one_is_not(
    root: Path, batch: dict[str, Tensor], expected: Any
) -> None:
    from transformers import DynamicCache

    model = mz.attach(load_model(root))
    cache = DynamicCache(config=model.config)
    (name,) = [name for name in CACHES if name in inspect.signature(model.forward).parameters]
    assert model(**batch, **{name: cache}).mtp_loss.item() == pytest.approx(expected[1], rel=SAME_LOSS)
    assert cache.get_seq_length() == 12
    for each in CACHES:
        for given in ({"labels": batch["labels"]}, {"mtp_mask": torch.ones(2, 12)}):
            with pytest.raises(AttachError, match=f"{each}: it holds tokens"):
                model(input_ids=batch["input_ids"], **{each: cache}, **given)


def test_states_of_recurrent_layers_are_a_cache_that_holds_tokens() -> None:
    class Layer:
        has_previous_state = True

    class Cache:
        layers = (Layer(),)

        def get_seq_length(self) -> int:
            return 0

    tokens = ids(1, 4)
    call = {"input_ids": tokens, "labels": tokens, "past_key_values": Cache()}
    with pytest.raises(AttachError, match="past_key_values"):
        token_batch(call, None, object())


# What the head borrows


def test_noise_on_the_targets_embeddings_does_not_reach_the_head(root: Path) -> None:
    from transformers.integrations.neftune import activate_neftune

    model = mz.attach(load_model(root))
    tokens = ids(2, 12)
    looked_up = model.mtp_head.shared.embed(tokens)
    activate_neftune(model, 5.0)
    assert torch.equal(model.mtp_head.shared.embed(tokens), looked_up)
    assert not torch.equal(model.get_input_embeddings()(tokens), looked_up)


def offloaded(model: Any, _: Path) -> Any:
    return cpu_offload(model, CPU)


def on_disk(model: Any, place: Path) -> Any:
    return disk_offload(model, str(place), CPU)


@pytest.mark.parametrize("wrap", [offloaded, on_disk])
def test_an_offloaded_target_gives_the_same_states_and_losses(
    wrap: Callable[[Any, Path], Any], root: Path, tmp_path: Path
) -> None:
    tokens = TokenBatch.all_tokens(ids(2, 12))

    def loss(target: Any) -> Any:
        head = mz.load_head(root, target=target)
        return MTPObjective(head, depths=2)(tokens, target_states(target, tokens, head.spec)).loss

    expected = loss(load_model(root)).item()
    assert loss(wrap(load_model(root), tmp_path)).item() == pytest.approx(expected, rel=SAME_LOSS)


def test_the_gradient_of_an_offloaded_lm_head_is_refused(root: Path, batch: dict[str, Tensor], tmp_path: Path) -> None:
    model = mz.attach(offloaded(load_model(root), tmp_path), root, detach={"backbone", "embedding"})
    with pytest.raises(SharedTensorError, match="offloaded"):
        model(**batch)
