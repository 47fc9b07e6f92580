"""Every offset of the mask contract, put off by one, is caught by a literal table.

The mutants are derived from the source: each integer and each index variable of each function, one up and one down. So an
offset that is added to a function is tried without being listed here; a function that gains its first one must be listed.
"""

from __future__ import annotations

import ast
import copy
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mtp_zoo
from tests import test_batch, test_batch_sources

MODULES = ("documents", "document_sources", "batch")
"""In the order of their imports: a mutant of one is seen by those behind it."""

INDEX_NAMES = {"depth", "steps", "start", "stop", "length", "number"}

CHECKS = {
    "ahead": ["ahead_fills_what_is_past_the_end_and_keeps_trailing_axes"],
    "_make_plan": ["the_plan_names_slots_labels_and_target_rows"],
    "places": ["a_depth_is_compared_with_the_target_where_it_predicts_the_same_token"],
    "slots": [
        "an_answer_behind_a_prompt_is_learnt_from_the_last_prompt_tokens_on",
        "placeholder_tokens_never_enter_a_depth",
        "no_token_of_another_document_enters",
        "no_depth_counts_behind_a_placeholder_that_an_earlier_depth_read",
    ],
    "_learnt_ahead": [
        "an_answer_behind_a_prompt_is_learnt_from_the_last_prompt_tokens_on",
        "two_packed_documents_never_look_at_each_other",
    ],
    "_same_document": ["no_token_of_another_document_enters"],
    "main_gate": ["the_targets_own_loss_counts_from_the_last_prompt_token_to_the_last_but_one"],
    "from_rows": [
        "two_packed_documents_never_look_at_each_other",
        "no_rows_are_a_batch_of_none",
        "rows_longer_than_asked_are_refused",
        "a_document_whose_mask_is_shorter_or_longer_is_refused",
    ],
    "check_unshifted": [
        "labels_that_were_already_shifted_are_refused_with_the_place",
        "labels_of_other_tokens_are_not_called_shifted",
    ],
    "before": ["packed_documents_of_length_one_have_no_slot_and_give_none"],
    "count_positions": ["left_padding_shifts_nothing", "two_packed_documents_never_look_at_each_other"],
    "find_segments": ["rows_with_equal_stretches_share_a_segment", "left_padding_shifts_nothing"],
    "check_documents": ["a_document_torn_by_padding_is_refused", "interleaved_documents_are_refused"],
    "as_bool": ["documents_padded_in_place_are_the_same_by_every_source", "masks_take_no_other_values_than_0_and_1"],
    "find_documents": [
        "documents_padded_in_place_are_the_same_by_every_source",
        "sources_that_disagree_are_refused_by_name",
    ],
    "_laid_out": [
        "documents_padded_in_place_are_the_same_by_every_source",
        "documents_end_to_end_are_the_same_by_every_source",
        "what_can_be_read_in_two_ways_is_refused_with_both",
    ],
    "_check_bounds": [
        "documents_padded_in_place_are_the_same_by_every_source",
        "bounds_that_do_not_fit_the_row_are_refused",
    ],
    "first_slot": ["a_document_torn_by_padding_is_refused", "what_can_be_read_in_two_ways_is_refused_with_both"],
    "_renumbered": ["documents_end_to_end_are_the_same_by_every_source"],
    "_text_positions": [
        "documents_end_to_end_are_the_same_by_every_source",
        "one_row_of_positions_goes_for_all",
        "what_can_be_read_in_two_ways_is_refused_with_both",
    ],
    "_restarts": [
        "documents_end_to_end_are_the_same_by_every_source",
        "a_row_may_start_with_a_later_chunk_of_a_document",
        "what_can_be_read_in_two_ways_is_refused_with_both",
    ],
    "_check_unrolled": [
        "what_can_be_read_in_two_ways_is_refused_with_both",
        "documents_end_to_end_are_the_same_by_every_source",
    ],
    "_check_positions": [
        "sources_that_disagree_are_refused_by_name",
        "another_source_says_whether_a_jump_is_a_chunk_or_a_gap",
        "documents_padded_in_place_are_the_same_by_every_source",
    ],
}
"""The tests, without their `test_`, of which at least one must fail for every mutant of a function."""

