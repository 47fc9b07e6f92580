"""What others put around a joint model, or into it, before and after attach: every training call has its MTP loss, or raises.

Each row of the table wraps a model; loss, MTP loss and the head's gradients are those of the joint model alone.
"""

from __future__ import annotations

import inspect
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate import Accelerator, cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

import mtp_zoo as mz
from mtp_zoo.attach_batch import CACHES, token_batch
from mtp_zoo.batch import TokenBatch
from mtp_zoo.errors import AttachError, NoMTPLossError, SharedTensorError
from mtp_zoo.objective import MTPObjective
from mtp_zoo.targets import target_states
from tests.attaching import assert_same, gradients, ids, load_model, make_checkpoint

SAME_LOSS = 1e-6
"""The same FP32 sums, by way of another graph."""

PAGE = Path(__file__).parents[1] / "docs/joint-training.md"
CPU = torch.device("cpu")

Wrap = Callable[[Any, Path], Any]
"""Wraps a model; returns what is called in its place."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Compiling the linear attention of the reference kernels takes minutes.
    kinds = ["full_attention", "full_attention"]
    return make_checkpoint(tmp_path_factory.mktemp("wrapped") / "base", layer_types=kinds)


@pytest.fixture(scope="module")
def batch() -> dict[str, Tensor]:
    return {"input_ids": ids(2, 12), "labels": ids(2, 12)}


@pytest.fixture(scope="module")
def expected(root: Path, batch: dict[str, Tensor]) -> tuple[float, float, dict[str, Tensor]]:
    return step(mz.attach(load_model(root)), batch)


def step(model: Any, batch: dict[str, Tensor], run: Any = None) -> tuple[float, float, dict[str, Tensor]]:
    out = (model if run is None else run)(**batch)
    out.loss.backward()
    return out.loss.item(), out.mtp_loss.item(), gradients(model.mtp_head)


def hooked(model: Any, _: Path) -> Any:
    return add_hook_to_module(model, ModelHook())


def dispatched(model: Any, _: Path) -> Any:
    return dispatch_model(model, {"": "cpu"}, force_hooks=True)


def offloaded(model: Any, _: Path) -> Any:
    return cpu_offload(model, CPU)


def on_disk(model: Any, place: Path) -> Any:
    return disk_offload(model, str(place), CPU)


def prepared(model: Any, _: Path) -> Any:
    return Accelerator(cpu=True).prepare(model)


def compiled(model: Any, _: Path) -> Any:
    return torch.compile(model, backend="eager")


def compiled_forward(model: Any, _: Path) -> Any:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def compiled_in_place(model: Any, _: Path) -> Any:
    model.compile(backend="eager")
    return model


def patched_instance(model: Any, _: Path) -> Any:
    own = model.forward
    model.forward = MethodType(lambda self, *args, **kwargs: own(*args, **kwargs), model)
    return model


def patched_class(model: Any, _: Path) -> Any:
    return replaced_forward(type(model), model)


def patched_original(model: Any, _: Path) -> Any:
    """As Liger does: the class of transformers, whatever the model's class is."""
    return replaced_forward(Qwen3_5ForCausalLM, model)


def replaced_forward(kind: Any, model: Any) -> Any:
    """The class's forward replaced by another that does the same, without what `attach` put in front of it."""
    own = Qwen3_5ForCausalLM.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.ran = True
        return own(self, *args, **kwargs)

    kind.forward = forward
    return model


def with_noise(model: Any, _: Path) -> Any:
    from transformers.integrations.neftune import activate_neftune

    activate_neftune(model, 0.0)
    return model


def with_adapters(model: Any, _: Path) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))


BEFORE: dict[str, Wrap] = {
    "add_hook_to_module": hooked,
    "dispatch_model (device_map)": dispatched,
    "cpu_offload": offloaded,
    "disk_offload": on_disk,
    "accelerator.prepare": prepared,
    "model.forward = torch.compile(model.forward)": compiled_forward,
    "model.compile()": compiled_in_place,
    "model.forward = f": patched_instance,
    "type(model).forward = f": patched_class,
    "Liger, the class of transformers": patched_original,
    "NEFTune": with_noise,
    "PEFT": with_adapters,
}

AFTER: dict[str, Wrap] = {
    **{name: wrap for name, wrap in BEFORE.items() if name not in {"cpu_offload", "disk_offload", "PEFT"}},
    "torch.compile(model)": compiled,
}

