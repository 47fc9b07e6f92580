"""One checkpoint for every finding of `doctor`, and beside each a neighbour that is as it should be in just that point.

The page of findings is made from these, too, so an example there can't be out of date.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtp_zoo.journal import JOURNAL, UNDO, UPDATE
from mtp_zoo.registry import get_family
from mtp_zoo.rules import Skip, any_pattern
from tests.quantizing import BLOCKS, make_fp8
from tests.stored_forms import Form, head_of, make, packed, plain_form, site_of
from tests.tiny import tiny_config, tiny_tensors, write_checkpoint, write_index

FC, NORM = "mtp.fc.weight", "mtp.norm.weight"
EMBEDDING = "model.embed_tokens.weight"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SIDECAR = "mtp.safetensors"
SPREAD = 0.02
"""initializer_range of the tiny configs."""

Make = Callable[[Path], Path]


@dataclass(frozen=True)
class Case:
    """A checkpoint that has the finding, and one that has not.

    Attributes:
        broken, sound: write them into a folder and return their directory.
        also: other findings that the same damage brings with it.
        deep: whether tensors have to be read for it.
        base: what writes the checkpoint that the head was trained from, where it is compared.
        left: findings of the neighbour.
        fixed: whether `--fix` mends it.
    """

    broken: Make
    sound: Make
    also: frozenset[str] = frozenset()
    deep: bool = False
    base: Make | None = None
    left: frozenset[str] = frozenset()
    fixed: bool = False


@cache
def _tensors(depths: int, tied: bool, vocab: int) -> Mapping[str, Tensor]:
    return tiny_tensors(tiny_config(tied=tied, vocab=vocab), head_depths=depths)


def tensors(depths: int = 1, *, tied: bool = True, vocab: int = 128) -> dict[str, Tensor]:
    return dict(_tensors(depths, tied, vocab))


def split(found: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """The trunk in one file, the head in another, as published checkpoints have it by and large."""
    names = list(found)
    return {ONE: [n for n in names if not n.startswith("mtp.")], TWO: [n for n in names if n.startswith("mtp.")]}


def whole(folder: Path, changes: Mapping[str, Tensor | None] | None = None, **fields: Any) -> Path:
    """A sound checkpoint in two files, with some tensors changed, added or (None) left out."""
    found: dict[str, Any] = {**tensors(), **(changes or {})}
    kept = {name: value for name, value in found.items() if value is not None}
    return write_checkpoint(folder, tiny_config(**fields), kept, shards=split(kept))


def reindexed(folder: Path, changes: Mapping[str, str | None], total: int | None = None) -> Path:
    """The sound checkpoint with an index that says otherwise."""
    root = whole(folder)
    found: dict[str, Any] = {**true_map(), **changes}
    size = sum(value.nbytes for value in tensors().values()) if total is None else total
    write_index(root, {name: file for name, file in found.items() if file is not None}, size)
    return root


def true_map() -> dict[str, str]:
    return {name: file for file, names in split(tensors()).items() for name in names}


def _unreadable_index(folder: Path) -> Path:
    root = whole(folder)
    (root / "model.safetensors.index.json").write_text('{"weight_map":')
    return root


def _without(folder: Path, file: str) -> Path:
    root = whole(folder)
    (root / file).unlink()
    return root


def _truncated(folder: Path) -> Path:
    root = whole(folder)
    (root / ONE).write_bytes((root / ONE).read_bytes()[:-1])
    return root


def renamed(folder: Path) -> Path:
    root = whole(folder)
    (root / TWO).rename(root / "model-b.safetensors")
    return root


def with_file(
    folder: Path, file: str, extra: Mapping[str, Tensor], *, listed: bool, first: str = ONE, drop: bool = False
) -> Path:
    """The trunk in one file, the head in a second, `extra` in a third; `drop` leaves `extra` out of the others."""
    found = tensors()
    layout = {first if place == ONE else place: names for place, names in split(found).items()}
    if drop:
        layout = {place: [n for n in names if n not in extra] for place, names in layout.items()}
        layout = {place: names for place, names in layout.items() if names}
    true = {name: place for place, names in layout.items() for name in names}
    root = write_checkpoint(folder, tiny_config(), found, shards=layout, index=False)
    write_checkpoint(root, tiny_config(), extra, shards={file: list(extra)}, index=False)
    held = {**found, **extra}
    every = true | (dict.fromkeys(extra, file) if listed else {})
    write_index(root, every, sum(held[name].nbytes for name in every))
    return root


def head_tensors() -> dict[str, Tensor]:
    return {name: value for name, value in tensors().items() if name.startswith("mtp.")}


def sidecar(folder: Path, *, listed: bool) -> Path:
    """The head in a file of its own, and in no other."""
    return with_file(folder, SIDECAR, head_tensors(), listed=listed, drop=True)


def _escaping(folder: Path, file: str) -> Path:
    root = whole(folder)
    (root / "part").mkdir()
    (root / TWO).rename(root / "part" / TWO)
    write_index(root, {n: (file if place == TWO else place) for n, place in true_map().items()}, _size())
    return root


def _size() -> int:
    return sum(value.nbytes for value in tensors().values())


def _recorded(folder: Path, record: str) -> Path:
    """With the record of an update in place."""
    root = whole(folder)
    (root / record).mkdir()
    (root / record / JOURNAL).write_text('{"format": 1, "replaced": [], "added": [], "written": {}}')
    return root


def depths(folder: Path, *, declared: int | None, stored: int) -> Path:
    found = tensors(stored) if stored else {n: t for n, t in tensors().items() if not n.startswith("mtp.")}
    return write_checkpoint(folder, tiny_config(depths=declared), found)


def glm(folder: Path, *, copies: bool = False, change: Mapping[str, Tensor] | None = None, **fields: Any) -> Path:
    """An in-stack head with a router."""
    form = plain_form("glm4_moe")
    config, found = make(Form(form.family, form.experts, copies), **fields)
    return write_checkpoint(folder, config, {**found, **(change or {})})


def _router_bias() -> tuple[str, Tensor]:
    _, found = make(plain_form("glm4_moe"))
    name = next(n for n in head_of("glm4_moe", found) if n.endswith("e_score_correction_bias"))
    return name, found[name]


def copied() -> tuple[str, Tensor]:
    """The head's copy of the embedding."""
    _, found = make(Form("glm4_moe", plain_form("glm4_moe").experts, copies=True))
    rules = [rule for rule in get_family("glm4_moe").rules if isinstance(rule, Skip) and rule.copy_of == "embedding"]
    name = next(n for n in head_of("glm4_moe", found) if any_pattern(rules[0].native).fullmatch(n))
    return name, found[name]


