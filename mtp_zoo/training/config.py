"""The configuration of a training run: what `mtp-zoo train CONFIG.yaml` reads.

Every field says what it does; `TrainConfig.model_json_schema()` is the same text for editors and docs.
Relative paths are relative to the working directory. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo

from mtp_zoo.errors import SettingsError
from mtp_zoo.groups import GROUPS, Group
from mtp_zoo.training.problems import describe_problems

REMEDY = "Mend the listed fields; docs/quickstart.md shows a whole configuration."
RESUME_FREE: dict[str, Any] = {"resume": "free"}
"""Mark of a field that may differ when a run is resumed: it does not change the curve."""


def _no_bool(value: object) -> object:
    """YAML reads `yes` and `on` as true, which would pass for the number 1."""
    if isinstance(value, bool):
        raise ValueError(f"expected a number, got {str(value).lower()}")
    return value


Count: TypeAlias = Annotated[int, BeforeValidator(_no_bool), Field(ge=1)]
Whole: TypeAlias = Annotated[int, BeforeValidator(_no_bool), Field(ge=0)]
Positive: TypeAlias = Annotated[float, BeforeValidator(_no_bool), Field(gt=0)]
NotNegative: TypeAlias = Annotated[float, BeforeValidator(_no_bool), Field(ge=0)]
Share: TypeAlias = Annotated[float, BeforeValidator(_no_bool), Field(gt=0, lt=1)]
UpToOne: TypeAlias = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, le=1)]
Decay: TypeAlias = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, lt=1)]
Place: TypeAlias = Annotated[Path, AfterValidator(Path.expanduser)]
LossName: TypeAlias = Literal["kl", "ce", "reverse_kl", "tv", "lk"]
Tracker: TypeAlias = Literal[
    "aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"
]


class Section(BaseModel):
    """Base of all parts: frozen, no unknown fields, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)


