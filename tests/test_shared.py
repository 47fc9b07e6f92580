"""What a head borrows: read from a checkpoint or taken from a target, and never the head's own."""

from __future__ import annotations

import copy
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextModel

from mtp_zoo.batch import TokenBatch
from mtp_zoo.checkpoint import TensorReader
from mtp_zoo.errors import (
    BrokenCheckpointError,
    ModelConfigError,
    NotAttachedError,
    SharedTensorError,
    UnknownFamilyError,
    UnsupportedQuantizationError,
)
from mtp_zoo.families.qwen3_5 import FAMILY
from mtp_zoo.head import DraftHead
from mtp_zoo.loader import load_head
from mtp_zoo.shared import SharedTensors, load_shared
from tests.allocations import PeakBytes
from tests.heads import tiny_head, tiny_target
from tests.tiny import text_config, tiny_config, tiny_tensors, write_checkpoint

EMBEDDING, NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
UNTIED = tiny_config(tied=False)
TENSORS = tiny_tensors(UNTIED)
IDS = torch.arange(24).reshape(2, 12)


def write(directory: Path, changes: dict[str, Tensor | None], config: dict[str, Any] = UNTIED, **files: Any) -> Path:
    tensors = {name: value for name, value in {**TENSORS, **changes}.items() if value is not None}
    return write_checkpoint(directory, config, tensors, **files)


# From a checkpoint


def test_untied_tensors_are_read_with_the_bits_of_the_file(tmp_path: Path) -> None:
    root = write(tmp_path, {})
    stored = load_file(root / "model.safetensors")
    shared = load_shared(root)
    assert not shared.tied
    assert torch.equal(shared.embedding.weight, stored[EMBEDDING])
    assert torch.equal(shared.lm_head_weight, stored[LM_HEAD])
    assert shared.final_norm is not None
    assert torch.equal(shared.final_norm.weight, stored[NORM])
    assert torch.equal(shared.embed(IDS), stored[EMBEDDING][IDS])
    states = torch.randn(3, 64, dtype=torch.bfloat16)
    assert torch.equal(shared.logits(states), states @ stored[LM_HEAD].T)


def test_a_tied_lm_head_is_the_embedding(tmp_path: Path) -> None:
    shared = load_shared(write(tmp_path, {LM_HEAD: None}, tiny_config(tied=True)))
    assert shared.tied
    assert shared.lm_head_weight.data_ptr() == shared.embedding.weight.data_ptr()


def test_a_stale_lm_head_beside_tied_embeddings_is_not_read(tmp_path: Path) -> None:
    """Both servers tie where the config says so, whatever the files hold."""
    shared = load_shared(write(tmp_path, {}, tiny_config(tied=True)))
    assert shared.tied
    assert torch.equal(shared.lm_head_weight, TENSORS[EMBEDDING])


def test_untied_declared_and_no_lm_head_is_never_tied_in_silence(tmp_path: Path) -> None:
    """https://github.com/QwenLM/Qwen3-VL-Embedding/issues/89"""
    root = write(tmp_path, {LM_HEAD: None})
    with pytest.raises(
        SharedTensorError, match=r"tie_word_embeddings is false, and none of \['lm_head.weight'"
    ) as error:
        load_shared(root)
    assert "set tie_word_embeddings to true if the model was trained tied" in error.value.remedy


def test_tie_flags_that_disagree_are_refused(tmp_path: Path) -> None:
    config = tiny_config(nested=True, tied=True)
    config["tie_word_embeddings"] = False
    with pytest.raises(ModelConfigError, match="'tie_word_embeddings' is True in text_config and False outside it"):
        load_shared(write(tmp_path, {}, config))


