"""The served checkpoints, and the library's own view of them; no engine."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from mtp_zoo.checkpoint import CheckpointIndex
from mtp_zoo.demo.story import BASE as DEMO_BASE
from mtp_zoo.errors import ConformanceError
from mtp_zoo_conformance import served
from mtp_zoo_conformance.cases import get_case
from mtp_zoo_conformance.library import Library
from mtp_zoo_conformance.served import NEW_TOKENS, ServedCheckpoint

FAMILY = "qwen3_5"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ServedCheckpoint]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served, "EXTRA", {})  # the demo takes a minute, and has its own tests
        built = served.build(get_case(FAMILY), tmp_path_factory.mktemp("served"))
    return {checkpoint.head: checkpoint for checkpoint in built}


@pytest.fixture(scope="module")
def trained(checkpoints: dict[str, ServedCheckpoint]) -> Library:
    return Library(checkpoints["trained"], FAMILY)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardly trained, and without the demo."""
    for name in ("TARGET_STEPS", "HEAD_STEPS"):
        monkeypatch.setattr(served, name, 2)
    monkeypatch.setattr(served, "EXTRA", {})


def head_bytes(path: Path) -> dict[str, bytes]:
    index = CheckpointIndex.open(path)
    files = {entry.file for name, entry in index.entries.items() if name.startswith("mtp.")}
    return {
        name: value.view(torch.uint8).numpy().tobytes()
        for file in files
        for name, value in load_file(path / file).items()
        if name.startswith("mtp.")
    }


def test_language_depends_on_two_tokens_and_never_repeats_one() -> None:
    stream = served.language(512, 4000, seed=0).tolist()
    assert len(set(stream)) <= served.WORDS
    assert all(one != other for one, other in pairwise(stream))
    behind: dict[tuple[int, int], set[int]] = {}
    for first, second, third in zip(stream, stream[1:], stream[2:], strict=False):
        behind.setdefault((first, second), set()).add(third)
    assert max(map(len, behind.values())) == len(served.SUCCESSORS)
    assert stream == served.language(512, 4000, seed=0).tolist()
    assert stream != served.language(512, 4000, seed=1).tolist()


@pytest.mark.usefixtures("hurried")
def test_one_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    first = served.build(get_case(FAMILY), tmp_path / "first")
    again = served.build(get_case(FAMILY), tmp_path / "again")
    assert [checkpoint.head for checkpoint in first] == ["trained", "untouched", "oracle"]
    for one, other in zip(first, again, strict=True):
        files = sorted(path.name for path in one.path.glob("*.safetensors"))
        assert files == sorted(path.name for path in other.path.glob("*.safetensors"))
        for file in files:
            assert (one.path / file).read_bytes() == (other.path / file).read_bytes(), f"{one.head}: {file}"
        assert one.prompts == other.prompts


def test_everything_but_the_demo_is_stored_in_fp32(checkpoints: dict[str, ServedCheckpoint]) -> None:
    for name in ("trained", "untouched", "oracle"):
        stored = {entry.dtype for entry in CheckpointIndex.open(checkpoints[name].path).entries.values()}
        assert stored == {"F32"}, name


def test_an_untouched_head_keeps_its_bytes(checkpoints: dict[str, ServedCheckpoint]) -> None:
    trained = head_bytes(checkpoints["trained"].path)
    assert len(trained) == 15
    assert head_bytes(checkpoints["untouched"].path) == trained


def test_a_trained_head_is_right_in_part_and_less_so_the_deeper(trained: Library) -> None:
    rates = [depth["accept_rate"] for depth in trained.report("vllm", 3).per_depth]
    assert 0.9 > rates[0] > rates[1] > rates[2] > 0.2


def test_every_draft_of_an_oracle_is_accepted(checkpoints: dict[str, ServedCheckpoint]) -> None:
    library = Library(checkpoints["oracle"], FAMILY)
    report = library.report("sglang", 3)
    assert report.accepted == report.drafted > 0
    assert all(len(set(prompt.output)) > 5 for prompt in report.prompts)


