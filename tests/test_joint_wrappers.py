"""What others put around a joint model, or into it, before and after attach: every training call has its MTP loss, or raises.

Each row of the table wraps a model; loss, MTP loss and the head's gradients are those of the joint model alone.
"""

from __future__ import annotations

import re
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
from mtp_zoo.errors import AttachError
from tests.attaching import assert_trained_alike, ids, load_model, make_checkpoint, step

PAGE = Path(__file__).parents[1] / "docs/joint-training.md"
CPU = torch.device("cpu")

Wrap = Callable[[Any, Path], Any]
"""Wraps a model; returns what is called in its place."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Layers of one kind: fewer graphs for the rows that compile.
    kinds = ["full_attention", "full_attention"]
    return make_checkpoint(tmp_path_factory.mktemp("wrapped") / "base", layer_types=kinds)


@pytest.fixture(scope="module")
def batch() -> dict[str, Tensor]:
    return {"input_ids": ids(2, 12), "labels": ids(2, 12)}


@pytest.fixture(scope="module")
def expected(root: Path, batch: dict[str, Tensor]) -> tuple[float, float, dict[str, Tensor]]:
    return step(mz.attach(load_model(root)), batch)


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
