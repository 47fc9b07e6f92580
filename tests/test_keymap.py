"""Key maps: literal tables first, then the laws of a bijection over random ones."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_zoo.errors import FamilyDefinitionError, HeadMismatchError
from mtp_zoo.keymap import KeyMap, Move, Rename, Rule, Skip, Split, Stack, claims, native_tensors, to_head, to_native
from mtp_zoo.registry import Family, list_families
from mtp_zoo.site import HeadSite
from tests.allocations import PeakBytes
from tests.key_maps import STORED, Case, Info, bits, cases, random_bits, same_bits

GATE, UP = "mtp.experts.{e}.gate_proj.weight", "mtp.experts.{e}.up_proj.weight"
PER_EXPERT = Stack((GATE, UP), "gate_up_proj")
PACKED = Rename("mtp.experts.gate_up_proj", "gate_up_proj")
PACKED_SHAPE = (2, 6, 5)
"""Two experts of three gate and three up rows, hidden size 5."""


def per_expert(dtype: str = "BF16", shape: tuple[int, ...] = (3, 5)) -> list[Info]:
    return [Info(name.replace("{e}", str(e)), dtype, shape) for e in range(2) for name in (GATE, UP)]


def whole(native: str, head: str) -> Move:
    return Move(native, (), head, ())


def problems_of(key_map: KeyMap, stored: list[Info]) -> list[str]:
    with pytest.raises(HeadMismatchError) as caught:
        key_map.plan(stored)
    return [str(problem) for problem in caught.value.problems]


# Literal tables


def test_a_rename_moves_the_whole_tensor() -> None:
    plan = KeyMap((Rename("mtp.fc.weight", "eh_proj.weight"),), {"eh_proj.weight": (2, 4)}).plan(
        [Info("mtp.fc.weight", "BF16", (2, 4))]
    )
    assert [move for binding in plan.bindings for move in binding.moves] == [whole("mtp.fc.weight", "eh_proj.weight")]
    assert plan.natives == ("mtp.fc.weight",)
    assert plan.dtypes == {"mtp.fc.weight": "BF16"}
    assert plan.skipped == {}


def test_each_depth_has_its_own_number_and_its_own_layer() -> None:
    rules = (Rename("mtp.{d}.fc", "depths.{d}.eh_proj"), Rename("model.layers.{n}.norm", "depths.{d}.norm"))
    shapes = {f"depths.{d}.{name}": (2,) for d in range(2) for name in ("eh_proj", "norm")}
    (fc0, norm0, fc1, norm1) = KeyMap(rules, shapes, depths=2, first_layer=61).layout()
    assert fc0.moves == (whole("mtp.0.fc", "depths.0.eh_proj"),)
    assert norm0.moves == (whole("model.layers.61.norm", "depths.0.norm"),)
    assert fc1.moves == (whole("mtp.1.fc", "depths.1.eh_proj"),)
    assert norm1.moves == (whole("model.layers.62.norm", "depths.1.norm"),)


def test_a_tensor_that_all_depths_share_is_one_tensor() -> None:
    rules = (Rename("mtp.fc", "depths.0.eh_proj"), Rename("mtp.layers.{d}.w", "depths.{d}.w"))
    shapes = {"depths.0.eh_proj": (2,), "depths.0.w": (2,), "depths.1.w": (2,), "depths.2.w": (2,)}
    names = ["mtp.fc", "mtp.layers.0.w", "mtp.layers.1.w", "mtp.layers.2.w"]
    plan = KeyMap(rules, shapes, depths=3).plan([Info(name, "F32", (2,)) for name in names])
    assert plan.natives == tuple(names)
    assert len(plan.bindings) == 4


def test_the_gate_and_up_rows_of_every_expert_are_packed_in_order() -> None:
    (binding,) = KeyMap((PER_EXPERT,), {"gate_up_proj": PACKED_SHAPE}).plan(per_expert()).bindings
    assert binding.moves == tuple(
        Move(f"mtp.experts.{e}.{part}_proj.weight", (), "gate_up_proj", (e, rows))
        for e in (0, 1)
        for part, rows in (("gate", slice(0, 3)), ("up", slice(3, 6)))
    )


def test_expert_i_lands_in_slice_i_and_comes_back() -> None:
    """https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/1871"""
    key_map = KeyMap((Stack(("mtp.experts.{e}.down.weight",), "down"),), {"down": (12, 2, 3)})
    native = {f"mtp.experts.{e}.down.weight": torch.full((2, 3), float(e)) for e in range(12)}
    bindings = key_map.plan([Info(name, "F32", (2, 3)) for name in native]).bindings
    head = to_head(bindings, native)
    assert head["down"][:, 0, 0].tolist() == [float(e) for e in range(12)]
    assert same_bits(to_native(bindings, head), native)


def test_parts_without_experts_lie_end_to_end_along_their_axis() -> None:
    """https://github.com/ggml-org/llama.cpp/pull/19435"""
    native = {"gate": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "up": torch.tensor([[5.0, 6.0], [7.0, 8.0]])}
    expected = {
        0: [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]],
        1: [[1.0, 2.0, 5.0, 6.0], [3.0, 4.0, 7.0, 8.0]],
    }
    for axis, rows in expected.items():
        shape = (4, 2) if axis == 0 else (2, 4)
        bindings = KeyMap((Stack(("gate", "up"), "gate_up", axis),), {"gate_up": shape}).layout()
        assert to_head(bindings, native)["gate_up"].tolist() == rows
        assert same_bits(to_native(bindings, to_head(bindings, native)), native)


