"""Every public call refuses a bad value of every argument with one typed error, before it reads, writes or changes anything."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Trainer

import mtp_zoo as mz
from mtp_zoo.errors import MTPZooError
from mtp_zoo.training.config import TrainConfig
from tests.attaching import ids, load_model, make_checkpoint
from tests.exporting import snapshot

BAD: dict[str, Any] = {
    "none": None,
    "minus one": -1,
    "zero": 0,
    "fraction": 2.5,
    "nan": math.nan,
    "inf": math.inf,
    "true": True,
    "blank": "",
    "typo": "typo",
    "nul": "a\0b",
    "bytes": b"x",
    "empty list": [],
    "list": [object()],
    "mapping": {"a": object()},
    "object": object(),
    "tensor": torch.zeros(2, 3),
    "class": int,
}
"""Values of every kind that callers pass by mistake."""

RECORDS = {
    "AcceptanceReport",
    "CheckpointIndex",
    "Diagnosis",
    "ExportReport",
    "Finding",
    "LoadReport",
    "MTPOutput",
    "MTPStats",
    "PushReport",
    "RollbackReport",
    "ShardedBatch",
    "Verification",
}
"""What calls return; nobody else makes them."""

NOT_CALLED = {"DraftModule", "MTPZooError", "PerEngine", "__version__", "list_families"}
"""A protocol, a base class, a pair of any two values (`HeadSpec` judges them), a string, a function without arguments."""


@dataclasses.dataclass(frozen=True)
class World:
    """A checkpoint, its model and head, and a batch."""

    root: Path
    model: Any
    head: mz.DraftHead
    tokens: mz.TokenBatch
    hidden: Tensor


@dataclasses.dataclass(frozen=True)
class Call:
    """A public call.

    Attributes:
        run: the function or class.
        valid: arguments of a call that works.
        fine: by argument, the names in `BAD` that are good values of it; of every other argument none is.
        anything: arguments that take any value.
    """

    run: Callable[..., Any]
    valid: Callable[[World], dict[str, Any]]
    fine: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    anything: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        parameters = inspect.signature(self.run).parameters.values()
        return [p.name for p in parameters if p.kind not in kinds and p.name not in self.anything]


LAYOUT = dict.fromkeys(
    ("labels", "attention_mask", "position_ids", "cu_seqlens", "cu_seqlens_padded", "seq_idx"), ("none",)
) | {"labels": ()}


def decoding(world: World) -> dict[str, Any]:
    """Arguments of the draft loops."""
    return {"target": world.model, "head": world.head, "prompts": [[1, 2]], "k": 1, "max_new_tokens": 1}


OUT = {"out": ("typo",), "in_place": (), "force": ("true",), "copy": ("true",), "dtype": ("none",)}
CALLS: dict[str, Call] = {
    "MTPObjective": Call(
        mz.MTPObjective,
        lambda w: {"head": w.head},
        {
            "beta": ("zero", "fraction"),
            "weights": ("none",),
            "rollout": ("none",),
            "chunk_size": ("none",),
            "detach": ("empty list",),
            "temperature": ("fraction",),
            "top_k": ("none",),
            "agreement": ("true",),
        },
    ),
    "step_counts": Call(
        mz.step_counts, lambda w: {"batches": [w.tokens], "depths": 2}, {"batches": ("empty list", "blank")}
    ),
    "load_head": Call(
        mz.load_head,
        lambda w: {"source": w.root},
        {
            **dict.fromkeys(("target", "family", "dtype", "device", "depths", "engine", "revision", "mesh"), ("none",)),
            "seed": ("zero",),
        },
        anything=("mp_policy",),
    ),
    "load_shared": Call(
        mz.load_shared,
        lambda w: {"source": w.root},
        dict.fromkeys(("family", "dtype", "revision"), ("none",)),
    ),
    "export": Call(mz.export, lambda w: {"head": w.head, "base": w.root, "out": "new"}, {**OUT, "training": ("none",)}),
    "graft": Call(mz.graft, lambda w: {"source": w.root, "into": w.root, "out": "new"}, {**OUT, "revision": ("none",)}),
    "rollback": Call(mz.rollback, lambda w: {"directory": w.root}),
    "verify": Call(mz.verify, lambda w: {"checkpoint": w.root}, {"against": ("none",)}),
    "push": Call(
        mz.push,
        lambda w: {"checkpoint": w.root, "repo_id": "org/name"},
        {"revision": ("none", "typo"), "private": ("none", "true"), "create_pr": ("true",), "dry_run": ("true",)},
    ),
    "doctor": Call(
        mz.doctor,
        lambda w: {"source": w.root},
        {"revision": ("none", "typo"), "deep": ("true",), "against": ("none",)},
    ),
    "split": Call(
        mz.split,
        lambda w: {"tokens": w.tokens, "depths": 1, "rank": 0, "size": 2},
        {"rank": ("zero",), "group": ("none",)},
    ),
    "pad_documents": Call(mz.pad_documents, lambda w: {"tokens": w.tokens, "multiple": 4}),
    "shard_head": Call(mz.shard_head, lambda w: {"head": w.head}, {"mesh": ()}, anything=("mp_policy",)),
    "gather_head": Call(mz.gather_head, lambda w: {"head": w.head}),
    "DraftHead": Call(
        mz.DraftHead,
        lambda w: {"family": w.head.family, "config": w.head.config},
        {"first_layer": ("zero",), "device": ("none",)},
    ),
    "Family": Call(
        mz.Family,
        lambda w: {f.name: getattr(w.head.family, f.name) for f in dataclasses.fields(mz.Family)},
        {
            "name": ("typo", "nul"),
            "count_field": ("none", "typo", "nul"),
            "layer": ("typo", "nul"),
            "engines": ("mapping",),
        },
    ),
    "HeadSpec": Call(
        mz.HeadSpec, lambda w: {f.name: getattr(w.head.spec, f.name) for f in dataclasses.fields(mz.HeadSpec)}
    ),
    "KeyMap": Call(
        mz.KeyMap,
        lambda w: {
            "rules": w.head.family.rules,
            "head_shapes": {name: tuple(value.shape) for name, value in w.head.weights().items()},
        },
        {"first_layer": ("zero",), "family": ("typo", "nul")},
        anything=("_choices",),
    ),
    "Rename": Call(
        mz.Rename, lambda _: {"native": "a", "head": "b"}, {"native": ("typo", "nul"), "head": ("typo", "nul")}
    ),
    "Stack": Call(
        mz.Stack,
        lambda _: {"native": ("a", "b"), "head": "c"},
        {"head": ("typo", "nul"), "axis": ("zero", "minus one")},
    ),
    "Split": Call(
        mz.Split,
        lambda _: {"native": "a", "head": ("b", "c")},
        {"native": ("typo", "nul"), "axis": ("zero", "minus one")},
    ),
    "Skip": Call(
        mz.Skip,
        lambda _: {"native": "a", "because": "b"},
        {"native": ("typo", "nul"), "because": ("typo", "nul"), "copy_of": ("none",)},
    ),
    "SharedTensors": Call(
        mz.SharedTensors,
        lambda w: {"embedding": w.model.get_input_embeddings(), "lm_head": w.model.get_output_embeddings()},
        {"final_norm": ("none",)},
    ),
    "TokenBatch": Call(
        mz.TokenBatch,
        lambda w: {f.name: getattr(w.tokens, f.name) for f in dataclasses.fields(mz.TokenBatch)},
        {"placeholders": ("none",)},
    ),
    "TokenBatch.all_tokens": Call(
        mz.TokenBatch.all_tokens, lambda w: {"input_ids": w.tokens.input_ids}, {"attention_mask": ("none",)}
    ),
    "TokenBatch.from_labels": Call(
        mz.TokenBatch.from_labels,
        lambda w: {"input_ids": w.tokens.input_ids, "labels": w.tokens.input_ids},
        {**LAYOUT, "placeholder_ids": ("empty list",)},
    ),
    "TokenBatch.from_mask": Call(
        mz.TokenBatch.from_mask,
        lambda w: {"input_ids": w.tokens.input_ids, "learn_mask": w.tokens.learn_mask},
        {**LAYOUT, "placeholder_ids": ("empty list",)},
    ),
    "TokenBatch.from_collated": Call(
        mz.TokenBatch.from_collated,
        lambda w: {"inputs": {"input_ids": w.tokens.input_ids, "labels": w.tokens.input_ids}},
        {"placeholder_ids": ("empty list",)},
    ),
    "TokenBatch.from_rows": Call(
        mz.TokenBatch.from_rows,
        lambda _: {"rows": [[([1, 2], [True, True])]]},
        {"rows": ("empty list",), "length": ("none",), "pad_id": ("zero",)},
    ),
    "TrainConfig": Call(TrainConfig.from_dict, lambda _: {"data": {}}, anything=("source",)),
    "replay": Call(mz.replay, decoding, {"eos": ("empty list",)}),
    "speculate": Call(mz.speculate, decoding, {"eos": ("empty list",), "check": ("true",)}),
    "resolve": Call(
        mz.resolve, lambda w: {"names": ["model.norm.weight"], "config": w.head.config}, {"family": ("none",)}
    ),
    "target_states": Call(mz.target_states, lambda w: {"target": w.model, "tokens": w.tokens, "spec": w.head.spec}),
    "attach": Call(
        mz.attach,
        lambda w: {"model": w.model},
        {
            "head": ("none",),
            "mtp_lambda": ("none", "zero", "fraction"),
            "detach": ("empty list",),
            "head_dtype": ("none",),
        },
    ),
    "detach": Call(mz.detach, lambda w: {"model": w.model}),
    "trainer_class": Call(mz.trainer_class, lambda _: {"original": Trainer}),
    "train": Call(mz.train, lambda _: {"config": TrainConfig.model_construct()}, {"resume": ("true",)}),
    "register": Call(mz.register, lambda w: {"family": w.head.family}),
    "get_family": Call(mz.get_family, lambda w: {"name": "qwen3_5"}),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = make_checkpoint(tmp_path_factory.mktemp("base") / "checkpoint")
    model = load_model(root)
    head = mz.load_head(root, target=model)
    tokens = mz.TokenBatch.all_tokens(ids(2, 8))
    return World(root, model, head, tokens, mz.target_states(model, tokens, head.spec))


@pytest.fixture(autouse=True)
def _as_users_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the tests' own type checks, and in a folder of their own."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    monkeypatch.chdir(tmp_path)


def names_of(thing: str) -> bool:
    return thing not in RECORDS and thing not in NOT_CALLED


def test_every_public_call_is_in_the_table() -> None:
    assert sorted({name.partition(".")[0] for name in CALLS}) == sorted(filter(names_of, mz.__all__))


OTHERWISE = {
    ("KeyMap", "rules"): "its key map and its head do not add up",
    ("KeyMap", "head_shapes"): "its key map and its head do not add up",
    ("TokenBatch.from_rows", "length"): "expected at most 0 tokens a row",
    ("TrainConfig", "data"): "expected a mapping",
    ("get_family", "name"): "No family is called",
    ("load_head", "trainable"): "Choosing what the qwen3_5 head trains",
    ("push", "repo_id"): "Repo id must use",
    ("resolve", "names"): "Looking for the qwen3_5 head",
    ("shard_head", "mesh"): "expected a process group",
}
"""What an error says that is about an argument and does not name it; every other names it, or shows the value."""

ACTING = {"export", "graft", "push", "register", "train", "speculate", "replay", "load_head"}
"""Calls that, where a value happens to be good, write, register or run for long."""

CASES = [(name, argument) for name, call in sorted(CALLS.items()) for argument in call.arguments]


@pytest.mark.parametrize(("name", "argument"), CASES)
def test_a_bad_value_is_one_typed_error_and_changes_nothing(
    name: str, argument: str, world: World, tmp_path: Path
) -> None:
    call, before = CALLS[name], snapshot(world.root)
    wrong: list[str] = []
    for kind, value in BAD.items():
        if kind in call.fine.get(argument, ()):
            continue
        try:
            call.run(**{**call.valid(world), argument: value})
        except MTPZooError as error:
            told = (argument, OTHERWISE.get((name, argument), argument), value if kind == "typo" else argument)
            if not any(each in str(error) for each in told):
                wrong.append(f"{kind}: {error}")
        except Exception as error:
            wrong.append(f"{kind}: {type(error).__name__}: {error}")
        else:
            wrong.append(f"{kind}: accepted")
    assert wrong == []
    assert snapshot(world.root) == before
    assert list(tmp_path.iterdir()) == []


ANY = st.one_of(
    st.none(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.lists(st.one_of(st.integers(), st.text()), max_size=3),
    st.dictionaries(st.text(), st.integers(), max_size=2),
    st.builds(object),
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=st.sampled_from([case for case in CASES if case[0] not in ACTING]), value=ANY)
def test_whatever_is_passed_is_taken_or_refused_by_a_typed_error(
    case: tuple[str, str], value: Any, world: World
) -> None:
    name, argument = case
    with contextlib.suppress(MTPZooError):
        CALLS[name].run(**{**CALLS[name].valid(world), argument: value})
