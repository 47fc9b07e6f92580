"""From a model's call to a TokenBatch: packed rows, padding on the left, vision-language models, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mtp_zoo as mz
from mtp_zoo.attach_batch import placeholder_ids, token_batch
from mtp_zoo.batch import IGNORED, PADDING
from mtp_zoo.errors import AttachError, BatchError
from tests.attaching import assert_same, gradients, ids, joint, make_checkpoint

FULL_ATTENTION = {"layer_types": ["full_attention", "full_attention"]}
"""Without the kernels of linear attention, transformers packs rows of such models only."""


class Config:
    """Where a model says which tokens are placeholders."""

    image_token_id = 7
    video_token_id = None
    audio_token_id = 9


def describe(**call: Any) -> list[list[int]]:
    return token_batch(call, None, object()).doc_ids.tolist()


TOKENS = torch.tensor([[11, 12, 13, 14, 15]])


def test_documents_follow_from_what_collators_pass() -> None:
    call: dict[str, Any] = {"input_ids": TOKENS, "labels": TOKENS}
    assert describe(**call) == [[0, 0, 0, 0, 0]]
    assert describe(**call, attention_mask=torch.tensor([[0, 1, 1, 1, 0]])) == [[PADDING, 0, 0, 0, PADDING]]
    assert describe(**call, position_ids=torch.tensor([[0, 1, 0, 1, 2]])) == [[0, 0, 1, 1, 1]]
    assert describe(**call, cu_seq_lens_q=torch.tensor([0, 2, 5], dtype=torch.int32)) == [[0, 0, 1, 1, 1]]
    assert describe(**call, cu_seqlens=torch.tensor([0, 2, 5])) == [[0, 0, 1, 1, 1]]
    assert describe(**call, seq_idx=torch.tensor([[0, 0, 1, 1, 1]], dtype=torch.int32)) == [[0, 0, 1, 1, 1]]


def test_positions_of_one_row_serve_all_and_axes_that_agree_are_one() -> None:
    call: dict[str, Any] = {"input_ids": TOKENS.expand(2, 5), "labels": TOKENS.expand(2, 5)}
    row = torch.tensor([[0, 1, 0, 1, 2]])
    assert describe(**call, position_ids=row) == [[0, 0, 1, 1, 1]] * 2
    assert describe(**call, position_ids=row.expand(2, 5)[None].expand(3, 2, 5)) == [[0, 0, 1, 1, 1]] * 2
    axes = torch.stack([row, row + 1, row])
    with pytest.raises(BatchError, match="rotary axes"):
        describe(**call, position_ids=axes)


def test_placeholders_come_from_the_config() -> None:
    assert placeholder_ids(Config()) == (7, 9)
    tokens = torch.tensor([[11, 7, 13, 14, 15]])
    batch = token_batch({"input_ids": tokens, "labels": tokens}, None, Config())
    # Depth 1 of slot 0 would read token 1, the placeholder.
    assert batch.slots(1).gate.tolist() == [[False, True, True, False, False]]


def test_a_mask_is_raw_and_not_shifted() -> None:
    mask = torch.tensor([[0, 0, 0, 1, 0]])
    batch = token_batch({"input_ids": TOKENS}, mask, object())
    assert batch.slots(1).gate.tolist() == [[False, True, False, False, False]]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"input_ids": None, "inputs_embeds": torch.zeros(1, 5, 4)}, "input_ids: missing"),
        ({"pixel_values": torch.zeros(1)}, "pixel_values: media"),
        ({"input_features": torch.zeros(1)}, "input_features: media"),
        ({"labels": None}, "labels: missing"),
        ({"labels": None, "shift_labels": TOKENS}, "shift_labels: pass labels"),
    ],
)
def test_calls_that_hold_no_text_with_labels_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(AttachError) as caught:
        token_batch({"input_ids": TOKENS, "labels": TOKENS, **changes}, None, object())
    assert any(says in str(problem) for problem in caught.value.problems)


def test_a_mask_of_four_axes_is_refused() -> None:
    """https://github.com/PaddlePaddle/PaddleFleet/pull/1646"""
    with pytest.raises(BatchError, match="mask"):
        describe(input_ids=TOKENS, labels=TOKENS, attention_mask=torch.ones(1, 1, 5, 5))