@pytest.mark.parametrize("lm_head", FAMILY.target.lm_head)
@pytest.mark.parametrize("prefix", FAMILY.target.prefixes)
def test_every_published_prefix_is_known(tmp_path: Path, prefix: str, lm_head: str) -> None:
    """https://github.com/vllm-project/vllm/pull/50355"""
    tensors = tiny_tensors(UNTIED, prefix=prefix)
    tensors[lm_head] = tensors.pop(LM_HEAD)
    shared = load_shared(write_checkpoint(tmp_path, UNTIED, tensors))
    assert torch.equal(shared.embedding.weight, tensors[f"{prefix}embed_tokens.weight"])
    assert torch.equal(shared.lm_head_weight, tensors[lm_head])
    assert torch.equal(getattr(shared.final_norm, "weight"), tensors[f"{prefix}norm.weight"])  # noqa: B009 - a Module


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            EMBEDDING,
            r"none of \['model.language_model.embed_tokens.weight', 'model.embed_tokens.weight', .* is on disk",
        ),
        (NORM, r"'model\.norm\.weight' is not on disk"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(SharedTensorError, match=message):
        load_shared(write(tmp_path, {name: None}))


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({LM_HEAD: torch.zeros(127, 64)}, ["lm_head.weight: expected [128, 64], found [127, 64]"]),
        ({NORM: torch.zeros(32)}, ["model.norm.weight: expected [64], found [32]"]),
        (
            {EMBEDDING: torch.zeros(128, 32), LM_HEAD: torch.zeros(128, 32)},
            [
                "model.embed_tokens.weight: expected [128, 64], found [128, 32]",
                "lm_head.weight: expected [128, 64], found [128, 32]",
            ],
        ),
        ({EMBEDDING: torch.zeros(())}, ["model.embed_tokens.weight: expected [64], found []", "lm_head.weight: expec"]),
    ],
)
def test_tensors_that_are_not_of_one_model_are_refused(
    tmp_path: Path, changes: dict[str, Tensor | None], problems: list[str]
) -> None:
    with pytest.raises(SharedTensorError, match="their shapes are not those of one model") as caught:
        load_shared(write(tmp_path, changes))
    found = [str(problem) for problem in caught.value.problems]
    assert len(found) == len(problems)
    assert all(problem.startswith(start) for problem, start in zip(found, problems, strict=True))


