"""graft: a head goes back to the model that it belongs to, and to no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import mtp_zoo as mz
from mtp_zoo.checkpoint import CheckpointIndex, TensorReader
from mtp_zoo.errors import BrokenCheckpointError, ExportError, GraftMismatchError, HeadNotFoundError, OutputExistsError
from mtp_zoo.journal import UNDO, UPDATE
from tests.exporting import CONFIG, HEAD, ONE, TENSORS, TRUNK, TWO, same, snapshot, stored
from tests.stored_forms import Form, make, plain_form
from tests.tiny import tiny_config, tiny_tensors, write_checkpoint, write_index

TOKENS: dict[str, Any] = {
    "model": {"type": "BPE", "vocab": {f"t{number}": number for number in range(120)}},
    "added_tokens": [{"id": 120, "content": "<end>"}, {"id": 121, "content": "<free>"}],
}
GRAFTED = "the head was loaded from"


def write_tokens(root: Path, **changes: int | None) -> Path:
    """A tokenizer.json: `TOKENS`, with other ids for some of the model's tokens, None for none."""
    vocab = TOKENS["model"]["vocab"] | changes
    kept = {token: number for token, number in vocab.items() if number is not None}
    (root / "tokenizer.json").write_text(json.dumps({**TOKENS, "model": {"type": "BPE", "vocab": kept}}))
    return root


def write_trunk(root: Path, config: dict[str, Any] = CONFIG, tensors: dict[str, Tensor] = TENSORS) -> Path:
    """A checkpoint without its head, its weights changed as by fine-tuning, in two shards."""
    names = sorted(name for name in tensors if not name.startswith("mtp."))
    tuned = {name: tensors[name] + 1 for name in names}
    return write_tokens(write_checkpoint(root, config, tuned, shards={ONE: names[:10], TWO: names[10:]}))


@pytest.fixture(scope="module")
def donor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(write_checkpoint(tmp_path_factory.mktemp("donor") / "m", CONFIG, TENSORS))


@pytest.fixture
def trunk(tmp_path: Path) -> Path:
    return write_trunk(tmp_path / "trunk")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_a_lost_head_comes_back_byte_for_byte_beside_the_tuned_trunk(donor: Path, trunk: Path, out: Path) -> None:
    """https://github.com/unslothai/unsloth/pull/11042, https://github.com/unslothai/unsloth/issues/6361"""
    before = snapshot(trunk), snapshot(donor)
    report = mz.graft(donor, trunk, out)
    assert (report.files_linked, report.files_rewritten) == (2, 0)
    assert same(stored(out), {**stored(trunk), **{name: TENSORS[name] for name in HEAD}}, [*TRUNK, *HEAD])
    assert mz.load_head(out).report.notices == ()
    assert (snapshot(trunk), snapshot(donor)) == before
    assert [notice.partition(" from")[0] + " from" for notice in report.notices] == [GRAFTED]


def test_a_head_that_is_there_is_replaced(donor: Path, tmp_path: Path, out: Path) -> None:
    stale = {**TENSORS, **{name: torch.zeros_like(TENSORS[name]) for name in HEAD}}
    mz.graft(donor, write_tokens(write_checkpoint(tmp_path / "stale", CONFIG, stale)), out)
    assert same(stored(out), TENSORS, [*TRUNK, *HEAD])


def test_a_dtype_and_copies_are_passed_on(donor: Path, trunk: Path, out: Path) -> None:
    report = mz.graft(donor, trunk, out, dtype=torch.float32, copy=True)
    assert {stored(out)[name].dtype for name in HEAD} == {torch.float32}
    assert report.files_linked == 0


