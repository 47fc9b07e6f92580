"""What an export changes in the files that describe quantisation, and what it tells because no file can say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor
from typer.testing import CliRunner

import mtp_zoo as mz
from mtp_zoo.cli import app
from mtp_zoo.exporter import ExportReport
from tests.exporting import stored
from tests.quantizing import BLOCKS, decoded, make_fp8
from tests.stored_forms import Form, head_of, make, plain_form
from tests.tiny import write_checkpoint

DENSE = plain_form("qwen3_5")
PACKED = Form("qwen3_5_moe", "packed")


def reexported(base: Path, out: Path) -> ExportReport:
    """The base with its own head."""
    return mz.export(mz.load_head(base), base=base, out=out)


def with_side_files(root: Path, **files: Any) -> Path:
    for stem, content in files.items():
        (root / f"{stem}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return root


def float_base(root: Path, **files: Any) -> tuple[Path, dict[str, Tensor]]:
    config, tensors = make(PACKED)
    return with_side_files(write_checkpoint(root, config, tensors), **files), tensors


def test_the_list_of_modelopts_own_file_is_completed(tmp_path: Path) -> None:
    listed = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    base, _ = float_base(tmp_path / "base", hf_quant_config=listed)
    reexported(base, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    assert written["quantization"]["exclude_modules"] == ["lm_head", "mtp.*"]
    assert written["producer"] == listed["producer"]
    assert json.loads((base / "hf_quant_config.json").read_text()) == listed


def test_a_methods_own_file_is_completed_in_its_order(tmp_path: Path) -> None:
    """GPTQModel writes its settings twice, and an older AutoAWQ leaves out what they are settings of."""
    gptq = {"bits": 4, "dynamic": {r"+:.*layers.*": {"bits": 8}}, "quant_method": "gptq", "meta": {"uri": "x"}}
    base, _ = float_base(tmp_path / "base", quantize_config=gptq, quant_config={"w_bit": 4, "zero_point": True})
    reexported(base, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    assert [*written.items()] == [*(gptq | {"dynamic": {r"-:^mtp(\.|$)": {}, **gptq["dynamic"]}}).items()]
    assert [*written["dynamic"]] == [r"-:^mtp(\.|$)", r"+:.*layers.*"]
    older = json.loads((tmp_path / "out" / "quant_config.json").read_text())
    assert older.keys() == {"w_bit", "zero_point", "modules_to_not_convert"}
    assert {"mtp.fc", "lm_head", "mtp.layers.0.mlp.experts"} <= {*older["modules_to_not_convert"]}


def test_a_methods_own_file_that_is_complete_is_copied_as_it_is(tmp_path: Path) -> None:
    text = json.dumps({"bits": 4, "dynamic": {r"-:^mtp(\.|$)": {}}})
    base, _ = float_base(tmp_path / "base", quantize_config=text)
    reexported(base, tmp_path / "out")
    assert (tmp_path / "out" / "quantize_config.json").read_text() == text


def test_a_description_tensor_by_tensor_says_that_the_head_is_float(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm-ascend/pull/502: the description has no entry for the head."""
    told = {"model.layers.0.mlp.up_proj.weight": "W8A8_DYNAMIC", "mtp.layers.0.self_attn.q_proj.weight_scale": "W8A8"}
    base, tensors = float_base(tmp_path / "base", quant_model_description=told)
    reexported(base, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "quant_model_description.json").read_text())
    head = head_of("qwen3_5_moe", tensors)
    experts = tensors["mtp.layers.0.mlp.experts.down_proj"].shape[0]
    parts = [
        f"mtp.layers.0.mlp.experts.{e}.{part}_proj.weight" for e in range(experts) for part in ("gate", "up", "down")
    ]
    assert written == {"model.layers.0.mlp.up_proj.weight": "W8A8_DYNAMIC", **dict.fromkeys([*head, *parts], "FLOAT")}


def test_other_files_that_name_modules_of_the_head_are_reported_and_copied(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm-ascend/pull/502"""
    recipe = {"layers": ["mtp.layers.0.self_attn.q_proj"]}
    base, _ = float_base(tmp_path / "base", my_recipe=recipe, other={"layers": ["model.layers.0"]}, broken="{")
    report = reexported(base, tmp_path / "out")
    (notice,) = report.notices
    assert notice.startswith("my_recipe.json names modules of the head, 'mtp.layers.0.self_attn.q_proj' for one")
    assert json.loads((tmp_path / "out" / "my_recipe.json").read_text()) == recipe


def test_a_method_without_a_known_list_is_reported(tmp_path: Path) -> None:
    config, tensors = make(DENSE)
    base = write_checkpoint(tmp_path / "base", {**config, "quantization_config": {"quant_method": "hqq"}}, tensors)
    report = reexported(base, tmp_path / "out")
    assert report.notices == (
        "the head is stored as floats, and where hqq lists what it leaves alone is not known: check its config",
    )


def test_what_an_engine_quantises_whatever_is_listed_is_reported(tmp_path: Path) -> None:
    config, tensors = make(PACKED)
    config = {**config, "quantization_config": {"quant_method": "gptq", "bits": 4, "dynamic": {}}}
    report = reexported(write_checkpoint(tmp_path / "base", config, tensors), tmp_path / "out")
    assert report.notices == ("sglang builds mtp.layers.0.mlp.experts quantised, whatever the config lists",)


def test_a_head_that_sglang_names_as_trunk_layers_is_reported_with_the_way_to_serve_it(tmp_path: Path) -> None:
    config, tensors = make(plain_form("qwen3_next"))
    config = {**config, "quantization_config": dict(BLOCKS.settings)}
    report = reexported(write_checkpoint(tmp_path / "base", config, tensors), tmp_path / "out")
    (notice,) = report.notices
    assert "--speculative-draft-model-quantization unquant" in notice


def test_the_command_stores_floats_and_prints_what_to_know(tmp_path: Path) -> None:
    config, tensors = make_fp8(plain_form("qwen3_next"), BLOCKS)
    base = write_checkpoint(tmp_path / "base", config, tensors)
    result = CliRunner().invoke(app, ["export", str(base), str(tmp_path / "out"), "--dtype", "bf16"])
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].startswith(
        "notice: sglang builds this head under names of the trunk's layers"
    )
    assert stored(tmp_path / "out").keys() == decoded(tensors, BLOCKS).keys()