def test_a_quantised_lm_head_is_refused_by_the_name_of_its_scheme(tmp_path: Path) -> None:
    """Its numbers without their scales would be read as weights."""
    config = {**UNTIED, "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}
    root = write(tmp_path, {LM_HEAD: TENSORS[LM_HEAD].to(torch.float8_e4m3fn)}, config)
    with pytest.raises(UnsupportedQuantizationError, match=r"shared tensors of .* 1 tensors are stored as fp8"):
        load_shared(root)


@pytest.mark.parametrize("name", [EMBEDDING, NORM, LM_HEAD])
def test_a_lost_file_is_blamed_and_not_the_tensor_in_it(tmp_path: Path, name: str) -> None:
    layout = {"rest.safetensors": [n for n in TENSORS if n != name], "lost.safetensors": [name]}
    root = write(tmp_path, {}, shards=layout)
    assert torch.equal(load_shared(root).embedding.weight, TENSORS[EMBEDDING])
    (root / "lost.safetensors").unlink()
    with pytest.raises(BrokenCheckpointError, match=f"lost.safetensors: not on disk.*'{re.escape(name)}'"):
        load_shared(root)
    assert load_head(root).report.tensors


def test_the_rest_of_the_checkpoint_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/sgl-project/sglang/pull/30456: these names hold no 'mtp', and are found all the same."""
    seen: list[str] = []
    read = TensorReader.read
    monkeypatch.setattr(TensorReader, "read", lambda self, entry: (seen.append(entry.name), read(self, entry))[1])
    load_shared(write(tmp_path, {}))
    assert sorted(seen) == sorted([EMBEDDING, LM_HEAD, NORM])


@pytest.mark.parametrize("tied", [True, False])
def test_no_shared_tensor_is_held_twice(tmp_path: Path, tied: bool) -> None:
    root = write(tmp_path, {LM_HEAD: None} if tied else {}, tiny_config(tied=tied))
    with PeakBytes() as held:
        load_shared(root)
    vocabulary = TENSORS[EMBEDDING].nbytes
    assert held.peak <= (1 if tied else 2) * vocabulary + 1_000 < (2 if tied else 3) * vocabulary


def test_a_cast_is_asked_for(tmp_path: Path) -> None:
    shared = load_shared(write(tmp_path, {}), dtype=torch.float32)
    assert torch.equal(shared.lm_head_weight, TENSORS[LM_HEAD].float())
    assert torch.equal(shared.embedding.weight, TENSORS[EMBEDDING].float())


def test_the_family_can_be_named(tmp_path: Path) -> None:
    root = write(tmp_path, {}, {**UNTIED, "model_type": "llama"})
    assert load_shared(root, family="qwen3_5").lm_head_weight.shape == (128, 64)
    assert load_shared(root, family=FAMILY).lm_head_weight.shape == (128, 64)
    with pytest.raises(UnknownFamilyError):
        load_shared(root, family="llama")


# From a target


@pytest.mark.parametrize("tied", [True, False])
def test_a_targets_own_modules_are_borrowed_by_reference(tied: bool) -> None:
    target = tiny_target(tied=tied)
    shared = SharedTensors.of(target)
    assert shared.embedding is target.get_input_embeddings()
    assert shared.lm_head is target.lm_head
    assert shared.final_norm is target.model.norm
    assert shared.tied is tied
    with torch.no_grad():
        target.lm_head.weight.fill_(3)
    assert (shared.lm_head_weight == 3).all()


def test_a_target_without_a_language_model_head_is_refused() -> None:
    with pytest.raises(SharedTensorError, match="Qwen3_5TextModel: it has no output embedding"):
        SharedTensors.of(Qwen3_5TextModel(text_config(tiny_config())))


def test_the_target_can_be_given_when_the_head_is_loaded(tmp_path: Path) -> None:
    target = tiny_target(tied=False)
    head = load_head(write(tmp_path, {}), target=target)
    assert head.shared.lm_head is target.lm_head
    assert load_head(tmp_path, target=head.shared).shared is head.shared


# What belongs to whom


@pytest.fixture
def head(tmp_path: Path) -> DraftHead:
    return load_head(write(tmp_path, {}), target=tiny_target(tied=False), dtype=torch.float32)


def own_names(head: DraftHead) -> list[str]:
    return [name for name, parameter in head.named_parameters() if parameter.requires_grad]


def test_a_head_that_was_not_attached_says_so(tmp_path: Path) -> None:
    """https://github.com/vllm-project/speculators/pull/452"""
    head = load_head(write(tmp_path, {}))
    hidden = torch.zeros(2, 12, 64)
    with pytest.raises(NotAttachedError, match="target's embedding and lm_head are not attached"):
        head(TokenBatch.all_tokens(IDS), hidden, depths=1)
    with pytest.raises(NotAttachedError, match="target's embedding and lm_head are not attached") as caught:
        head.draft_step(IDS, hidden, torch.arange(12).expand(2, -1), cache=DynamicCache())
    assert "head.attach(load_shared(source))" in caught.value.remedy


def test_the_trainable_tensors_are_the_familys_and_stay_so(head: DraftHead) -> None:
    """https://github.com/vllm-project/speculators/pull/593"""
    expected = sorted(rule.head.replace("{d}", "0") for rule in FAMILY.rules)
    for change in (
        lambda: head,
        lambda: head.train(),
        lambda: head.eval(),
        lambda: head.train(),
        lambda: head.to(torch.bfloat16),
        lambda: head.attach(tiny_target(tied=True)),
        lambda: copy.deepcopy(head),
    ):
        assert sorted(own_names(change())) == expected
    assert sum(1 for _ in head.trainable_parameters()) == len(expected) == 15
    assert set(map(id, head.trainable_parameters())) == set(map(id, head.parameters()))


def test_the_target_is_in_no_state_dict_and_takes_no_gradient(head: DraftHead) -> None:
    """https://github.com/THUDM/slime/pull/709"""
    borrowed = [*head.shared.embedding.parameters(), *head.shared.lm_head.parameters()]
    for parameter in borrowed:
        parameter.requires_grad_()
    states = head(TokenBatch.all_tokens(IDS), torch.randn(2, 12, 64), depths=2)
    head.shared.logits(states[1].normed).logsumexp(-1).sum().backward()
    assert all(parameter.grad is None for parameter in borrowed)
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in head.parameters())
    assert not {id(p) for p in borrowed} & {id(p) for p in head.parameters()}
    assert not [name for name in head.state_dict() if "embed_tokens" in name or "lm_head" in name]