@pytest.mark.parametrize(
    ("fields", "facts"),
    [
        (
            {"hidden": 96},
            [
                "hidden_size: the head's trunk has 64, this one 96",
                "embedding: model.embed_tokens.weight is [128, 64] beside the head, model.embed_tokens.weight [128, 96] here",
                "final norm: model.norm.weight is [64] beside the head, model.norm.weight [96] here",
            ],
        ),
        ({"num_attention_heads": 4}, ["num_attention_heads: the head's trunk has 2, this one 4"]),
        ({"num_key_value_heads": 2}, ["num_key_value_heads: the head's trunk has 1, this one 2"]),
        ({"head_dim": 64}, ["head_dim: the head's trunk has 32, this one 64"]),
        (
            {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "full_attention"]},
            ["num_hidden_layers: the head's trunk has 2, this one 3"],
        ),
        (
            {"intermediate_size": 96},
            [
                f"depths.0.block.mlp.{name}_proj.weight: the base needs {shape[0]}, the head has {shape[1]}"
                for name, shape in (
                    ("down", ([64, 96], [64, 128])),
                    ("gate", ([96, 64], [128, 64])),
                    ("up", ([96, 64], [128, 64])),
                )
            ],
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_trunk_is_refused_with_every_fact(
    fields: dict[str, Any], facts: list[str], donor: Path, tmp_path: Path, out: Path
) -> None:
    config = tiny_config(**fields)
    other = write_trunk(tmp_path / "other", config, tiny_tensors(config))
    with pytest.raises(GraftMismatchError, match=f"{len(facts)} facts differ") as caught:
        mz.graft(donor, other, out)
    assert [*caught.value.problems] == facts
    assert not out.exists()


def test_facts_of_trunk_and_tokens_are_told_together(donor: Path, tmp_path: Path, out: Path) -> None:
    config = tiny_config(hidden=96)
    other = write_tokens(write_trunk(tmp_path / "other", config, tiny_tensors(config)), t3=4, t4=3)
    with pytest.raises(GraftMismatchError) as caught:
        mz.graft(donor, other, out)
    assert [str(problem).partition(":")[0] for problem in caught.value.problems] == [
        "hidden_size",
        "embedding",
        "final norm",
        "tokens",
    ]


def test_another_family_is_refused(tmp_path: Path, donor: Path, out: Path) -> None:
    config, tensors = make(plain_form("glm4_moe"))
    kept = {name: value for name, value in tensors.items() if not name.startswith("model.layers.2.")}
    with pytest.raises(GraftMismatchError, match=r"the head is qwen3_5, model_type \['glm4_moe'\] is glm4_moe"):
        mz.graft(donor, write_checkpoint(tmp_path / "other", config, kept), out)


def test_a_trunk_without_an_embedding_is_refused(donor: Path, tmp_path: Path, out: Path) -> None:
    names = [name for name in TRUNK if "embed_tokens" not in name]
    other = write_checkpoint(tmp_path / "other", CONFIG, {name: TENSORS[name] for name in names})
    with pytest.raises(GraftMismatchError, match=r"embedding: none of .*model\.embed_tokens\.weight"):
        mz.graft(donor, other, out)


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"t3": 4, "t4": 3}, "tokens: 2 differ beside the head and here: 't3' is 3 and 4, 't4' is 4 and 3"),
        ({"t119": None, "new": 119}, "tokens: 1 differ beside the head and here: 119 is 't119' and 'new'"),
    ],
)
def test_tokens_with_other_ids_are_refused(
    changes: dict[str, int | None], fact: str, donor: Path, trunk: Path, out: Path
) -> None:
    write_tokens(trunk, **changes)
    with pytest.raises(GraftMismatchError) as caught:
        mz.graft(donor, trunk, out)
    (problem,) = caught.value.problems
    assert problem == fact


def resized(root: Path, rows: int) -> Path:
    """A trunk whose embedding and lm_head have another number of rows."""
    config = tiny_config(tied=False, vocab=rows)
    return write_trunk(root, config, tiny_tensors(config))


def test_rows_may_be_added_where_the_tokens_show_that_the_old_ones_stayed(tmp_path: Path, out: Path) -> None:
    """Added tokens and padding: the head borrows embedding and lm_head, and has no row of its own."""
    config = tiny_config(tied=False)
    donor = write_tokens(write_checkpoint(tmp_path / "donor", config, tiny_tensors(config)))
    trunk = write_tokens(resized(tmp_path / "trunk", 160), extra=122)
    report = mz.graft(donor, trunk, out)
    assert report.notices[:3] == (
        "embedding has 128 rows beside the head and 160 here",
        "lm_head has 128 rows beside the head and 160 here",
        "1 tokens are only here: 'extra'",
    )
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 160
    assert mz.load_head(out).report.notices == ()


@pytest.mark.parametrize("side", ["donor", "trunk"])
def test_rows_that_differ_are_refused_where_the_tokens_are_not_known(side: str, tmp_path: Path, out: Path) -> None:
    config = tiny_config(tied=False)
    donor = write_tokens(write_checkpoint(tmp_path / "donor", config, tiny_tensors(config)))
    trunk = resized(tmp_path / "trunk", 160)
    (tmp_path / side / "tokenizer.json").unlink()
    with pytest.raises(GraftMismatchError) as caught:
        mz.graft(donor, trunk, out)
    unknown = f"and tokens were not compared: no tokenizer.json or vocab.json that can be read in {tmp_path / side}"
    assert [*caught.value.problems] == [
        f"embedding has 128 rows beside the head and 160 here, {unknown}",
        f"lm_head has 128 rows beside the head and 160 here, {unknown}",
    ]


