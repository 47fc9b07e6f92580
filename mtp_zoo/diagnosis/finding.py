"""Findings: what can be wrong with a checkpoint that should hold a draft head, each under an id that never changes.

    MZ0xx  weight files and their index        MZ3xx  quantisation
    MZ1xx  config.json, and what it declares   MZ4xx  numbers (read only where that is asked for)
    MZ2xx  the head's tensors

An id that is given up is never used again: scripts and dashboards know findings by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "info"]
"""`error`: an engine serves it wrongly or not at all, or the library refuses it; `warning`: it is served worse, or by luck."""

SHOWN = 3
"""Entries of a long list that the text shows; JSON has all of them."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One thing that can be wrong.

    Attributes:
        severity: how bad it is.
        title: what is the case, as a sentence without its full stop.
        because: what comes of it.
    """

    severity: Severity
    title: str
    because: str


CATALOGUE: Mapping[str, Kind] = {
    "MZ001": Kind("error", "the index can't be read", "Engines stop, or take files by their names alone."),
    "MZ002": Kind(
        "error", "a listed weight file is not there", "A download or a copy was cut short, or files were renamed."
    ),
    "MZ003": Kind(
        "error", "a weight file can't be read", "It is truncated, a git-lfs pointer, or no safetensors file."
    ),
    "MZ004": Kind(
        "error",
        "the index names another file than the one that holds a tensor",
        "Who reads by name finds nothing there.",
    ),
    "MZ005": Kind(
        "error", "the index lists tensors that no file holds", "Engines leave such parameters uninitialised."
    ),
    "MZ006": Kind(
        "error",
        "several files hold a tensor of one name",
        "Engines take every tensor of every file that they open; the order of the files decides which copy is served.",
    ),
    "MZ007": Kind(
        "warning",
        "the index leaves out tensors of a file that it lists",
        "Engines find them, who reads by name does not.",
    ),
    "MZ008": Kind(
        "error",
        "the head lies in a file that the index does not list",
        "vLLM does not open the file, SGLang seldom does.",
    ),
    "MZ009": Kind("warning", "a weight file is not in the index", "Engines do not open it."),
    "MZ010": Kind(
        "warning",
        "model.safetensors lies beside the files that hold the head",
        "Readers that open that file alone, transformers among them, miss the head.",
    ),
    "MZ011": Kind("info", "total_size in the index is not the size of the tensors", "Some tools plan memory by it."),
    "MZ012": Kind("warning", "there are several weight files and no index", "Some engines refuse that, others guess."),
    "MZ013": Kind(
        "error", "reading the weights would run code or leave the directory", "The library and the engines refuse that."
    ),
    "MZ014": Kind(
        "error", "an update in place was cut short", "Its files are half old, half new; nothing else was checked."
    ),
    "MZ015": Kind(
        "info", "the files that the last update in place replaced are kept", "They take space until they are discarded."
    ),
    "MZ101": Kind("error", "config.json can't be used", "What depends on it was not checked."),
    "MZ102": Kind(
        "error",
        "config.json declares a head, and none is on disk",
        "A trainer, merge or quantisation dropped it: engines stop, or draft with uninitialised memory.",
    ),
    "MZ103": Kind("error", "a head is on disk, and config.json declares none", "Engines do not look for it."),
    "MZ104": Kind(
        "error",
        "config.json and the tensors disagree on the number of depths",
        "Engines build what the config declares.",
    ),
    "MZ105": Kind(
        "error",
        "config.json and the tensors disagree on the layer where the head begins",
        "Engines look behind the declared number of trunk layers.",
    ),
    "MZ106": Kind("warning", "no registered family fits the checkpoint", "What concerns the head was not checked."),
    "MZ107": Kind(
        "error", "the embedding, the lm_head or the final norm can't be had", "The head borrows them from the model."
    ),
    "MZ108": Kind(
        "error", "the vocabulary has several sizes", "It was resized on one side: ids have no row, or rows have no id."
    ),
    "MZ109": Kind("info", "there is no head, and config.json declares none", "There is nothing to draft with."),
    "MZ201": Kind(
        "error", "tensors of the head are missing", "The head does not load; engines leave them uninitialised."
    ),
    "MZ202": Kind(
        "error", "the head holds tensors that no rule of its family knows", "The library loads no head in part."
    ),
    "MZ203": Kind(
        "error", "tensors of the head have another shape than config.json asks for", "The head does not load."
    ),
    "MZ204": Kind(
        "error",
        "tensors of the head are stored in several forms or dtypes at once",
        "Which of them counts is not decided.",
    ),
    "MZ205": Kind(
        "warning",
        "a tensor that engines keep in FP32 is stored with less",
        "The router's choice of experts moves; the lost bits do not come back by a cast.",
    ),
    "MZ206": Kind(
        "error",
        "what looks like a head has another prefix",
        "Engines and the library look under the family's own names.",
    ),
    "MZ207": Kind(
        "warning",
        "the head's copy of embedding or lm_head differs from the model's",
        "Engines ignore such a copy: what was trained with it is served with another one.",
    ),
    "MZ208": Kind(
        "warning", "the head is stored in another float dtype than the model", "Engines cast it; FP32 doubles its size."
    ),
    "MZ301": Kind(
        "error", "quantised tensors have no scale", "Engines decode them with whatever the scale was made as."
    ),
    "MZ302": Kind(
        "error", "scales have no quantised tensor", "They are left over, or the tensor was replaced by a float one."
    ),
    "MZ303": Kind("error", "scales do not fit their tensors", "Numbers are decoded with the scales of others."),
    "MZ304": Kind(
        "error",
        "the config has an engine build float modules of the head as quantised ones",
        "Floats load into the wrong slots, and no draft is accepted.",
    ),
    "MZ305": Kind(
        "error",
        "the config excludes modules of the head from quantisation that are stored quantised",
        "The engine builds float modules, and takes codes for numbers.",
    ),
    "MZ306": Kind(
        "warning", "the head is stored in a quantised form that can't be trained", "It can be served as it is."
    ),
    "MZ401": Kind("error", "the head holds NaN or infinity", "No draft is accepted."),
    "MZ402": Kind("error", "matrices of the head are all zero", "They were allocated and never filled."),
    "MZ403": Kind(
        "warning", "matrices of the head look as they were initialised", "They were never loaded or never trained."
    ),
    "MZ404": Kind("error", "the head is the base's, number for number", "It was not trained, or not saved."),
    "MZ405": Kind("info", "a part of the head is the base's, number for number", "It was frozen, or it was not saved."),
    "MZ406": Kind(
        "warning", "the head can't be compared with the base's", "No tensor has name, shape and form in common."
    ),
}
"""Every finding, by id."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with one checkpoint.

    Attributes:
        id: key of the catalogue.
        facts: what was seen; JSON values.
        fix: the command, or the act in words, that mends it; None where nothing needs to be done.
    """

    id: str
    facts: Mapping[str, Any]
    fix: str | None = None

    @property
    def kind(self) -> Kind:
        """What the id stands for."""
        return CATALOGUE[self.id]

    @property
    def severity(self) -> Severity:
        """How bad it is."""
        return self.kind.severity

    def as_dict(self) -> dict[str, Any]:
        """The finding for `--json`."""
        return {"id": self.id, "severity": self.severity, "facts": dict(self.facts), "fix": self.fix}

    def __str__(self) -> str:
        lines = [f"{self.id} {self.severity}: {self.kind.title}", f"  {self.kind.because}"]
        lines += [f"  {name}: {_in_words(value)}" for name, value in self.facts.items()]
        return "\n".join([*lines, *([f"  fix: {self.fix}"] if self.fix else [])])


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return _shortened([f"{key}: {_in_words(inner)}" for key, inner in value.items()], "; ")
    if isinstance(value, list | tuple):
        return _shortened([str(one) for one in value], ", ")
    return "nothing" if value is None else str(value)


def _shortened(parts: list[str], between: str) -> str:
    more = [f"and {len(parts) - SHOWN} more"] if len(parts) > SHOWN else []
    return between.join([*parts[:SHOWN], *more]) or "none"


@dataclass(frozen=True)
class Diagnosis:
    """Everything that is wrong with one checkpoint.

    Attributes:
        source: what was looked at, as given.
        findings: by id.
    """

    source: str
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether no finding is an error."""
        return all(finding.severity != "error" for finding in self.findings)

    def has(self, id: str) -> bool:
        """Whether there is a finding of that id."""
        return any(finding.id == id for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """The diagnosis for `--json`."""
        return {"findings": [finding.as_dict() for finding in self.findings]}

    def __str__(self) -> str:
        if not self.findings:
            return f"{self.source}: nothing found"
        return "\n".join([f"{self.source}: {len(self.findings)} finding(s)", *map(str, self.findings)])