def test_an_axis_is_counted_inside_one_experts_tensor() -> None:
    (binding,) = KeyMap((Stack((GATE, UP), "w", axis=1),), {"w": (1, 5, 6)}).layout()
    assert binding.natives == {name.replace("{e}", "0"): (5, 3) for name in (GATE, UP)}
    assert [move.head_index for move in binding.moves] == [
        (0, slice(None), slice(0, 3)),
        (0, slice(None), slice(3, 6)),
    ]


def test_the_unequal_parts_of_a_fused_qkv_hold_their_own_rows() -> None:
    """https://github.com/vllm-project/vllm/issues/42803: with 8 query and 2 key heads, thirds are not the parts."""
    key_map = KeyMap((Split("mtp.qkv.weight", ("q", "k", "v")),), {"q": (32, 3), "k": (8, 3), "v": (8, 3)})
    native = {"mtp.qkv.weight": torch.arange(48.0)[:, None].expand(48, 3)}
    bindings = key_map.plan([Info("mtp.qkv.weight", "F32", (48, 3))]).bindings
    head = to_head(bindings, native)
    assert {name: (part[0, 0].item(), part[-1, 0].item()) for name, part in head.items()} == {
        "q": (0.0, 31.0),
        "k": (32.0, 39.0),
        "v": (40.0, 47.0),
    }
    assert same_bits(to_native(bindings, head), native)


def test_a_skipped_name_is_left_alone_with_its_reason() -> None:
    rules = (
        Rename("mtp.{d}.w", "w.{d}"),
        Skip("mtp.{d}.rotary.inv_freq", because="computed"),
        Skip("mtp.{d}.indexer.*", because="not built"),
        Skip("mtp.{d}.experts.{e}.bias", because="always zero"),
    )
    skipped = {
        "mtp.0.rotary.inv_freq": "computed",
        "mtp.0.indexer.wk.weight": "not built",
        "mtp.0.indexer.k_norm.weight": "not built",
        "mtp.0.experts.11.bias": "always zero",
    }
    plan = KeyMap(rules, {"w.0": (1,)}).plan([Info("mtp.0.w", "BF16", (1,)), *(Info(n, "I8", (7,)) for n in skipped)])
    assert plan.skipped == skipped
    assert plan.natives == ("mtp.0.w",)


@pytest.mark.parametrize(
    "name", ["mtp.1.rotary.inv_freq", "mtp.0.rotaryXinv_freq", "mtp.0.rotary.inv_freq.2", "mtp.0.experts.x.bias"]
)
def test_a_skip_takes_nothing_but_what_it_names(name: str) -> None:
    rules = (
        Rename("mtp.{d}.w", "w"),
        Skip("mtp.{d}.rotary.inv_freq", because="computed"),
        Skip("mtp.{d}.experts.{e}.bias", because="always zero"),
    )
    found = problems_of(KeyMap(rules, {"w": (1,)}), [Info("mtp.0.w", "BF16", (1,)), Info(name, "BF16", (7,))])
    assert found == [f"unexpected: {name}: no rule claims it (shape [7], dtype BF16)"]