def test_what_could_not_be_compared_is_told_where_it_does_no_harm(donor: Path, trunk: Path, out: Path) -> None:
    (trunk / "tokenizer.json").unlink()
    first, _ = mz.graft(donor, trunk, out).notices
    assert first == f"tokens were not compared: no tokenizer.json or vocab.json that can be read in {trunk}"


def test_reserved_places_that_were_put_to_use_are_told(donor: Path, trunk: Path, out: Path) -> None:
    used = {**TOKENS, "added_tokens": [TOKENS["added_tokens"][0], {"id": 121, "content": "<tool>"}]}
    (trunk / "tokenizer.json").write_text(json.dumps(used))
    assert mz.graft(donor, trunk, out).notices[0] == "1 added tokens have other texts here, ids 121"


def test_a_trunk_with_another_surrounding_is_told(donor: Path, tmp_path: Path, out: Path) -> None:
    rope = {**CONFIG["rope_parameters"], "rope_theta": 5e6}
    trunk = write_trunk(tmp_path / "trunk", tiny_config(rope_parameters=rope, rms_norm_eps=1e-5))
    told = mz.graft(donor, trunk, out).notices
    assert told[0].startswith("rope_parameters: the head's trunk has {")
    assert told[1] == "rms_norm_eps: the head's trunk has 1e-06, this one 1e-05, and engines take this one"