REFUSED_AFTER: dict[str, tuple[Wrap, type[Exception], str]] = {
    "cpu_offload": (offloaded, AttachError, "offloaded"),
    "disk_offload": (on_disk, AttachError, "offloaded"),
    "PEFT": (with_adapters, AttachError, "get_peft_model"),
}


COMPILING = {"model.compile()", "model.forward = torch.compile(model.forward)"}
"""Six seconds each; `torch.compile(model)` runs always."""


def table(wrappers: dict[str, Wrap]) -> list[Any]:
    """The rows, those that take long among the slow tests."""
    return [pytest.param(name, marks=[pytest.mark.slow] if name in COMPILING else []) for name in wrappers]


@contextmanager
def restored() -> Iterator[None]:
    """Undo what a row does to classes, to accelerate and to dynamo."""
    own = Qwen3_5ForCausalLM.forward
    joint = mz.attacher.joint_class(Qwen3_5ForCausalLM)
    slot = vars(joint)["forward"]
    try:
        with warnings.catch_warnings():
            # Of dynamo about what it traces, and of PEFT about names of transformers that will change.
            warnings.simplefilter("ignore")
            yield
    finally:
        Qwen3_5ForCausalLM.forward = own
        joint.forward = slot
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.compiler.reset()


def assert_trained_alike(found: Any, expected: Any) -> None:
    assert found[:2] == pytest.approx(expected[:2], rel=SAME_LOSS)
    assert_same(found[2], expected[2])


@pytest.mark.parametrize("name", table(BEFORE))
def test_a_model_that_was_wrapped_before_trains_its_head(
    name: str, root: Path, batch: dict[str, Tensor], expected: Any, tmp_path: Path
) -> None:
    with restored():
        model = mz.attach(BEFORE[name](load_model(root), tmp_path), root)
        base = model.get_base_model() if name == "PEFT" else model
        assert_trained_alike(step(base, batch, model), expected)


@pytest.mark.parametrize("name", table(AFTER))
def test_a_model_that_is_wrapped_after_trains_its_head(
    name: str, root: Path, batch: dict[str, Tensor], expected: Any, tmp_path: Path
) -> None:
    with restored():
        model = mz.attach(load_model(root))
        run = AFTER[name](model, tmp_path)
        assert_trained_alike(step(model, batch, run), expected)
        assert_trained_alike(step(mz.attach(load_model(root)), batch), expected)


@pytest.mark.parametrize("wrap", [patched_class, patched_original])
def test_a_forward_that_replaces_that_of_a_class_is_the_one_that_runs(
    wrap: Wrap, root: Path, batch: dict[str, Tensor], tmp_path: Path
) -> None:
    with restored():
        first = mz.attach(load_model(root))
        step(first, batch)
        wrap(first, tmp_path)
        for model in (first, mz.attach(load_model(root))):
            step(model, batch)
            assert model.ran


@pytest.mark.parametrize("name", REFUSED_AFTER)
def test_a_wrapper_that_takes_the_heads_weights_is_refused(
    name: str, root: Path, batch: dict[str, Tensor], tmp_path: Path
) -> None:
    wrap, error, says = REFUSED_AFTER[name]
    with restored(), pytest.raises(error, match=says):
        wrap(mz.attach(load_model(root)), tmp_path)(**batch)


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


@pytest.mark.parametrize("wrap", [offloaded, on_disk])
def test_an_offloaded_target_gives_the_same_states_and_losses(wrap: Wrap, root: Path, tmp_path: Path) -> None:
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


# The page


def test_the_page_lists_every_wrapper() -> None:
    section = PAGE.read_text().partition("## Wrappers")[2].partition("\n## ")[0]
    rows = [re.split(r"\s*\|\s*", line.strip("| ")) for line in section.splitlines() if line.startswith("| `")]
    drawn = {name.strip("`"): (before, after) for name, before, after, *_ in rows}
    for name in {**BEFORE, **AFTER}:
        before, after = drawn.pop(name)
        assert (before == "trains") == (name in BEFORE)
        assert after.startswith("trains") == (name in AFTER)
        assert after.startswith("`AttachError`") == (name in REFUSED_AFTER)
    assert all(name.split()[0] in {"DDP", "FSDP2"} for name in drawn)
