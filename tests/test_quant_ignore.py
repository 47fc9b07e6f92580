"""Ignore lists: what both engines make of the published forms, and of the lists that an export writes.

The engines' names of the modules stand here as literals, taken from their draft modules.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest

from mtp_zoo.quant_ignore import METHODS, HeadModules, method_of, quantized_by
from mtp_zoo.quant_patch import complete
from mtp_zoo.registry import get_family
from mtp_zoo.site import HeadSite
from mtp_zoo.spec import Engine

Floats = list[tuple[str, tuple[int, ...]]]


def matrices(prefix: str, names: Iterable[str]) -> Floats:
    return [(f"{prefix}{name}.weight", (4, 4)) for name in names]


MTP = "mtp.layers.0."
QWEN = [
    *matrices("mtp.", ["fc"]),
    ("mtp.norm.weight", (4,)),
    *matrices(f"{MTP}self_attn.", ["q_proj", "k_proj", "v_proj", "o_proj"]),
]
DENSE = [*QWEN, *matrices(f"{MTP}mlp.", ["gate_proj", "up_proj", "down_proj"])]
PACKED: Floats = [(f"{MTP}mlp.experts.gate_up_proj", (2, 8, 4)), (f"{MTP}mlp.experts.down_proj", (2, 4, 4))]
SHARED = ["gate_proj", "up_proj", "down_proj"]
MOE = [
    *QWEN,
    *matrices(f"{MTP}mlp.", ["gate", "shared_expert_gate"]),
    *matrices(f"{MTP}mlp.shared_expert.", SHARED),
    *PACKED,
]
LAYER = "model.layers.61."
DEEPSEEK = [
    *matrices(LAYER, ["eh_proj", "mlp.gate"]),
    *matrices(f"{LAYER}self_attn.", ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]),
    *matrices(f"{LAYER}mlp.shared_experts.", SHARED),
    *matrices(f"{LAYER}mlp.experts.", [f"{e}.{part}" for e in range(2) for part in SHARED]),
]
HEADS: dict[str, tuple[Floats, int]] = {"qwen3_5": (DENSE, 0), "qwen3_5_moe": (MOE, 0), "deepseek_v3": (DEEPSEEK, 61)}

LATENT = ["q_b_proj", "kv_b_proj", "o_proj"]
SHARED_FUSED = ["mlp.shared_experts.gate_up_proj", "mlp.shared_experts.down_proj", "mlp.experts"]
ATTENTION = ["mtp.fc", f"{MTP}self_attn.qkv_proj", f"{MTP}self_attn.o_proj"]
ASKED: dict[tuple[str, Engine], list[str]] = {
    ("qwen3_5", "vllm"): [*ATTENTION, f"{MTP}mlp.gate_up_proj", f"{MTP}mlp.down_proj"],
    ("qwen3_5_moe", "vllm"): [
        *ATTENTION,
        f"{MTP}mlp.experts",
        f"{MTP}mlp.shared_expert.gate_up_proj",
        f"{MTP}mlp.shared_expert.down_proj",
    ],
    ("deepseek_v3", "vllm"): [
        f"{LAYER}{name}" for name in (*(f"self_attn.{n}" for n in ("fused_qkv_a_proj", *LATENT)), *SHARED_FUSED)
    ],
    ("deepseek_v3", "sglang"): [
        f"model.decoder.{name}"
        for name in (*(f"self_attn.{n}" for n in ("fused_qkv_a_proj_with_mqa", *LATENT)), *SHARED_FUSED)
    ],
}
ASKED[("qwen3_5", "sglang")] = ASKED[("qwen3_5", "vllm")]
ASKED[("qwen3_5_moe", "sglang")] = ASKED[("qwen3_5_moe", "vllm")]

LINEAR = {"group_0": {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}}
SETTINGS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
    "fp8, other key": {"quant_method": "fp8", "ignored_layers": ["lm_head"]},
    "fp8, no list": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "compressed-tensors": {"quant_method": "compressed-tensors", "config_groups": LINEAR, "ignore": ["lm_head"]},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    "gptq": {"quant_method": "gptq", "bits": 4, "dynamic": {r"+:.*\.layers\.": {"bits": 8}}},
    "awq": {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["visual"]},
    "quark": {"quant_method": "quark", "exclude": ["lm_head"]},
}


def head_of(family: str, *, whole: bool = True) -> HeadModules:
    floats, first_layer = HEADS[family]
    return HeadModules.of(HeadSite(get_family(family), first_layer), floats, whole=whole)


@pytest.mark.parametrize(("family", "engine"), ASKED)
def test_engines_ask_for_modules_under_their_own_names(family: str, engine: Engine) -> None:
    assert sorted(one.name for one in head_of(family).asked(engine)) == sorted(ASKED[family, engine])


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("method", SETTINGS)
@pytest.mark.parametrize("family", HEADS)
def test_a_completed_list_covers_every_part_and_every_fused_module_in_both_engines(
    family: str, method: str, whole: bool
) -> None:
    """https://github.com/sgl-project/sglang/issues/35797: fused modules do not inherit their parts' entries."""
    settings, head = copy.deepcopy(SETTINGS[method]), head_of(family, whole=whole)
    before = quantized_by(settings, head)
    for engine, names in before.items():
        assert sorted(names) == sorted(ASKED[family, engine])
    assert complete(settings, head)
    known = method_of(settings)
    assert known is not None
    experts = [name for name in ASKED[family, "sglang"] if name.endswith(".experts")]
    unheard = {"vllm": [], "sglang": experts if method == "gptq" else []}
    assert quantized_by(settings, head, strict=True) == unheard
    for engine in head.reachable:
        entries = known.listed(settings)
        for name in {*ASKED[family, engine], *(s for one in head.asked(engine) for s in one.shards)} - {
            *unheard[engine]
        }:
            assert known.matches(entries, name, engine)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("method", SETTINGS)
