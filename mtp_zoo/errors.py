"""Every error that `mtp_zoo` raises on purpose.

One class a condition. The command line maps every `MTPZooError` to exit code 2 and prints `str(error)`.

    MTPZooError
    ├── ArgumentError                     arguments of the wrong type or out of range; all in its .problems
    ├── RegistryError
    │   ├── UnknownFamilyError            no family of that name
    │   ├── DuplicateFamilyError          two families claim one name or one model_type
    │   ├── FamilyDefinitionError         a family's own rules or spec do not add up
    │   └── UnresolvedFamilyError         no registered family fits the checkpoint, or its tensors contradict its config
    ├── CheckpointError
    │   ├── SourceNotFoundError           no such directory, cache tree or cached repository, or no weights in it
    │   ├── BrokenCheckpointError         the index and the shards disagree, or a shard can't be read; see .problems
    │   ├── UnsafeCheckpointError         pickle, a path that leaves the directory, an unbounded header
    │   ├── HubReadError                  the Hub can't be reached, or did not give the bytes that were asked for
    │   │   └── ChangedOnHubError         the repository or one of its files changed while it was read
    │   ├── ModelConfigError              config.json is missing, unreadable or holds a value of the wrong kind
    │   └── UnsupportedQuantizationError  the head is stored in a scheme that can't be trained
    ├── HeadError
    │   ├── HeadNotFoundError             the checkpoint holds no head
    │   ├── HeadCountError                config and tensors disagree on the number of depths
    │   ├── HeadLayerError                config and tensors disagree on the layer where the head begins
    │   ├── HeadMismatchError             missing, unexpected or misshapen tensors; all in its .problems
    │   ├── ScaleMismatchError            quantised tensors and scales that do not belong together; all in its .problems
    │   ├── SharedTensorError             embedding, lm_head or final norm can't be had
    │   ├── UnsupportedAttentionError     the block's attention asks for something that is not computed here
    │   ├── PrecisionError                half-precision parameters under autocast to the other half precision
    │   ├── ContextLimitError             a sequence longer than the head's attention is exact for
    │   └── NotAttachedError              the head was run without the target's embedding and lm_head
    ├── BatchError                        a TokenBatch that breaks the mask contract
    ├── ObjectiveError                    an objective that can't be computed as asked
    ├── ParallelError                     a batch or a head that can't be cut over ranks as asked
    │   └── RankError                     another rank failed or ended
    ├── AttachError                       a model and a head that can't be trained together as asked
    │   └── NoMTPLossError                a training call that would leave the head without a gradient
    ├── AcceptanceError                   prompts or settings the draft/verify loop can't run
    ├── DataError
    │   ├── EmptyDatasetError             no rows, or nothing in them to learn
    │   └── ChatTemplateError             messages were given and the tokenizer can't say which tokens the assistant wrote
    ├── SettingsError                     a training configuration that does not validate
    ├── ResumeError                       a training checkpoint that can't be continued
    ├── ExportError
    │   ├── OutputExistsError             the output path is taken
    │   ├── GraftMismatchError            a head and a trunk that are not of one model; all facts in its .problems
    │   ├── PushError                     the Hub did not take a checkpoint; the repository is as it was
    │   ├── RollbackError                 an update in place that can't be taken back, or of which nothing is kept
    │   └── VerificationError             what was written is not what was meant; nothing was published
    └── ConformanceError                  a conformance run that can't be made as asked
        └── EnvironmentSetupError         an engine's environment can't be made; the command ends with 3, not 2
"""

from __future__ import annotations

from collections.abc import Sequence