def test_a_copied_head_borrows_from_the_same_target(head: DraftHead) -> None:
    twin = copy.deepcopy(head)
    assert twin.shared.embedding is head.shared.embedding
    assert twin.shared.lm_head is head.shared.lm_head
    for name, value in twin.weights().items():
        assert torch.equal(value, head.weights()[name])
        assert value.data_ptr() != head.weights()[name].data_ptr()


def test_a_cast_of_the_head_leaves_the_target_and_the_rotary_frequencies_alone(head: DraftHead) -> None:
    frequencies = head.rotary.inner.inv_freq.clone()
    for cast in (lambda: head.to(torch.bfloat16), head.half, head.double, head.bfloat16):
        cast()
        assert head.rotary.inner.inv_freq.dtype == torch.float32
        assert torch.equal(head.rotary.inner.inv_freq, frequencies)
        assert head.shared.lm_head_weight.dtype == torch.float32
    assert {parameter.dtype for parameter in head.parameters()} == {torch.bfloat16}
    cos, _ = head.rotary(torch.zeros(1), torch.tensor([[4095]]))
    assert not torch.equal(cos[0, 0, :4], (4095 * frequencies.bfloat16()).float().cos())


def test_rotary_frequencies_follow_the_head_to_another_device(head: DraftHead) -> None:
    assert head.to("meta").rotary.inner.inv_freq.is_meta


def test_a_whole_head_can_be_pickled(head: DraftHead) -> None:
    """Launchers that start workers by `spawn` do it."""
    stream = io.BytesIO()
    torch.save(head, stream)
    stream.seek(0)
    again = torch.load(stream, weights_only=False)
    hidden = torch.randn(2, 12, 64)
    tokens = TokenBatch.all_tokens(IDS)
    assert torch.equal(again(tokens, hidden, depths=1)[0].normed, head(tokens, hidden, depths=1)[0].normed)


def test_embeddings_and_logits_have_no_graph_to_the_target() -> None:
    shared = tiny_head().shared
    assert isinstance(shared.lm_head, nn.Linear)
    assert shared.lm_head.weight.requires_grad
    assert not shared.embed(IDS).requires_grad
    assert not shared.lm_head_weight.requires_grad
    states = torch.randn(2, 64, requires_grad=True)
    shared.logits(states).sum().backward()
    assert states.grad is not None
    assert shared.lm_head.weight.grad is None


@pytest.mark.parametrize(
    ("lm_head", "problem"),
    [
        (nn.Linear(64, 128, bias=True), "lm_head: expected no bias, found one"),
        (nn.Linear(64, 128, bias=False).to(torch.float8_e4m3fn), "got torch.float8_e4m3fn"),
        (nn.Identity(), "lm_head: expected a module with a matrix 'weight'"),
    ],
    ids=["bias", "float8", "no weight"],
)
def test_an_lm_head_that_is_more_or_less_than_a_float_matrix_is_refused(lm_head: nn.Module, problem: str) -> None:
    with pytest.raises(SharedTensorError, match=re.escape(problem)):
        SharedTensors(nn.Embedding(128, 64), lm_head)


def test_whole_numbers_are_no_lm_head() -> None:
    lm_head = nn.Linear(64, 128, bias=False)
    lm_head.weight = nn.Parameter(torch.zeros(128, 64, dtype=torch.int8), requires_grad=False)
    with pytest.raises(SharedTensorError, match=re.escape("lm_head: expected a weight in one of")):
        SharedTensors(nn.Embedding(128, 64), lm_head)