@pytest.mark.parametrize("family", HEADS)
def test_a_completed_list_speaks_of_nothing_but_the_head(family: str, method: str, whole: bool) -> None:
    settings = copy.deepcopy(SETTINGS[method])
    complete(settings, head_of(family, whole=whole))
    known = method_of(settings)
    assert known is not None
    for name in ("self_attn.q_proj", "self_attn.qkv_proj", "self_attn.o_proj", "mlp.experts", "mlp.gate_up_proj"):
        for layer in ("model.layers.6.", "model.layers.60.", "model.layers.610.", "model.language_model.layers.0."):
            assert not known.matches(known.listed(settings), f"{layer}{name}", "vllm")
            assert not known.matches(known.listed(settings), f"{layer}{name}", "sglang")


@pytest.mark.parametrize("method", SETTINGS)
def test_what_is_listed_already_stays_and_a_complete_list_is_left_alone(method: str) -> None:
    settings, head = copy.deepcopy(SETTINGS[method]), head_of("qwen3_5")
    assert complete(settings, head)
    for key, value in SETTINGS[method].items():
        kept = settings[key]
        assert all(entry in kept for entry in value) if isinstance(value, (list, dict)) else kept == value
    again = copy.deepcopy(settings)
    assert not complete(again, head)
    assert again == settings


def test_a_negative_rule_stands_in_front_because_the_first_that_matches_decides() -> None:
    settings = copy.deepcopy(SETTINGS["gptq"])
    complete(settings, head_of("qwen3_5"))
    assert list(settings["dynamic"]) == [r"-:^mtp(\.|$)", r"+:.*\.layers\."]


def test_a_key_that_engines_read_first_does_not_hide_the_list_of_the_other() -> None:
    settings = {
        "quant_method": "fp8",
        "ignored_layers": [],
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
    }
    complete(settings, head_of("qwen3_5"))
    assert set(settings["ignored_layers"]) >= {"lm_head", "model.layers.0.mlp.gate", "mtp.fc"}
    assert set(settings["ignored_layers"]) == set(settings["modules_to_not_convert"])


