"""Published checkpoints: every tensor that is listed of a head is claimed, with its shape and dtype, and nothing else is."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mtp_zoo.errors import (
    HeadMismatchError,
    HeadNotFoundError,
    MTPZooError,
    UnresolvedFamilyError,
    UnsupportedQuantizationError,
)
from mtp_zoo.keymap import FLOAT_DTYPES
from mtp_zoo.modelconfig import ModelConfig
from mtp_zoo.registry import get_family, resolve
from mtp_zoo_conformance.inventories import SOURCES, Claim, Inventory, Source, claim, read_config, read_inventory

ROOT = os.environ.get("MTP_ZOO_INVENTORIES")

COUNTS = {
    "deepseek_r1": ("deepseek_v3", 61, 1564),
    "deepseek_v3_awq": ("deepseek_v3", 61, 774),
    "glm_4_7_flash": ("glm4_moe_lite", 47, 212),
    "glm_5_1": ("glm_moe_dsa", 78, 791),
    "qwen3_5_0_8b_base": ("qwen3_5", 0, 15),
    "qwen3_6_27b": ("qwen3_5", 0, 15),
    "qwen3_6_27b_nvfp4": ("qwen3_5", 0, 15),
    "qwen3_6_35b_a3b_nvfp4": ("qwen3_5_moe", 0, 19),
    "qwen3_8_27b_fp8": ("qwen3_5", 0, 22),
    "qwen3_next_80b": ("qwen3_next", 0, 1553),
}
"""Inventory -> family, layer of depth 0, tensors in the head's scope; experts and scales counted one by one."""

FP8 = {"deepseek_r1": 776, "qwen3_8_27b_fp8": 7}
"""Matrices stored as FP8, each beside its scale."""

COPIES = {"deepseek_r1": 61, "deepseek_v3_awq": 61, "glm_4_7_flash": 47}
"""Layer of the head, where it repeats the target's embedding and lm_head."""

REFUSED = ("qwen3_6_27b_w4a16_mtp",)
"""Heads in a form that can't be trained."""

HEADLESS: dict[str, tuple[type[MTPZooError], str, dict[str, Any]]] = {
    "glm_4_5v_no_mtp": (UnresolvedFamilyError, "fit no family", {"model_type": "glm4v_moe", "num_hidden_layers": 46}),
    "minimax_m2_7_no_mtp": (UnresolvedFamilyError, "fit no family", {}),
    "qwen3_5_2b_text": (HeadNotFoundError, "'mtp_num_hidden_layers' declares 1, and none of its 15 tensors", {}),
    "qwen3_5_moe_18b_reap": (HeadNotFoundError, "'mtp_num_hidden_layers' declares 1, and none of its", {}),
    "qwen3_5_moe_25b_reap": (HeadNotFoundError, "'mtp_num_hidden_layers' declares 1, and none of its", {}),
}
"""Checkpoints of models with heads that ship none: error, words of it, fields of the config where the inventory has none."""

CONFIG_ONLY = ("minimax_m2_7_no_mtp", "qwen3_5_2b_text")
"""Of these, the ones of which no tensor is listed."""

IGNORE_LIST = "glm_4_5_air_fp8_ignore"
"""No tensors, but which of them are not quantised."""

UNREGISTERED = {
    "deepseek_v4_flash": "several residual streams: no registered family has them",
    "dots3_note_prev": "an embedding of the head's own, beside the layer",
    "ernie_4_5_21b_a3b_pt_facts": "flat names, no output norm",
    "mimo_kor": "MiMo-7B: states before embeddings",
    "mimo_v2_5": "three physical layers, fused queries, keys and values",
    "mimo_v2_5_pro": "three physical layers, fused queries, keys and values",
    "nemotron_3_5_lightning_30b": "two physical layers a depth",
    "nemotron_3_super_120b_nvfp4": "two physical layers a depth",
    "openpangu_light": "a plain model without a head, and of no registered family",
    "qwen3_8_flash_next_qwen4exp": "several residual streams",
}
"""Inventories of families that are not in the library, and what keeps them out."""

GLM_4_5_AIR: dict[str, Any] = {
    "model_type": "glm4_moe",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 46,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "use_qk_norm": False,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-5,
    "vocab_size": 151552,
}
"""The release's config.json, by hand: the list has none."""