EQUIVALENT = {
    "count_positions: torch.where(document_starts(doc_ids), slots, 0), offset 0 -1": "it is for padding in front only",
    "places: ahead(rows, depth, 0), offset 1 +1": "slots whose gate is closed may hold any row",
    "_text_positions: position_ids[0], offset 1 +1": "all axes agree",
    "_text_positions: position_ids[0], offset 1 -1": "all axes agree",
}
"""Mutants that compute the same, by name, with the reason."""


@dataclass(frozen=True)
class Mutant:
    """One offset of one function, moved by `by`; `site` counts the function's offsets from 0."""

    module: str
    function: str
    site: int
    text: str
    by: int

    def __str__(self) -> str:
        return f"{self.function}: {self.text}, offset {self.site} {self.by:+d}"


def offsets(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Every offset of a function and the expression around it; numbers of axes are none, nor is what a message says."""

    def visit(node: ast.AST, around: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        if isinstance(node, ast.Raise) or names_an_axis(node):
            return
        if (isinstance(node, ast.Constant) and type(node.value) is int) or (
            isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in INDEX_NAMES
        ):
            yield node, around
        for child in ast.iter_child_nodes(node):
            yield from visit(child, node)

    for statement in function.body:
        yield from visit(statement, function)


def names_an_axis(node: ast.AST) -> bool:
    """`dim=1`, `values.shape[1]`, `values.ndim == 2`, `values.flatten(0, 1)`."""
    match node:
        case ast.keyword(arg="dim") | ast.Subscript(value=ast.Attribute(attr="shape")):
            return True
        case ast.Compare(left=ast.Attribute(attr="ndim")) | ast.Call(func=ast.Attribute(attr="flatten")):
            return True
    return False


def parsed(module: str) -> ast.Module:
    return ast.parse((Path(mtp_zoo.__file__).parent / f"{module}.py").read_text(encoding="utf-8"))


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


MUTANTS = [
    Mutant(module, function.name, site, ast.unparse(around), by)
    for module in MODULES
    for function in functions(parsed(module))
    for site, (_, around) in enumerate(offsets(function))
    for by in (1, -1)
]


def mutated(mutant: Mutant) -> ast.Module:
    tree = parsed(mutant.module)
    (function,) = (each for each in functions(tree) if each.name == mutant.function)
    target = list(offsets(function))[mutant.site][0]

    class Moved(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            if node is not target:
                return self.generic_visit(node)
            return ast.BinOp(copy.copy(target), ast.Add(), ast.Constant(mutant.by))  # type: ignore[arg-type]

    return ast.fix_missing_locations(Moved().visit(tree))


def install(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tests' modules see a `TokenBatch` that is built on the mutant."""
    for name in MODULES[MODULES.index(mutant.module) :]:
        tree = mutated(mutant) if name == mutant.module else parsed(name)
        module = ModuleType(f"mtp_zoo.{name}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(tree, f"mutant of {name}.py", "exec"), module.__dict__)
    for tests in (test_batch, test_batch_sources):
        for name in ("Segment", "TokenBatch", "ahead"):
            monkeypatch.setattr(tests, name, getattr(module, name), raising=False)


def run(name: str) -> None:
    """One test with all its parameters."""
    test: Any = getattr(test_batch, f"test_{name}", None) or getattr(test_batch_sources, f"test_{name}")
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    for values in marks[0].args[1] if marks else [()]:
        test(*(values if isinstance(values, tuple) and len(inspect.signature(test).parameters) != 1 else (values,)))


def caught(mutant: Mutant) -> bool:
    for name in CHECKS[mutant.function]:
        try:
            run(name)
        except (Exception, pytest.fail.Exception):
            return True
    return False


def test_every_function_with_an_offset_has_its_checks() -> None:
    assert {mutant.function for mutant in MUTANTS} == CHECKS.keys()
    assert {str(mutant) for mutant in MUTANTS} >= EQUIVALENT.keys()


@pytest.mark.parametrize("function", CHECKS)
def test_the_checks_pass_where_nothing_is_moved(function: str) -> None:
    for name in CHECKS[function]:
        run(name)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_an_offset_off_by_one_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    install(mutant, monkeypatch)
    assert caught(mutant) != (str(mutant) in EQUIVALENT)