class DataConfig(Section):
    """What is learnt from."""

    path: Place = Field(
        description="A .jsonl file, or a directory written by datasets' `save_to_disk`.", json_schema_extra=RESUME_FREE
    )
    kind: Literal["jsonl", "dataset"] = Field(default="jsonl", description="What `path` (and `eval_path`) is.")
    text_field: str | None = Field(
        default=None, description="Field that holds plain text; every token is learnt. Give this or messages_field."
    )
    messages_field: str | None = Field(
        default=None,
        description="Field that holds chat messages (a list of {role, content}); rendered with the tokenizer's chat "
        "template, and only the tokens that the assistant wrote are learnt. Give this or text_field.",
    )
    eval_path: Place | None = Field(
        default=None, description="Held-out data of the same kind and fields.", json_schema_extra=RESUME_FREE
    )
    eval_fraction: Share | None = Field(
        default=None,
        description="Share of the records of `path` to hold out, drawn with `seed`. Give this or eval_path.",
    )
    max_length: Annotated[int, BeforeValidator(_no_bool), Field(ge=3)] = Field(
        default=2048,
        description="Longest row in tokens. Longer texts are cut into pieces, longer conversations at their end.",
    )
    pack: bool = Field(
        default=True, description="Fill rows up to max_length with several documents, which never see each other."
    )

    @field_validator("messages_field")
    @classmethod
    def _one_field(cls, value: str | None, info: ValidationInfo) -> str | None:
        if (value is None) == (info.data.get("text_field") is None):
            raise ValueError(f"expected exactly one of text_field and messages_field, got {_both_or_none(value)}")
        return value

    @field_validator("eval_fraction")
    @classmethod
    def _one_eval(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("eval_path") is not None:
            raise ValueError("expected at most one of eval_path and eval_fraction, got both")
        return value


class ObjectiveConfig(Section):
    """What the head is trained to do."""

    depths: Count = Field(default=3, description="Draft depths to train, 1..depths.")
    loss: LossName | dict[LossName, Positive] = Field(
        default="kl",
        description="`kl`: to the target's own distribution; `ce`: to the next token of the text; `reverse_kl`, `tv`, `lk`: "
        "other distances from the target's distribution; or a weighted mix such as {kl: 0.9, ce: 0.1}.",
    )
    beta: Positive | None = Field(
        default=None,
        description="Depth k weighs beta^(k-1), normalised to sum 1. Default 0.6, unless weights are set.",
    )
    weights: list[NotNegative] | None = Field(
        default=None, description="Weight of every depth, used as they are. Give these or beta."
    )
    rollout: Literal["chain", "sequence"] | None = Field(
        default=None, description="How depths are chained; the default is what the family's servers do."
    )
    chunk_size: Count | None = Field(
        default=None, description="Slots whose logits exist at one time; memory grows with chunk_size x vocabulary."
    )

    @field_validator("loss")
    @classmethod
    def _some_loss(cls, value: LossName | dict[LossName, float]) -> LossName | dict[LossName, float]:
        if not value:
            raise ValueError("expected a loss or a mix of losses, got an empty mapping")
        return value

    @field_validator("weights")
    @classmethod
    def _one_weighting(cls, value: list[float] | None, info: ValidationInfo) -> list[float] | None:
        if value is None:
            return None
        if info.data.get("beta") is not None:
            raise ValueError("expected at most one of beta and weights, got both")
        if len(value) != info.data.get("depths", len(value)):
            raise ValueError(f"expected one weight for each of {info.data['depths']} depths, got {len(value)}")
        if not any(value):
            raise ValueError("expected a weight above 0, got none")
        return value


class OptimizerConfig(Section):
    """AdamW, a linear warm-up, then a cosine."""

    lr: Positive = Field(default=1e-4, description="Peak learning rate.")
    weight_decay: NotNegative = Field(
        default=0.01, description="Decoupled weight decay; not applied to norms and biases."
    )
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.95), description="Decay of the first and second moment.")
    warmup_steps: Whole = Field(default=10, description="Steps in which the rate rises linearly to its peak.")
    min_lr_ratio: UpToOne = Field(default=0.1, description="Where the cosine ends, as a share of lr.")
    max_grad_norm: Positive | None = Field(
        default=1.0, description="Gradients are scaled down to this norm; null for no limit."
    )