def test_spellings_of_one_surrounding_are_no_difference(donor: Path, tmp_path: Path, out: Path) -> None:
    config = tiny_config()
    rope = dict(config.pop("rope_parameters"))
    del config["hidden_act"]
    older = {**config, "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    assert len(mz.graft(donor, write_trunk(tmp_path / "trunk", older), out).notices) == 1


def test_a_head_under_another_prefix_is_told_and_left(donor: Path, tmp_path: Path, out: Path) -> None:
    tensors = {**{name: TENSORS[name] for name in TRUNK}, "model.mtp.fc.weight": TENSORS["mtp.fc.weight"]}
    trunk = write_tokens(write_checkpoint(tmp_path / "trunk", CONFIG, tensors))
    assert (
        mz.graft(donor, trunk, out)
        .notices[0]
        .startswith("1 tensors here look like a head under another prefix, model.mtp.fc.weight for one")
    )


def test_a_source_without_a_head_is_refused(trunk: Path, tmp_path: Path, out: Path) -> None:
    with pytest.raises(HeadNotFoundError, match="none of its 15 tensors"):
        mz.graft(trunk, write_trunk(tmp_path / "other"), out)


def test_an_adapter_that_is_not_merged_is_refused(donor: Path, tmp_path: Path, out: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ExportError, match=r"found a LoRA adapter(.|\n)*merge_and_unload"):
        mz.graft(donor, tmp_path, out)


def test_what_export_refuses_is_refused_before_a_tensor_is_read(
    donor: Path, trunk: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(TensorReader, "read_into", read)
    with pytest.raises(GraftMismatchError):
        mz.graft(donor, write_tokens(trunk, t3=4, t4=3), out)
    out.mkdir()
    with pytest.raises(OutputExistsError):
        mz.graft(donor, trunk, out)
    (trunk / ONE).unlink()
    with pytest.raises(BrokenCheckpointError):
        mz.graft(donor, trunk, out.with_name("other"))


def test_a_routers_bias_that_was_rounded_comes_back_whole(tmp_path: Path, out: Path) -> None:
    """https://github.com/ISEEKYAN/Megatron-LM/pull/81: an export had cast it, which is no dtype to keep."""
    config, tensors = make(plain_form("glm4_moe"))
    bias = "model.layers.2.mlp.gate.e_score_correction_bias"
    assert tensors[bias].dtype == torch.float32
    tensors[bias] = tensors[bias] + 2.0**-14
    assert not torch.equal(tensors[bias].bfloat16().float(), tensors[bias])
    donor = write_checkpoint(tmp_path / "donor", config, tensors)
    mz.graft(donor, write_checkpoint(tmp_path / "cast", config, {**tensors, bias: tensors[bias].bfloat16()}), out)
    assert same(stored(out), tensors, tensors)


LOST = "model-00003-of-00003.safetensors"


def lose(what: str, root: Path) -> None:
    """Let a head get lost, all of it in one file of its own."""
    if what == "file":
        (root / LOST).unlink()
    elif what == "bytes":
        (root / LOST).write_bytes((root / LOST).read_bytes()[:100])
    elif what == "content":
        save_file({"mtp.norm.weight": TENSORS["mtp.norm.weight"]}, root / LOST)
    elif what == "place":
        write_index(root, {name: ONE if name in TRUNK[:10] or name in HEAD else TWO for name in TENSORS})
    else:
        save_file({name: TENSORS[name] + 1 for name in HEAD}, root / "zz.safetensors")


@pytest.mark.parametrize("in_place", [False, True], ids=["beside", "in place"])
@pytest.mark.parametrize("what", ["file", "bytes", "content", "place", "copy"])
def test_a_checkpoint_that_is_whole_but_for_its_head_gets_one(
    what: str, in_place: bool, donor: Path, tmp_path: Path
) -> None:
    """https://github.com/huggingface/huggingface_hub/pull/4728: an index that lists a head which its shard does not hold."""
    layout = {ONE: TRUNK[:10], TWO: TRUNK[10:], LOST: HEAD}
    trunk = write_tokens(write_checkpoint(tmp_path / "trunk", CONFIG, TENSORS, shards=layout))
    lose(what, trunk)
    with pytest.raises(BrokenCheckpointError):
        mz.load_head(trunk)
    mz.graft(donor, trunk, None if in_place else tmp_path / "out", in_place=in_place)
    out = trunk if in_place else tmp_path / "out"
    assert same(stored(out), TENSORS, TENSORS)
    assert CheckpointIndex.open(out).faults == ()


@pytest.mark.parametrize("what", ["file", "bytes"])
def test_one_tensor_of_the_trunk_beside_a_lost_head_is_one_too_many(
    what: str, donor: Path, tmp_path: Path, out: Path
) -> None:
    """https://github.com/sgl-project/sglang/pull/32279"""
    layout = {ONE: TRUNK[:10], TWO: TRUNK[10:-1], LOST: [*HEAD, TRUNK[-1]]}
    trunk = write_tokens(write_checkpoint(tmp_path / "trunk", CONFIG, TENSORS, shards=layout))
    lose(what, trunk)
    with pytest.raises(BrokenCheckpointError, match=LOST):
        mz.graft(donor, trunk, out)


def test_an_update_that_was_cut_short_is_taken_back_before_the_next_one(donor: Path, trunk: Path) -> None:
    """Between its files there is no config.json, and so no checkpoint that could be compared with the source."""
    mz.graft(donor, trunk, in_place=True)
    after = stored(trunk)
    (trunk / UNDO).rename(trunk / UPDATE)
    (trunk / "config.json").unlink()
    mz.graft(donor, trunk, in_place=True)
    assert same(stored(trunk), after, after)
    mz.rollback(trunk)
    with pytest.raises(HeadNotFoundError):
        mz.load_head(trunk)


@pytest.mark.parametrize("origin", ["packed", "one_by_one"])
def test_experts_take_the_layout_of_the_head_that_they_replace(origin: Any, tmp_path: Path, out: Path) -> None:
    """https://github.com/ISEEKYAN/mbridge/pull/145, https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/4329"""
    other: Any = {"packed": "one_by_one", "one_by_one": "packed"}[origin]
    config, expected = make(Form("qwen3_5_moe", other))
    emptied = {n: torch.zeros_like(t) if n.startswith("mtp.") else t for n, t in expected.items()}
    source = write_checkpoint(tmp_path / "source", *make(Form("qwen3_5_moe", origin)))
    mz.graft(source, write_checkpoint(tmp_path / "trunk", config, emptied), out)
    assert stored(out).keys() == expected.keys()
    assert same(stored(out), expected, expected)


@pytest.mark.parametrize("origin", ["packed", "one_by_one"])
def test_experts_keep_the_layout_of_their_source_where_the_head_was_lost(
    origin: Any, tmp_path: Path, out: Path
) -> None:
    """https://github.com/ISEEKYAN/mbridge/pull/145: the trunk's own experts say nothing of the head's."""
    config, tensors = make(Form("qwen3_5_moe", origin))
    kept = {name: value for name, value in tensors.items() if not name.startswith("mtp.")}
    source = write_checkpoint(tmp_path / "source", config, tensors)
    mz.graft(source, write_checkpoint(tmp_path / "trunk", config, kept), out)
    assert same(stored(out), tensors, tensors)
