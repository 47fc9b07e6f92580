"""Grafts into what the tools write that lose a head: the head's bytes, the trunk's, and lists that both engines read right.

What the lists say behind a graft stands here as literals.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import mtp_zoo as mz
from mtp_zoo.cli import app
from tests.exporting import same, stored
from tests.quantizing import built_quantized, settings_of
from tests.receivers import GPTQ, RECEIVERS, Receiver, save_pretrained
from tests.stored_forms import head_of, make, plain_form
from tests.tiny import tiny_config, tiny_tensors, write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

MTP = "mtp.layers.0."
PARTS = [
    "mtp.fc",
    *(f"{MTP}mlp.{name}_proj" for name in ("down", "gate", "up")),
    *(f"{MTP}self_attn.{name}_proj" for name in ("k", "o", "q", "v")),
]
NAMES = [*PARTS, f"{MTP}mlp.gate_up_proj", f"{MTP}self_attn.qkv_proj"]
"""Parts as the checkpoint names them, and what both engines fuse them into."""


class Grafting:
    """A model, its head's tensors, and its trunk's, flat or inside a vision-language model."""

    def __init__(self, root: Path, *, nested: bool) -> None:
        self.config = tiny_config(nested=nested, tied=False)
        self.prefix = "model.language_model." if nested else "model."
        tensors = tiny_tensors(self.config, prefix=self.prefix)
        self.head = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
        self.trunk = {name: tensor for name, tensor in tensors.items() if name not in self.head}
        self.donor = write_checkpoint(root / "donor", self.config, tensors)


@pytest.fixture(scope="module", params=[False, True], ids=["text", "vision-language"])
def grafting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Grafting:
    return Grafting(tmp_path_factory.mktemp("grafting"), nested=request.param)


def listed(grafting: Grafting) -> list[str]:
    """What the tools list of the trunk."""
    linear = f"{grafting.prefix}layers.0.linear_attn."
    inner = [name.removesuffix(".weight") for name in grafting.trunk if name.startswith(linear)]
    return ["lm_head", *(name for name in inner if "_proj" in name)]


def lists_behind(grafting: Grafting) -> dict[str, dict[str, Any]]:
    """By form, what the quantisation config says of floats once the head is there."""
    old = listed(grafting)
    floats = ["lm_head", f"{grafting.prefix}embed_tokens", f"{grafting.prefix}layers.0.linear_attn.conv1d", *old[1:]]
    compressed = {"ignore": [*old, r"re:^mtp(\.|$)"]}
    modelopt = {"ignore": [*old, "mtp.*"]}
    return {
        "compressed-w4a16": compressed,
        "compressed-fp8": compressed,
        "compressed-nvfp4": compressed,
        "modelopt-nvfp4": modelopt,
        "modelopt-fp8": modelopt,
        "gptq": {"dynamic": {r"-:^mtp(\.|$)": {}}},
        "awq": {"modules_to_not_convert": sorted([*NAMES, *floats])},
        "fp8-blocks": {"modules_to_not_convert": sorted([*old, *NAMES])},
    }


def sorted_lists(settings: dict[str, Any]) -> dict[str, Any]:
    """Lists of plain names in order; where patterns are, the order is the file's."""
    key = "modules_to_not_convert"
    return {**settings, key: sorted(settings[key])} if isinstance(settings.get(key), list) else settings


@pytest.mark.parametrize("receiver", RECEIVERS, ids=str)
def test_a_float_head_goes_into_every_quantised_form(receiver: Receiver, grafting: Grafting, tmp_path: Path) -> None:
    """https://github.com/sgl-project/sglang/issues/35797, https://github.com/vllm-project/vllm/issues/43304"""
    root = receiver.write(tmp_path / "quantised", grafting.config, grafting.trunk)
    before = stored(root), settings_of(root)
    report = mz.graft(grafting.donor, root, tmp_path / "out")
    out = stored(tmp_path / "out")
    assert same(out, {**before[0], **grafting.head}, [*before[0], *grafting.head])
    assert out.keys() == {**before[0], **grafting.head}.keys()
    assert (report.files_linked, report.files_rewritten) == (2, 0)
    assert built_quantized(tmp_path / "out", "qwen3_5") == set()
    assert sorted_lists(settings_of(tmp_path / "out")) == {**before[1], **lists_behind(grafting)[receiver.name]}
    assert mz.load_head(tmp_path / "out").report.notices == ()