def test_plain_choices_are_the_output_of_the_loop(trained: Library) -> None:
    report = trained.report("vllm", 3)
    assert {len(prompt.output) for prompt in report.prompts} == {NEW_TOKENS}
    for number, prompt in enumerate(report.prompts):
        choices, margins = trained.choices(number, prompt.output)
        assert tuple(choices) == prompt.output
        assert min(margins) > 1e-4, "a near tie: engines need not choose alike"


def test_bf16_errs_by_less_than_a_logit_and_by_more_than_nothing(trained: Library) -> None:
    assert 0 < trained.bf16_error(0, trained.report("vllm", 3).prompts[0].output) < 0.5


def test_engines_with_equal_conventions_share_a_report(trained: Library) -> None:
    assert trained.report("vllm", 3) is trained.report("sglang", 3)


def test_a_drafts_margin_is_that_of_the_step_it_was_drafted_in(trained: Library) -> None:
    """The token that a step drafts behind what is known is the best of the logits whose lead is reported."""
    report = trained.report("vllm", 3).prompts[0]
    seen: list[int] = []
    logits = trained.head.shared.logits

    def watched(states: torch.Tensor, projection: torch.Tensor | None) -> torch.Tensor:
        found = logits(states, projection)
        seen.append(int(found.argmax()))
        return found

    known = 1
    for step, accepted in enumerate(report.accepted[:-1]):
        for depth in range(1, accepted + 1):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(trained.head.shared, "logits", watched)
                assert trained.draft_margin("vllm", 0, report.output[: known + depth - 1], depth) > 0
            assert seen[-1] == report.output[known + depth - 1], f"step {step}, depth {depth}"
        known += accepted + 1
    assert len(seen) == sum(report.accepted[:-1]) > 0


def test_the_demo_is_served_as_it_was_exported_on_text_of_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, bool]] = []

    def told(out: Path, *, short: bool) -> SimpleNamespace:
        asked.append((out, short))
        return SimpleNamespace(checkpoint=DEMO_BASE)

    monkeypatch.setattr(served, "tell", told)
    (demo,) = served.EXTRA[FAMILY](tmp_path)
    assert asked == [(tmp_path / "demo-run", True)]
    assert demo.path == DEMO_BASE
    assert demo.dtypes == {"vllm": "bfloat16", "sglang": "float32"}
    assert [len(prompt) for prompt in demo.prompts] == list(served.DEMO_PROMPT_LENGTHS)
    assert len(set(demo.prompts)) == len(demo.prompts)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"])
def test_a_target_with_dense_and_sparse_layers_is_silenced_whole(family: str, tmp_path: Path) -> None:
    """And its router's bias is stored: an oracle of a case that forgot an output would still pass on, layer by layer."""
    oracle = {one.head: one for one in served.build(get_case(family), tmp_path)}["oracle"]
    files = {entry.file for entry in CheckpointIndex.open(oracle.path).entries.values()}
    tensors = {name: value for file in files for name, value in load_file(oracle.path / file).items()}
    layers = {f"model.layers.{number}." for number in range(3)}
    outputs = {name for name in tensors if name.endswith(("o_proj.weight", "down_proj.weight"))}
    assert {name[: len("model.layers.0.")] for name in outputs} == layers
    assert {name for name in outputs if tensors[name].any()} == set()
    assert {f"{layer}mlp.gate.e_score_correction_bias" for layer in layers if "0" not in layer} <= set(tensors)


@pytest.mark.usefixtures("hurried")
def test_only_one_family_is_run_with_every_number_of_drafts(tmp_path: Path) -> None:
    full, short = (served.build(get_case(family), tmp_path / family) for family in ("qwen3_5", "glm4_moe"))
    assert {one.head: one.drafts for one in full} == dict.fromkeys(("trained", "untouched", "oracle"), (1, 2, 3))
    assert {one.head: one.drafts for one in short} == {"trained": (1, 3), "untouched": (3,), "oracle": (3,)}


@pytest.mark.usefixtures("hurried")
def test_wrong_output_projections_are_named(tmp_path: Path) -> None:
    case = dataclasses.replace(get_case(FAMILY), output_projections=("self_attn.out.weight",))
    with pytest.raises(ConformanceError, match=r"expected one of \['self_attn.out.weight'\] in layer 0 of the target"):
        served.build(case, tmp_path)