def both_forms(folder: Path, *, both: bool) -> Path:
    """Experts one by one, and packed beside them."""
    config, found = make(plain_form("qwen3_5_moe"))
    return write_checkpoint(folder, config, {**found, **(packed(found, site_of("qwen3_5_moe")) if both else {})})


def _unknown_type(folder: Path) -> Path:
    config = {**tiny_config(), "model_type": "mystery"}
    return write_checkpoint(folder, config, {n: t for n, t in tensors().items() if not n.startswith("mtp.")})


def _resized(folder: Path, *, both: bool) -> Path:
    found = tensors(tied=False)
    wide = tensors(tied=False, vocab=136)
    found[EMBEDDING] = wide[EMBEDDING]
    found["lm_head.weight"] = wide["lm_head.weight"] if both else found["lm_head.weight"]
    return write_checkpoint(folder, tiny_config(tied=False, vocab=136), found)


def _prefixed(folder: Path) -> Path:
    found = {f"model.{name}" if name.startswith("mtp.") else name: value for name, value in tensors().items()}
    return write_checkpoint(folder, tiny_config(), found)


def _cast(folder: Path, dtype: torch.dtype) -> Path:
    return whole(folder, {name: value.to(dtype) for name, value in head_tensors().items()})


class Fp8(NamedTuple):
    """An FP8 checkpoint, and its first quantised matrix with its scale."""

    config: dict[str, Any]
    found: dict[str, Tensor]
    weight: str
    scale: str


def fp8() -> Fp8:
    config, found = make_fp8(plain_form("qwen3_5"), BLOCKS)
    weight = next(name for name in sorted(found) if found[name].dtype == torch.float8_e4m3fn)
    return Fp8(config, dict(found), weight, f"{weight}{BLOCKS.suffix}")