def test_what_is_claimed_is_loaded_though_a_skip_matches_it_too() -> None:
    """One table serves heads with and without an optional part: Rename where the head has it, Skip where not.

    https://github.com/vllm-project/vllm/pull/46600
    """
    rules = (Skip("mtp.indexer.*", because="this head has no indexer"), Rename("mtp.indexer.wk", "indexer.wk"))
    stored = [Info("mtp.indexer.wk", "BF16", (2,))]
    assert KeyMap(rules, {"indexer.wk": (2,)}).plan(stored).natives == ("mtp.indexer.wk",)
    assert KeyMap(rules, {}).plan(stored).skipped == {"mtp.indexer.wk": "this head has no indexer"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mtp.experts.0.gate_proj.weight", True),
        ("mtp.experts.11.up_proj.weight", True),
        ("mtp.experts.0.gate_proj.weight_scale_inv", False),
        ("model.mtp.experts.0.gate_proj.weight", False),
        ("mtp.experts.e.gate_proj.weight", False),
        ("mtp.experts.0.gate_projXweight", False),
        ("mtp.experts.\u0663.gate_proj.weight", False),
    ],
)
def test_a_rule_claims_whole_names_at_any_number(name: str, expected: bool) -> None:
    assert claims(PER_EXPERT, name) is expected


# Which of several stored forms


@pytest.mark.parametrize("rules", [(PER_EXPERT, PACKED), (PACKED, PER_EXPERT)])
@pytest.mark.parametrize(
    ("stored", "form"), [(per_expert(), PER_EXPERT), ([Info(PACKED.native, "BF16", PACKED_SHAPE)], PACKED)]
)
def test_the_form_on_disk_is_taken_whatever_the_table_lists_first(
    rules: tuple[Rule, ...], stored: list[Info], form: Rule
) -> None:
    """https://github.com/ISEEKYAN/mbridge/pull/145: one model_type ships experts in both forms."""
    plan = KeyMap(rules, {"gate_up_proj": PACKED_SHAPE}).plan(stored)
    assert [binding.rule for binding in plan.bindings] == [form]
    assert plan.natives == tuple(sorted(info.name for info in stored))


def test_a_head_from_no_checkpoint_takes_the_form_that_is_listed_first() -> None:
    (binding,) = KeyMap((PACKED, PER_EXPERT), {"gate_up_proj": PACKED_SHAPE}).layout()
    assert binding.rule == PACKED


def test_two_forms_of_one_tensor_are_ambiguous() -> None:
    stored = [*per_expert(), Info(PACKED.native, "BF16", PACKED_SHAPE)]
    found = problems_of(KeyMap((PER_EXPERT, PACKED), {"gate_up_proj": PACKED_SHAPE}), stored)
    assert found == [
        "ambiguous: gate_up_proj: stored in more than one form: "
        "mtp.experts.0.gate_proj.weight and mtp.experts.gate_up_proj",
        "unexpected: mtp.experts.gate_up_proj: no rule claims it (shape [2, 6, 5], dtype BF16)",
    ]


def test_one_tensor_of_a_form_chooses_it_and_the_rest_is_missing() -> None:
    found = problems_of(KeyMap((PACKED, PER_EXPERT), {"gate_up_proj": PACKED_SHAPE}), per_expert()[2:3])
    assert found == [
        f"missing: mtp.experts.{name}_proj.weight: expected shape [3, 5], found nothing"
        for name in ("0.gate", "0.up", "1.up")
    ]


def test_a_rule_for_a_part_that_this_head_lacks_asks_for_nothing() -> None:
    plan = KeyMap((Rename("mtp.w", "w"), Rename("mtp.bias", "bias")), {"w": (1,)}).plan([Info("mtp.w", "F16", (1,))])
    assert plan.natives == ("mtp.w",)


# Refusals


def test_one_error_holds_every_problem_of_a_plan() -> None:
    rules = (
        Rename("mtp.fc.weight", "fc"),
        Rename("mtp.norm.weight", "norm"),
        Rename("mtp.enorm.weight", "enorm"),
        Stack(("mtp.gate.weight", "mtp.up.weight"), "gate_up"),
    )
    key_map = KeyMap(rules, {"fc": (2, 4), "norm": (2,), "enorm": (2,), "gate_up": (6, 2)}, family="toy")
    stored = [
        Info("mtp.fc.weight", "F8_E4M3", (4, 2)),
        Info("mtp.enorm.weight", "BF16", (2,)),
        Info("mtp.gate.weight", "BF16", (3, 2)),
        Info("mtp.up.weight", "F32", (3, 2)),
        Info("mtp.foo", "BF16", (1,)),
    ]
    with pytest.raises(HeadMismatchError) as caught:
        key_map.plan(stored)
    assert str(caught.value) == (
        "Family 'toy': the head's tensors do not match its key map (5 expected, 5 found in scope, 5 problems).\n"
        "  - dtype: gate_up: its parts are stored as ['BF16', 'F32']\n"
        "  - dtype: mtp.fc.weight: expected one of ('BF16', 'F16', 'F32', 'F64'), found F8_E4M3\n"
        "  - missing: mtp.norm.weight: expected shape [2], found nothing\n"
        "  - shape: mtp.fc.weight: expected [2, 4], found [4, 2]\n"
        "  - unexpected: mtp.foo: no rule claims it (shape [1], dtype BF16)\n"
        "Remedy: Repair the checkpoint, or take the head from the original one; nothing was loaded."
    )