class MTPZooError(Exception):
    """Base of the tree.

    Args:
        message: the act, the thing, what was expected and what was found.
        remedy: what the reader can do about it; one sentence in the imperative.
        problems: when several things are wrong with one plan, all of them; printed one a line.
    """

    def __init__(self, message: str, *, remedy: str, problems: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.problems = tuple(problems)

    def __str__(self) -> str:
        lines = [self.message, *(f"  - {problem}" for problem in self.problems), f"Remedy: {self.remedy}"]
        return "\n".join(lines)


class ArgumentError(MTPZooError):
    """Arguments of a call that have the wrong type or are out of range; all are in `problems`."""


class RegistryError(MTPZooError):
    """Something about the table of families."""


class UnknownFamilyError(RegistryError):
    """No family of that name is registered."""


class DuplicateFamilyError(RegistryError):
    """Two families claim one name or one model_type."""


class FamilyDefinitionError(RegistryError):
    """A family's rules and its module do not add up; the author of the family must mend it."""


class UnresolvedFamilyError(RegistryError):
    """No registered family fits the checkpoint, or its tensors contradict its config."""


class CheckpointError(MTPZooError):
    """Something about the files of a checkpoint."""


class SourceNotFoundError(CheckpointError):
    """There is nothing to read at the given place."""


class BrokenCheckpointError(CheckpointError):
    """The index and the shards disagree, or a shard can't be read."""


class UnsafeCheckpointError(CheckpointError):
    """Reading would run code or leave the checkpoint's directory."""


class HubReadError(CheckpointError):
    """The Hub can't be reached, or did not give the bytes that were asked for."""


class ChangedOnHubError(HubReadError):
    """The repository or one of its files changed while it was read."""


class ModelConfigError(CheckpointError):
    """config.json is missing, unreadable or holds a value of the wrong kind."""


class UnsupportedQuantizationError(CheckpointError):
    """The head is stored in a scheme that can't be trained."""


class HeadError(MTPZooError):
    """Something about the head that a checkpoint holds."""


class HeadNotFoundError(HeadError):
    """The checkpoint holds no head."""


class HeadCountError(HeadError):
    """config.json and the tensors disagree on the number of depths."""


class HeadLayerError(HeadError):
    """config.json and the tensors disagree on the layer where an in-stack head begins."""


class HeadMismatchError(HeadError):
    """The head's tensors are not the ones that the family's key map asks for."""


class ScaleMismatchError(HeadError):
    """Quantised tensors of the head and their scales do not belong together."""


class SharedTensorError(HeadError):
    """The target's embedding, lm_head or final norm can't be had."""


class UnsupportedAttentionError(HeadError):
    """The attention of a head's block asks for something that the draft chain does not compute."""


class PrecisionError(HeadError):
    """Half-precision parameters run under autocast to the other half precision."""


class ContextLimitError(HeadError):
    """A sequence is longer than the context up to which the head's attention is what engines serve."""


class NotAttachedError(HeadError):
    """The head was run before it was given the target's embedding and lm_head."""


class BatchError(MTPZooError):
    """A token batch that breaks the mask contract."""


class ObjectiveError(MTPZooError):
    """An objective that can't be computed as asked."""


class ParallelError(MTPZooError):
    """A batch or a head that can't be cut over ranks, or used while it is cut, as asked."""


class RankError(ParallelError):
    """Another rank failed or ended; the message has its number and its error."""


class AttachError(MTPZooError):
    """A model and a head that can't be trained together as asked."""


class NoMTPLossError(AttachError):
    """A call of a joint model in training that would leave the head without a gradient."""


class AcceptanceError(MTPZooError):
    """Prompts or settings that the draft/verify loop can't run."""


class DataError(MTPZooError):
    """Training or evaluation data that can't be used."""


class EmptyDatasetError(DataError):
    """No rows, or rows in which there is nothing to learn."""


class ChatTemplateError(DataError):
    """Messages were given and the tokenizer can't say which tokens the assistant wrote."""


class SettingsError(MTPZooError):
    """A training configuration that does not validate."""


class ResumeError(MTPZooError):
    """A training checkpoint that can't be continued."""


class ExportError(MTPZooError):
    """Writing a checkpoint failed; the base and the output path are as they were."""


class OutputExistsError(ExportError):
    """The output path is taken."""


class GraftMismatchError(ExportError):
    """A head and a trunk that are not of one model."""


class PushError(ExportError):
    """The Hub did not take a checkpoint; the repository is as it was."""


class RollbackError(ExportError):
    """An update in place can't be taken back, or nothing of one is kept."""


class VerificationError(ExportError):
    """What was written is not what was meant; nothing was published."""


class ConformanceError(MTPZooError):
    """A conformance run that can't be made as asked."""


class EnvironmentSetupError(ConformanceError):
    """An engine's environment can't be made; what was half made is gone."""