def quantised(folder: Path, change: Callable[[Fp8], Mapping[str, Tensor | None]] = lambda _: {}, **config: Any) -> Path:
    made = fp8()
    kept = {name: value for name, value in {**made.found, **change(made)}.items() if value is not None}
    return write_checkpoint(folder, {**made.config, **config}, kept)


def floats_in_fp8(folder: Path, *, listed: bool) -> Path:
    """A BF16 head in a checkpoint whose config says FP8."""
    lists = {"modules_to_not_convert": ["mtp.layers.0", *sorted(_modules())]} if listed else {}
    return whole(folder, quantization_config={**BLOCKS.settings, **lists})


def _modules() -> set[str]:
    fused = ("qkv_proj", "gate_up_proj")
    parts = {name.removesuffix(".weight") for name, value in head_tensors().items() if value.ndim > 1}
    return parts | {f"mtp.layers.0.{place}.{name}" for place, name in zip(("self_attn", "mlp"), fused, strict=True)}


def _listed_though_quantised(folder: Path) -> Path:
    made = fp8()
    settings = {**made.config["quantization_config"], "modules_to_not_convert": sorted(_modules())}
    return quantised(folder, quantization_config=settings)


def _gptq(folder: Path) -> Path:
    """One projection in a form that can be served and not trained."""
    stem = "mtp.layers.0.mlp.up_proj"
    codes = torch.zeros(8, 128, dtype=torch.int32)
    parts = {f"{stem}.weight": None, f"{stem}.qweight": codes, f"{stem}.scales": torch.ones(1, 128).half()}
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 64, "dynamic": {r"-:^mtp\.(?!.*up_proj)": {}}}
    return whole(folder, parts, quantization_config=settings)


def _with_nan(value: Tensor) -> Tensor:
    out = value.clone()
    out.view(-1)[3] = float("nan")
    return out


def _fresh(spread: float) -> Tensor:
    """Random numbers as an initialiser makes them."""
    shape = tensors()[FC].shape
    return (torch.randn(shape, generator=torch.Generator().manual_seed(3)) * spread).to(torch.bfloat16)


def moved(value: Tensor) -> Tensor:
    """A value as some training leaves it."""
    return value + 0.125


def trained(folder: Path, names: int) -> Path:
    """The base with the first `names` tensors of its head trained."""
    return whole(folder, {name: moved(value) for name, value in list(head_tensors().items())[:names]})


def _ids(*found: str) -> frozenset[str]:
    return frozenset(found)