def test_transposed_packed_experts_are_refused_with_both_shapes() -> None:
    """https://github.com/huggingface/transformers/pull/43201"""
    found = problems_of(KeyMap((PACKED,), {"gate_up_proj": PACKED_SHAPE}), [Info(PACKED.native, "BF16", (2, 5, 6))])
    assert found == ["shape: mtp.experts.gate_up_proj: expected [2, 6, 5], found [2, 5, 6]"]


@pytest.mark.parametrize(
    ("rules", "shapes", "message"),
    [
        ((), {"w": (1,)}, "no rule fills 'w'"),
        ((Rename("a", "v"),), {"w": (1,)}, "no rule fills 'w'"),
        ((Rename("a", "v"), Rename("a", "w")), {"v": (1,), "w": (1,)}, "two rules claim 'a'"),
        ((Rename("a", "v"), Split("a", ("w", "x"))), {"v": (1,), "w": (1,), "x": (1,)}, "two rules claim 'a'"),
        ((Stack(("a", "a"), "w"),), {"w": (2,)}, "two rules claim 'a'"),
        ((Rename("a", "w.{d}"),), {"w.0": (1,), "w.1": (1,)}, "two rules claim 'a'"),
        ((Rename("a", "v"), Split("b", ("v", "w"))), {"v": (1,), "w": (1,)}, "first forms of the table fill 'v' twice"),
        ((Split("a", ("w", "v")),), {"w": (1,)}, "of which this head has only some"),
        ((Split("a", ("v", "w")),), {"v": (1, 2), "w": (1, 3)}, r"\[\[1, 2\], \[1, 3\]\] do not lie end to end along"),
        (
            (Split("a", ("v", "w")),),
            {"v": (1, 2), "w": (1,)},
            r"\[\[1, 2\], \[1\]\] do not lie end to end along axis 0",
        ),
        ((Split("a", ("v", "w"), 1),), {"v": (1, 2), "w": (1,)}, "expected an axis from 0 to 0, got 1"),
        ((Stack(("a", "b"), "w"),), {"w": (5, 2)}, "axis 0 of 'w' has 5 rows, not a multiple of 2"),
        ((Stack(("a", "b"), "w", -1),), {"w": (4, 4)}, "expected an axis from 0 to 1, got -1"),
        ((Stack(("a.{e}", "b.{e}"), "w", 1),), {"w": (4, 4)}, "expected an axis from 0 to 0, got 1"),
        ((Stack(("a.{e}", "b"), "w"),), {"w": (4, 4)}, "some of its templates hold {e}, some do not"),
    ],
)
def test_a_table_that_is_no_bijection_is_refused_when_it_is_bound(
    rules: tuple[Rule, ...], shapes: dict[str, tuple[int, ...]], message: str
) -> None:
    """https://github.com/vllm-project/vllm-ascend/issues/5794"""
    with pytest.raises(FamilyDefinitionError, match=message):
        KeyMap(rules, shapes, depths=2, family="toy")


def test_what_goes_back_is_a_contiguous_copy_without_a_graph() -> None:
    head = {"w": torch.arange(6.0).reshape(2, 3).T.requires_grad_(), "q": torch.zeros(2), "k": torch.ones(1)}
    rules = (Rename("mtp.w", "w"), Split("mtp.qk", ("q", "k")))
    native = to_native(KeyMap(rules, {"w": (3, 2), "q": (2,), "k": (1,)}).layout(), head)
    assert native["mtp.w"].is_contiguous()
    assert not native["mtp.w"].requires_grad
    native["mtp.w"].zero_()
    native["mtp.qk"].fill_(7)
    assert head["w"].sum() == 15
    assert (head["q"].sum(), head["k"].sum()) == (0, 1)


# Laws