class TrainConfig(Section):
    """A training run, whole."""

    model: str = Field(
        min_length=1,
        description="Checkpoint to train: a directory, or a repository id that is in the Hugging Face cache.",
    )
    out: Place = Field(
        description="Directory for the servable checkpoint, written at the end. Must not exist.",
        json_schema_extra=RESUME_FREE,
    )
    run_dir: Place = Field(
        description="Directory for training checkpoints, metrics.jsonl and report.html. Must not exist, unless a "
        "run is resumed.",
        json_schema_extra=RESUME_FREE,
    )
    data: DataConfig = Field(description="What is learnt from.")
    objective: ObjectiveConfig = Field(default=ObjectiveConfig(), description="What the head is trained to do.")
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="How it is updated.")
    steps: Count | None = Field(default=None, description="Optimiser steps. Give this or epochs.")
    epochs: Positive | None = Field(
        default=None, description="Passes over the data, rounded up to whole steps. Give this or steps."
    )
    batch_size: Count = Field(default=8, description="Rows in a micro-batch, for each process.")
    grad_accumulation: Count = Field(default=1, description="Micro-batches in an optimiser step, for each process.")
    precision: Literal["bf16", "fp32"] = Field(
        default="bf16",
        description="`bf16`: target in bfloat16, head under autocast with float32 master weights; `fp32`: all float32.",
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Recompute the head's activations in the backward pass, for less memory."
    )
    seed: Whole = Field(default=0, description="Order of the rows, the held-out share, and random initialisation.")
    save_every: Count = Field(
        default=100,
        description="Steps between training checkpoints; the last step is always saved.",
        json_schema_extra=RESUME_FREE,
    )
    keep_checkpoints: Count = Field(
        default=2, description="How many of the newest training checkpoints stay.", json_schema_extra=RESUME_FREE
    )
    eval_every: Count = Field(
        default=100,
        description="Steps between evaluations of the held-out rows; the last step is always evaluated.",
        json_schema_extra=RESUME_FREE,
    )
    trackers: list[Tracker] = Field(
        default_factory=list[Tracker],
        description="Experiment trackers to report to, through accelerate.",
        json_schema_extra=RESUME_FREE,
    )
    init: Literal["checkpoint", "random"] = Field(
        default="checkpoint", description="Start from the checkpoint's head, or from random weights."
    )
    trainable: list[Group] = Field(
        default=list(GROUPS),
        description="Groups of the head's tensors that are trained; the others stay as they are. Routers' correction biases "
        "and indexers of sparse attention belong to none.",
    )
    engine: Literal["vllm", "sglang"] | None = Field(
        default=None,
        description="The engine that will serve, for families on whose conventions engines differ; none takes the family's "
        "training default.",
    )

    @field_validator("trainable")
    @classmethod
    def _some_group(cls, value: list[Group]) -> list[Group]:
        if not value:
            raise ValueError(f"expected at least one of {', '.join(GROUPS)}, got none")
        return value

    @field_validator("run_dir")
    @classmethod
    def _apart(cls, value: Path, info: ValidationInfo) -> Path:
        out = info.data.get("out")
        if out is not None and value.resolve().is_relative_to(out.resolve()):
            raise ValueError(f"expected a directory outside out ({out}), got {value}")
        return value

    @field_validator("epochs")
    @classmethod
    def _one_length(cls, value: float | None, info: ValidationInfo) -> float | None:
        if "steps" in info.data and (value is None) == (info.data["steps"] is None):
            raise ValueError(f"expected exactly one of steps and epochs, got {_both_or_none(value)}")
        return value

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, source: str = "the configuration") -> TrainConfig:
        """Validate `data`; `source` names it in errors.

        Raises:
            SettingsError: with every problem, each by its field path, what was expected and what was found.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            problems = describe_problems(error, cls, data)
            raise SettingsError(
                f"Reading {source}: {len(problems)} problem{'s' if len(problems) > 1 else ''}.",
                remedy=REMEDY,
                problems=problems,
            ) from error

    @classmethod
    def from_yaml(cls, path: str | Path) -> TrainConfig:
        """Read and validate a YAML file.

        Raises:
            SettingsError: the file is missing, is not YAML, is not a mapping, or does not validate.
        """
        path = Path(path)
        try:
            data = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
        except OSError as error:
            raise SettingsError(f"Reading {path}: {error.strerror}.", remedy="Give the path of a YAML file.") from error
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            raise SettingsError(f"Reading {path}: not YAML ({error}).", remedy="Mend the file's syntax.") from error
        if not isinstance(data, dict):
            found = "nothing" if data is None else f"a {type(data).__name__}"
            raise SettingsError(f"Reading {path}: expected a mapping of fields to values, got {found}.", remedy=REMEDY)
        return cls.from_dict(data, source=str(path))

    def to_yaml(self) -> str:
        """The whole configuration, defaults written out, as YAML that `from_yaml` reads back to an equal object."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    def flat(self) -> dict[str, Any]:
        """Every setting by dotted path, as plain JSON values."""
        return dict(_flatten(self, "", lambda _: True))

    def curve_settings(self) -> dict[str, Any]:
        """The settings that can change the loss curve, by dotted path: what a resumed run must agree on."""
        return dict(_flatten(self, "", lambda field: field.json_schema_extra != RESUME_FREE))


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe loader, which would let the second of two equal keys win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in {key for key in keys if keys.count(key) > 1}:
            raise yaml.constructor.ConstructorError(None, None, f"'{key}' stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _flatten(section: Section, prefix: str, wanted: Callable[[FieldInfo], bool]) -> Iterator[tuple[str, Any]]:
    plain = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _flatten(value, f"{prefix}{name}.", wanted)
        elif wanted(field):
            yield prefix + name, plain[name]


def _both_or_none(value: object) -> str:
    return "neither" if value is None else "both"