needs_inventories = pytest.mark.skipif(ROOT is None, reason="MTP_ZOO_INVENTORIES names no folder of inventories")


def inventory(name: str) -> Inventory:
    return read_inventory(Path(ROOT or "") / name, SOURCES[name])


def claimed(name: str) -> Claim:
    return claim(inventory(name))


@needs_inventories
def test_every_inventory_is_spoken_of() -> None:
    spoken = {*COUNTS, *REFUSED, *HEADLESS, IGNORE_LIST, *UNREGISTERED}
    assert {path.name for path in Path(ROOT or "").iterdir() if path.is_dir()} == spoken
    assert {*SOURCES} == {*COUNTS, *REFUSED}


@needs_inventories
@pytest.mark.parametrize("name", COUNTS)
def test_a_published_head_is_claimed_exactly(name: str) -> None:
    """Names and shapes: the plan refuses whatever is missing, unexpected or misshapen."""
    family, layer, count = COUNTS[name]
    found = claimed(name)
    site = found.resolution.site
    assert (site.family.name, site.first_layer, found.resolution.depths) == (family, layer, 1)
    assert len(found.published) == count
    assert found.claimed == found.published
    assert bool(found.added) is bool(SOURCES[name].partial)


@needs_inventories
@pytest.mark.parametrize("name", COUNTS)
def test_the_family_is_found_without_being_named(name: str) -> None:
    read = inventory(name)
    assert resolve(read.names, read.config).family.name == COUNTS[name][0]


@needs_inventories
@pytest.mark.parametrize("name", COUNTS)
def test_a_published_tensor_less_or_more_or_of_another_shape_is_refused(name: str) -> None:
    """So that a claim of everything means something."""
    whole = inventory(name)
    entries = {entry.name: entry for entry in whole.entries}
    site = resolve(whole.names, whole.config).site
    fusion = next(n for n in entries if site.in_scope(n) and n.endswith(("eh_proj.weight", "mtp.fc.weight")))
    odd = fusion.replace(".weight", ".bias")
    lists = {f"unexpected: {odd}": {**entries, odd: _named(entries[fusion], odd)}}
    if not SOURCES[name].partial:
        lists[f"missing: {fusion}"] = {n: entry for n, entry in entries.items() if n != fusion}
        lists[f"shape: {fusion}"] = {**entries, fusion: _turned(entries[fusion])}
    for problem, changed in lists.items():
        with pytest.raises(HeadMismatchError) as caught:
            claim(Inventory(whole.folder, whole.source, whole.config, tuple(changed.values())))
        assert [str(found).startswith(problem) for found in caught.value.problems] == [True]


def _named(entry: Any, name: str) -> Any:
    return type(entry)(name, "BF16", entry.shape, entry.file, 0, 0)


def _turned(entry: Any) -> Any:
    return type(entry)(entry.name, entry.dtype, entry.shape[::-1], entry.file, 0, 0)


@needs_inventories
@pytest.mark.parametrize("name", COUNTS)
def test_dtypes_are_those_that_the_head_expects(name: str) -> None:
    """What is stored in FP32 is what a cast must not round; what is stored in FP8 is nothing that is always float."""
    found = claimed(name)
    heads = {native: head for binding in found.plan.bindings for native in binding.natives for head in binding.heads}
    kept = {native for native, head in heads.items() if "e_score_correction_bias" in head}
    assert {n for n, dtype in found.plan.dtypes.items() if dtype == "F32"} == (set() if _names_only(name) else kept)
    assert all(not found.head.rounds(heads[native]) for native in kept)
    assert len(found.paired.quantized) == FP8.get(name, 0)
    assert all(entry.dtype in FLOAT_DTYPES for entry in found.paired.plain)
    if found.paired.quantized:
        floats = found.head.spec.always_float
        plain = {entry.name for entry in found.paired.plain} - set(found.plan.skipped)
        assert plain == {native for native, head in heads.items() if head.endswith(floats)}


def _names_only(name: str) -> bool:
    return bool(SOURCES[name].partial)


@needs_inventories
@pytest.mark.parametrize("name", COUNTS)
def test_copies_are_left_alone_where_they_are_published(name: str) -> None:
    """https://github.com/ggml-org/llama.cpp/pull/16359: some releases of one family hold them, some do not."""
    layer = COPIES.get(name)
    names = ("embed_tokens", "shared_head.head") if layer else ()
    assert [*claimed(name).plan.skipped] == [f"model.layers.{layer}.{part}.weight" for part in names]