PARTS = ["mtp.fc", *(f"{MTP}{name}_proj" for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o"))]
MLP = [f"{MTP}mlp.{name}_proj" for name in ("gate", "up", "down")]


@pytest.mark.parametrize(
    ("method", "key", "entries", "missing"),
    [
        ("fp8", "modules_to_not_convert", [*PARTS, *MLP], []),
        ("fp8", "modules_to_not_convert", [*PARTS[1:], *MLP], ["mtp.fc"]),
        ("fp8", "modules_to_not_convert", [*PARTS[:1], *PARTS[2:], *MLP], [f"{MTP}self_attn.qkv_proj"]),
        ("compressed-tensors", "ignore", [*PARTS, *MLP[1:]], [f"{MTP}mlp.gate_up_proj"]),
        ("compressed-tensors", "ignore", ["re:^mtp.*"], []),
        ("compressed-tensors", "ignore", ["re:.*self_attn.*", "re:.*mlp.*"], ["mtp.fc"]),
        ("modelopt", "ignore", ["mtp*", "mtp.layers.0*"], []),
        ("modelopt", "exclude_modules", ["mtp*"], ASKED["qwen3_5", "vllm"]),
        ("modelopt", "ignore", [f"{MTP}*"], ["mtp.fc"]),
        ("awq", "modules_to_not_convert", ["mtp"], []),
        ("gptq", "dynamic", {r"-:.*mtp.*": {}}, []),
        ("gptq", "dynamic", {r"+:.*mtp.*": {}, r"-:.*mtp.*": {}}, ASKED["qwen3_5", "vllm"]),
        ("quark", "exclude", ["re:mtp.*"], []),
    ],
)
def test_published_forms_of_lists_are_read_as_vllm_reads_them(
    method: str, key: str, entries: Any, missing: list[str]
) -> None:
    settings = {name: value for name, value in SETTINGS[method].items() if name != "ignore"} | {key: entries}
    assert sorted(quantized_by(settings, head_of("qwen3_5"))["vllm"]) == sorted(missing)


def test_the_two_engines_read_a_short_entry_differently() -> None:
    settings = {"quant_method": "fp8", "modules_to_not_convert": ["mtp"]}
    found = quantized_by(settings, head_of("qwen3_5"))
    assert found["sglang"] == []
    assert len(found["vllm"]) == 5


def test_the_older_key_of_modelopt_is_heard_in_its_own_file_and_by_sglang() -> None:
    listed = {"quant_algo": "NVFP4", "exclude_modules": ["mtp*"]}
    head = head_of("qwen3_5")
    assert quantized_by(listed, head) == {"vllm": [], "sglang": []}
    flat = {"quant_method": "modelopt", **listed}
    assert quantized_by(flat, head)["sglang"] == []
    assert complete(flat, head)
    assert flat["exclude_modules"] == flat["ignore"] == ["mtp*", "mtp.*"]


def test_a_config_that_is_not_aimed_at_the_head_needs_no_list() -> None:
    trunk = {"group_0": {"targets": [r"re:model\.layers\..*"], "weights": {"type": "int", "num_bits": 4}}}
    settings: dict[str, Any] = {"quant_method": "compressed-tensors", "config_groups": trunk, "ignore": []}
    head = head_of("qwen3_5")
    assert not complete(settings, head)
    mixed = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"model.layers.0.mlp": {}},
    }
    assert not complete(mixed, head)


def test_layers_that_a_mixed_config_counts_as_quantised_are_taken_off_when_the_head_is_float() -> None:
    layers = {"model.layers.0.mlp.up_proj": {"quant_algo": "FP8"}, f"{MTP}self_attn.o_proj": {"quant_algo": "FP8"}}
    settings = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    assert complete(settings, head_of("qwen3_5"))
    assert list(settings["quantized_layers"]) == ["model.layers.0.mlp.up_proj"]


def test_where_vllm_infers_from_the_tensors_a_new_list_names_all_that_is_float() -> None:
    settings: dict[str, Any] = {"quant_method": "awq", "bits": 4}
    assert complete(settings, head_of("qwen3_5"), ["model.layers.0.mlp.gate", "lm_head"])
    assert {"model.layers.0.mlp.gate", "lm_head", "mtp.fc"} <= set(settings["modules_to_not_convert"])


def test_a_head_that_sglang_builds_under_trunk_names_is_listed_for_vllm_alone() -> None:
    head = HeadModules.of(HeadSite(get_family("qwen3_next")), MOE, whole=True)
    assert head.reachable == ("vllm",)
    assert not any(name.startswith("model.") for name in head.spelled())


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"quant_method": "awq_marlin"}, "awq"),
        ({"quant_method": "modelopt_fp4"}, "modelopt"),
        ({"quant_algo": "FP8"}, "modelopt"),
        ({"quant_method": "bitsandbytes"}, None),
        ({"quant_method": "fp8x"}, None),
        ({}, None),
    ],
)
def test_methods_are_known_by_every_spelling(settings: dict[str, str], name: str | None) -> None:
    assert method_of(settings) is (METHODS[name] if name else None)