@given(cases())
def test_every_element_of_head_and_checkpoint_has_exactly_one_place(case: Case) -> None:
    plan = case.key_map.plan(case.stored())
    assert plan.natives == tuple(sorted(case.natives))
    assert sorted(name for binding in plan.bindings for name in binding.natives) == sorted(case.natives)
    assert sorted(name for binding in plan.bindings for name in binding.heads) == sorted(case.heads)
    native = {name: torch.zeros(shape) for name, shape in case.natives.items()}
    head = {name: torch.zeros(shape) for name, shape in case.heads.items()}
    for binding in plan.bindings:
        for move in binding.moves:
            native[move.native][move.native_index] += 1
            head[move.head][move.head_index] += 1
    assert all((count == 1).all() for count in (*native.values(), *head.values()))


@given(cases(), st.randoms(use_true_random=False))
def test_a_plan_does_not_depend_on_the_order_of_the_stored_tensors(case: Case, chance: random.Random) -> None:
    stored = case.stored()
    shuffled = list(stored)
    chance.shuffle(shuffled)
    assert case.key_map.plan(shuffled) == case.key_map.plan(stored)


@pytest.mark.parametrize("dtype", STORED)
@given(case=cases(), seed=st.integers(0, 2**31))
@settings(max_examples=50)
def test_loading_agrees_with_torch_and_both_round_trips_are_bitwise(dtype: str, case: Case, seed: int) -> None:
    bindings = case.key_map.plan(case.stored(dtype)).bindings
    native = random_bits(case.natives, dtype, seed)
    head = to_head(bindings, native)
    assert same_bits(head, case.fill(native))
    assert same_bits(to_native(bindings, head), native)
    own = random_bits(case.heads, dtype, seed + 1)
    assert same_bits(to_head(bindings, to_native(bindings, own)), own)


@given(cases(), st.data())
def test_a_tensor_that_is_dropped_or_misshapen_is_the_problem_that_is_named(case: Case, data: st.DataObject) -> None:
    stored = case.stored()
    victim = data.draw(st.sampled_from(stored))
    rest = [info for info in stored if info is not victim]
    # Without its only tensor a form is no longer chosen by name, and its alternative may be asked for instead.
    dropped = problems_of(case.key_map, rest)
    assert all(problem.startswith("missing: ") for problem in dropped)
    assert len(rest) == 0 or any(victim.name.split(".native")[1].split(".")[0] in problem for problem in dropped)
    misshapen = problems_of(case.key_map, [*rest, Info(victim.name, "BF16", (*victim.shape, 9))])
    assert misshapen == [f"shape: {victim.name}: expected {list(victim.shape)}, found {[*victim.shape, 9]}"]


def test_the_comparison_of_bits_tells_nans_apart() -> None:
    """The other tests rest on it."""
    left, right = torch.tensor([0x7FC0, 0x7FC1], dtype=torch.int16).view(torch.bfloat16)
    assert left.isnan()
    assert right.isnan()
    assert not torch.equal(bits(left), bits(right))
    assert not same_bits({"a": torch.zeros(1)}, {"a": torch.zeros(1, dtype=torch.bfloat16)})
    assert not same_bits({"a": torch.zeros(1)}, {"b": torch.zeros(1)})


# Every registered family


def names_of(rule: Rule) -> list[str]:
    templates = rule.native if isinstance(rule, Stack) else (rule.native,)
    fills = [{"{d}": d, "{n}": n, "{e}": e, "*": "any.thing"} for d, n, e in (("0", "61", "0"), ("1", "62", "11"))]
    names: list[str] = []
    for template in templates:
        for fill in fills:
            name = template
            for mark, value in fill.items():
                name = name.replace(mark, value)
            names.append(name)
    return names


@pytest.mark.parametrize("family", list_families(), ids=lambda family: family.name)
def test_no_two_rules_of_a_family_claim_one_name(family: Family) -> None:
    for rule in family.rules:
        for name in names_of(rule):
            assert [other for other in family.rules if claims(other, name)] == [rule]
            assert HeadSite(family, 61 if family.in_stack else 0).in_scope(name)


def test_experts_are_taken_out_of_their_stack_one_at_a_time() -> None:
    """A stack of experts is most of a head: an export must not hold it twice."""
    experts, rows = 64, 128
    bindings = KeyMap((PER_EXPERT,), {"gate_up_proj": (experts, 2 * rows, 64)}).layout()
    head = {"gate_up_proj": torch.zeros(experts, 2 * rows, 64)}
    one = rows * 64 * 4
    with PeakBytes() as memory:
        for _name, value in native_tensors(bindings, head):
            assert value.nbytes == one
            del value
    assert memory.peak <= head["gate_up_proj"].nbytes + 2 * one