CASES: Mapping[str, Case] = {
    "MZ001": Case(_unreadable_index, whole, fixed=True),
    "MZ002": Case(lambda at: _without(at, ONE), whole),
    "MZ003": Case(_truncated, whole),
    "MZ004": Case(lambda at: reindexed(at, {FC: ONE}), whole, fixed=True),
    "MZ005": Case(lambda at: reindexed(at, {"mtp.layers.1.mlp.up_proj.weight": TWO}), whole),
    "MZ006": Case(
        lambda at: with_file(at, "old.safetensors", {NORM: tensors()[NORM]}, listed=False),
        lambda at: with_file(at, "old.safetensors", {NORM: tensors()[NORM]}, listed=True, drop=True),
        fixed=True,
    ),
    "MZ007": Case(lambda at: reindexed(at, {FC: None}), whole, fixed=True),
    "MZ008": Case(lambda at: sidecar(at, listed=False), lambda at: sidecar(at, listed=True), fixed=True),
    "MZ009": Case(
        lambda at: with_file(at, "consolidated.safetensors", {"layers.0.wq.weight": torch.ones(2)}, listed=False),
        lambda at: with_file(at, "consolidated.safetensors", {"layers.0.wq.weight": torch.ones(2)}, listed=True),
    ),
    "MZ010": Case(
        lambda at: with_file(at, SIDECAR, head_tensors(), listed=True, drop=True, first="model.safetensors"),
        lambda at: sidecar(at, listed=True),
    ),
    "MZ011": Case(lambda at: reindexed(at, {}, total=1), whole, fixed=True),
    "MZ012": Case(
        lambda at: write_checkpoint(at, tiny_config(), tensors(), shards=2, index=False),
        lambda at: write_checkpoint(at, tiny_config(), tensors(), shards=1, index=False),
        fixed=True,
    ),
    "MZ013": Case(lambda at: _escaping(at, f"../{TWO}"), lambda at: _escaping(at, f"part/{TWO}")),
    "MZ014": Case(lambda at: _recorded(at, UPDATE), whole, fixed=True),
    "MZ015": Case(lambda at: _recorded(at, UNDO), whole),
    "MZ101": Case(lambda at: whole(at, mtp_num_hidden_layers="1"), lambda at: whole(at, mtp_num_hidden_layers=1)),
    "MZ102": Case(
        lambda at: depths(at, declared=1, stored=0), lambda at: depths(at, declared=0, stored=0), left=_ids("MZ109")
    ),
    "MZ103": Case(
        lambda at: depths(at, declared=None, stored=1), lambda at: depths(at, declared=1, stored=1), fixed=True
    ),
    "MZ104": Case(lambda at: depths(at, declared=3, stored=1), lambda at: depths(at, declared=3, stored=3)),
    "MZ105": Case(lambda at: glm(at, num_hidden_layers=7), glm),
    "MZ106": Case(_unknown_type, whole),
    "MZ107": Case(
        lambda at: write_checkpoint(at, tiny_config(tied=False), tensors()),
        lambda at: write_checkpoint(at, tiny_config(tied=False), tensors(tied=False)),
    ),
    "MZ108": Case(lambda at: _resized(at, both=False), lambda at: _resized(at, both=True)),
    "MZ109": Case(lambda at: depths(at, declared=None, stored=0), lambda at: depths(at, declared=1, stored=1)),
    "MZ201": Case(lambda at: whole(at, {FC: None}), whole),
    "MZ202": Case(lambda at: whole(at, {"mtp.extra.weight": torch.ones(2)}), whole),
    "MZ203": Case(lambda at: whole(at, {FC: torch.ones(64, 64).bfloat16()}), whole),
    "MZ204": Case(lambda at: both_forms(at, both=True), lambda at: both_forms(at, both=False), _ids("MZ202")),
    "MZ205": Case(lambda at: glm(at, change={_router_bias()[0]: _router_bias()[1].bfloat16()}), glm),
    "MZ206": Case(_prefixed, whole, _ids("MZ102")),
    "MZ207": Case(
        lambda at: glm(at, copies=True, change={copied()[0]: moved(copied()[1])}), lambda at: glm(at, copies=True)
    ),
    "MZ208": Case(lambda at: _cast(at, torch.float32), lambda at: _cast(at, torch.bfloat16)),
    "MZ301": Case(lambda at: quantised(at, lambda made: {made.scale: None}), quantised),
    "MZ302": Case(
        lambda at: quantised(at, lambda made: {made.weight: made.found[made.weight].to(torch.bfloat16)}),
        quantised,
        _ids("MZ304"),
    ),
    "MZ303": Case(lambda at: quantised(at, lambda made: {made.scale: made.found[made.scale][:1]}), quantised),
    "MZ304": Case(lambda at: floats_in_fp8(at, listed=False), lambda at: floats_in_fp8(at, listed=True), fixed=True),
    "MZ305": Case(_listed_though_quantised, quantised),
    "MZ306": Case(_gptq, whole),
    "MZ401": Case(lambda at: whole(at, {FC: _with_nan(tensors()[FC])}), whole, deep=True),
    "MZ402": Case(lambda at: whole(at, {FC: torch.zeros_like(tensors()[FC])}), whole, deep=True),
    "MZ403": Case(
        lambda at: whole(at, {FC: _fresh(SPREAD)}), lambda at: whole(at, {FC: _fresh(1.1 * SPREAD)}), deep=True
    ),
    "MZ404": Case(whole, lambda at: trained(at, 15), base=whole),
    "MZ405": Case(lambda at: trained(at, 14), lambda at: trained(at, 15), base=whole),
    "MZ406": Case(
        whole,
        lambda at: glm(at, change={_router_bias()[0]: moved(_router_bias()[1])}),
        base=glm,
        left=_ids("MZ405"),
    ),
}
"""By finding."""


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())