# Through a model


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("joint") / "full", **FULL_ATTENTION)


@pytest.fixture(scope="module")
def nested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("joint") / "nested", nested=True)


def test_packed_documents_train_like_documents_alone(full: Path) -> None:
    docs = [ids(1, 9, 1), ids(1, 5, 2)]
    model, alone = joint(full, depths=2, detach=()), joint(full, depths=2, detach=())
    positions = torch.cat([torch.arange(doc.shape[1]) for doc in docs])[None]
    row = torch.cat(docs, dim=1)
    packed_labels = torch.where(positions == 0, IGNORED, row)
    slots = torch.tensor([7.0 + 3.0, 6.0 + 2.0])
    call: dict[str, Any] = {"input_ids": row, "labels": packed_labels, "position_ids": positions, "use_cache": False}
    model(**call, mtp_counts=slots).mtp_loss.backward()
    sum(alone(input_ids=doc, labels=doc, mtp_counts=slots).mtp_loss for doc in docs).backward()
    assert_same(gradients(model), gradients(alone), 1e-4)


@pytest.mark.parametrize("kind", ["full", "linear"])
def test_padding_on_the_left_changes_nothing(kind: str, full: Path, tmp_path: Path) -> None:
    root = full if kind == "full" else make_checkpoint(tmp_path / "linear")
    text = ids(1, 8, 3)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.int64), text], dim=1)
    mask = torch.tensor([[0] * 4 + [1] * 8])
    model, plain = joint(root, depths=2), joint(root, depths=2)
    labels = torch.where(mask.bool(), padded, IGNORED)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    call: dict[str, Tensor] = {"input_ids": padded, "labels": labels, "attention_mask": mask, "position_ids": positions}
    out, expected = model(**call), plain(input_ids=text, labels=text)
    torch.testing.assert_close(out.mtp_loss, expected.mtp_loss, atol=1e-4, rtol=0)
    assert float(out.metrics["mtp/slots_2"]) == float(expected.metrics["mtp/slots_2"]) == 5


def vision_language(root: Path) -> Any:
    from transformers import Qwen3_5ForConditionalGeneration

    return Qwen3_5ForConditionalGeneration.from_pretrained(root, dtype="auto").train()


def test_the_text_part_of_a_vision_language_model(nested: Path, tmp_path: Path) -> None:
    model = mz.attach(vision_language(nested), depths=2)
    tokens = ids(2, 10)
    out = model(input_ids=tokens, labels=tokens)
    out.loss.backward()
    assert {name for name in gradients(model) if name.startswith("mtp_head.")} == {
        f"mtp_head.{name}" for name, _ in model.mtp_head.named_parameters()
    }
    text = mz.attach(text_model(model), mz.load_head(nested), depths=2)
    assert torch.equal(text(input_ids=tokens, labels=tokens).mtp_loss, out.mtp_loss)
    model.save_pretrained(tmp_path / "out")
    saved = mz.load_head(tmp_path / "out").state_dict()
    assert all(torch.equal(saved[name], value) for name, value in model.mtp_head.state_dict().items())
    again = vision_language(tmp_path / "out").state_dict()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items() if "mtp" not in name)


def text_model(model: Any) -> Any:
    """The language model inside, as a causal language model of its own."""
    from transformers import Qwen3_5ForCausalLM

    alone = Qwen3_5ForCausalLM(model.config.text_config).train()
    alone.model.load_state_dict(model.model.language_model.state_dict())
    alone.tie_weights()
    return alone


def test_images_are_refused_where_an_mtp_loss_is_wanted(nested: Path) -> None:
    model = mz.attach(vision_language(nested))
    tokens = ids(1, 8)
    with pytest.raises(AttachError, match="of text"):
        model(input_ids=tokens, labels=tokens, pixel_values=torch.zeros(4, 3))