def test_files_that_repeat_the_settings_say_the_same(grafting: Grafting, tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm-ascend/pull/502"""
    told: dict[str, Any] = {}
    for receiver in (one for one in RECEIVERS if one.files([])):
        root = receiver.write(tmp_path / receiver.name, grafting.config, grafting.trunk)
        mz.graft(grafting.donor, root, tmp_path / f"{receiver.name}-out")
        for file in receiver.files([]):
            told[receiver.name] = json.loads((tmp_path / f"{receiver.name}-out" / file).read_text())
    assert told.keys() == {"modelopt-nvfp4", "modelopt-fp8", "gptq"}
    assert told["gptq"] == {**GPTQ, "dynamic": {r"-:^mtp(\.|$)": {}}}
    for name in ("modelopt-nvfp4", "modelopt-fp8"):
        assert told[name]["quantization"]["exclude_modules"] == [*listed(grafting), "mtp.*"]


def test_a_list_that_was_complete_leaves_every_file_as_it_was(grafting: Grafting, tmp_path: Path) -> None:
    """Tools that were told of the head, and lost its tensors all the same."""
    root = RECEIVERS[0].write(tmp_path / "quantised", grafting.config, grafting.trunk)
    config = json.loads((root / "config.json").read_text())
    config["quantization_config"]["ignore"].append("re:.*mtp.*")
    (root / "config.json").write_text(json.dumps(config))
    mz.graft(grafting.donor, root, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_bytes() == (root / "config.json").read_bytes()


IN_STACK = r"^model\.layers\.2(\.|$)"
DECODER = r"^model\.decoder(\.|$)"
LISTS_IN_STACK: dict[str, dict[str, Any]] = {
    "compressed-w4a16": {"ignore": ["lm_head", f"re:{IN_STACK}", f"re:{DECODER}"]},
    "modelopt-nvfp4": {"ignore": ["lm_head", "model.layers.2.*", "model.decoder.*"]},
    "gptq": {"dynamic": {f"-:{IN_STACK}": {}, f"-:{DECODER}": {}}},
}


@pytest.mark.parametrize("receiver", [one for one in RECEIVERS if one.name in LISTS_IN_STACK], ids=str)
def test_a_head_behind_the_trunks_layers_is_listed_under_its_layer_and_its_engines_name(
    receiver: Receiver, tmp_path: Path
) -> None:
    config, tensors = make(plain_form("glm4_moe"))
    head = {name: tensors[name] for name in head_of("glm4_moe", tensors)}
    trunk = {name: tensor for name, tensor in tensors.items() if name not in head}
    root = receiver.write(tmp_path / "quantised", config, trunk)
    before = settings_of(root)
    mz.graft(write_checkpoint(tmp_path / "donor", config, tensors), root, tmp_path / "out")
    assert same(stored(tmp_path / "out"), head, head)
    assert settings_of(tmp_path / "out") == {**before, **LISTS_IN_STACK[receiver.name]}


@pytest.mark.parametrize("form", ["gptq", "modelopt-nvfp4"])
def test_a_quantised_lm_head_has_another_name_or_shape_and_is_no_difference(
    form: str, grafting: Grafting, tmp_path: Path
) -> None:
    receiver = next(one for one in RECEIVERS if one.name == form)
    linear = "model.layers.9.self_attn.lm_proj"
    renamed = {name.replace("lm_head", linear): tensor for name, tensor in grafting.trunk.items()}
    root = receiver.write(tmp_path / "quantised", grafting.config, renamed)
    tensors = {name.replace(linear, "lm_head"): tensor for name, tensor in stored(root).items()}
    assert "lm_head.weight" not in tensors or tensors["lm_head.weight"].dtype == torch.uint8
    write_checkpoint(tmp_path / "whole", json.loads((root / "config.json").read_text()), tensors)
    mz.graft(grafting.donor, tmp_path / "whole", tmp_path / "out")
    assert same(stored(tmp_path / "out"), grafting.head, grafting.head)


@pytest.mark.parametrize(
    ("architecture", "lora"),
    [("AutoModelForCausalLM", False), ("AutoModelForCausalLM", True), ("Qwen3_5ForConditionalGeneration", False)],
    ids=["text", "merged LoRA", "vision-language"],
)
def test_a_head_goes_into_what_transformers_saves_and_that_opens_again(
    architecture: str, lora: bool, tmp_path: Path
) -> None:
    """https://github.com/unslothai/unsloth/pull/11042, https://github.com/modelscope/ms-swift/issues/9802"""
    import transformers

    grafting = Grafting(tmp_path, nested=True)
    saved = save_pretrained(grafting.donor, tmp_path / "saved", architecture=architecture, lora=lora)
    trunk = stored(saved)
    assert not any(name.startswith("mtp.") for name in trunk)
    tuned = [name for name in grafting.trunk if not same(trunk, grafting.trunk, [name])]
    assert [name.rpartition("layers.")[2] for name in tuned] == [
        f"1.self_attn.{part}_proj.weight" for part in ("q", "v") if lora
    ]
    report = mz.graft(grafting.donor, saved, tmp_path / "out")
    assert same(stored(tmp_path / "out"), {**trunk, **grafting.head}, [*trunk, *grafting.head])
    assert report.notices[-1].startswith(f"the head was loaded from {grafting.donor}, the trunk from {saved}: ")
    ids = torch.arange(16)[None]
    kind = getattr(transformers, architecture)
    with torch.no_grad():
        before, after = (kind.from_pretrained(root)(input_ids=ids).logits for root in (saved, tmp_path / "out"))
    assert torch.equal(before, after)


def test_what_is_left_of_acceptance_behind_a_merge_is_counted(tmp_path: Path) -> None:
    """https://github.com/modelscope/ms-swift/issues/9802: the head of the release on a trunk that was tuned since."""
    grafting = Grafting(tmp_path, nested=False)
    merged = save_pretrained(grafting.donor, tmp_path / "merged", lora=True)
    report = mz.graft(grafting.donor, merged, tmp_path / "out")
    assert "measure acceptance (mtp-zoo eval) before serving" in report.notices[-1]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"input_ids": [5, 6, 7]}) + "\n")
    words = ["eval", str(tmp_path / "out"), "--prompts", str(prompts), "-k", "2", "--max-new-tokens", "6", "--json"]
    counted = json.loads(CliRunner().invoke(app, words).stdout)
    assert counted["lossless"] is True
    assert 0 <= counted["accepted"] <= counted["drafted"] == 2 * counted["verify_steps"]


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "qwen3_5_moe"])
def test_a_head_goes_into_what_transformers_saves_of_a_model_with_experts(family: str, tmp_path: Path) -> None:
    config, tensors = make(plain_form(family))
    donor = write_checkpoint(tmp_path / "donor", config, tensors)
    saved = save_pretrained(donor, tmp_path / "saved")
    head = {name: tensors[name] for name in head_of(family, tensors)}
    assert not stored(saved).keys() & head.keys()
    mz.graft(donor, saved, tmp_path / "out")
    assert same(stored(tmp_path / "out"), {**stored(saved), **head}, [*stored(saved), *head])