@needs_inventories
@pytest.mark.parametrize("name", REFUSED)
def test_a_head_that_can_not_be_trained_is_refused_by_the_name_of_its_scheme(name: str) -> None:
    with pytest.raises(
        UnsupportedQuantizationError, match="21 tensors are stored as compressed-tensors pack-quantized"
    ):
        claimed(name)


@needs_inventories
@pytest.mark.parametrize("name", HEADLESS)
def test_a_checkpoint_that_advertises_a_head_and_ships_none_is_refused(name: str) -> None:
    """https://github.com/unslothai/unsloth/pull/11042, https://github.com/vllm-project/vllm/pull/35548"""
    error, words, facts = HEADLESS[name]
    folder, source = Path(ROOT or "") / name, Source(family="", facts=facts)
    config = read_config(folder, source)
    names = ["model.embed_tokens.weight"] if name in CONFIG_ONLY else read_inventory(folder, source).names
    with pytest.raises(error, match=words):
        resolve(names, config)


@needs_inventories
def test_glm_4_5v_has_no_head_by_whatever_name_it_is_asked_for() -> None:
    facts = {**GLM_4_5_AIR, "model_type": "glm4v_moe"}
    read = read_inventory(Path(ROOT or "") / "glm_4_5v_no_mtp", Source(family="glm4_moe", facts=facts))
    with pytest.raises(HeadNotFoundError, match=r"no 'model.layers.46.\*' with a head's fusion is on disk"):
        resolve(read.names, read.config, family=get_family("glm4_moe"))


@needs_inventories
def test_glm_4_5_air_in_fp8_quantises_all_but_what_is_always_float() -> None:
    """Its ignore list and the family's `always_float` draw one line through the head's tensors."""
    from mtp_zoo.head import DraftHead
    from mtp_zoo.loader import key_map

    listed = json.loads((Path(ROOT or "") / IGNORE_LIST / "config.excerpt.json").read_text())["ignore_layer46"]
    head = DraftHead(
        get_family("glm4_moe"), ModelConfig(GLM_4_5_AIR, Path("config.json")), first_layer=46, device="meta"
    )
    natives = {n: h for binding in key_map(head).layout() for n in binding.natives for h in binding.heads}
    parts = {n.removeprefix("model.layers.46.").removesuffix(".weight"): h for n, h in natives.items()}
    assert {*listed} - {*parts} == {"embed_tokens"}  # a copy of the target's
    floats = {part for part, name in parts.items() if name.endswith((*head.spec.always_float, ".bias"))}
    assert floats == {*listed} - {"embed_tokens"}
    assert all(part.endswith("_proj") for part in parts.keys() - floats)


def script() -> ModuleType:
    path = Path(__file__).parents[1] / "scripts" / "inventory_table.py"
    spec = importlib.util.spec_from_file_location("inventory_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_inventories
def test_the_table_shows_claimed_of_published(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["inventory_table.py", "--json", "--root", str(ROOT)])
    assert script().main() == 0
    rows = {row["inventory"]: row for row in json.loads(capsys.readouterr().out)}
    assert {name: (row["family"], row["claimed"]) for name, row in rows.items() if not row["refused"]} == {
        name: (family, count) for name, (family, _, count) in COUNTS.items()
    }
    assert [name for name, row in rows.items() if row["refused"]] == [*REFUSED]
    monkeypatch.setattr("sys.argv", ["inventory_table.py", "--root", str(ROOT)])
    assert script().main() == 0
    assert "1564 / 1564" in capsys.readouterr().out


def test_the_table_needs_a_folder(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MTP_ZOO_INVENTORIES", raising=False)
    monkeypatch.setattr("sys.argv", ["inventory_table.py"])
    assert script().main() == 2
    assert "MTP_ZOO_INVENTORIES" in capsys.readouterr().err


def test_ci_names_the_folder() -> None:
    text = (Path(__file__).parents[1] / ".ci" / "run").read_text(encoding="utf-8")
    assert 'inventories="$(pwd)/../shared/inventories"' in text
    assert "export MTP_ZOO_INVENTORIES=" in text
