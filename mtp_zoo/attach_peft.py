"""A joint model under adapters: they train in the trunk, the head trains whole beside them, and both are saved.

peft_model.save_pretrained(place)                       adapter_model.safetensors and mtp_head.safetensors
peft_model.merge_and_unload().save_pretrained(place)    a complete checkpoint, see `attach_save`
mz.attach(peft_model, place)                            the head that was saved beside an adapter
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mtp_zoo.attach_state import HEAD, bindings_of, canonical_tensors
from mtp_zoo.errors import HeadMismatchError
from mtp_zoo.groups import GROUPS
from mtp_zoo.head import DraftHead
from mtp_zoo.keymap import to_native
from mtp_zoo.loader import load_head
from mtp_zoo.made_class import Made
from mtp_zoo.parallel import unsharded

HEAD_FILE = "mtp_head.safetensors"
"""The head beside an adapter, under native names."""

ADAPTER_FILE = "adapter_model.safetensors"
"""The adapter, under PEFT's names."""


def base_model(model: Any) -> Any:
    """The transformers model inside a PEFT model; any other model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def check_adapter(model: Any, folder: str | os.PathLike[str]) -> None:
    """Compare the names of the adapter that a folder holds with those of a PEFT model that was to load it.

    PEFT loads the names that it knows and warns of the others, as of an adapter that was saved inside another model class: it
    then stays as it was initialised.

    Raises:
        HeadMismatchError: with every name that only one of them has.
    """
    from peft import get_peft_model_state_dict

    path = Path(folder) / ADAPTER_FILE
    if not path.is_file():
        return
    with safe_open(path, framework="pt") as file:
        stored = set(file.keys())
    own = set(get_peft_model_state_dict(model, adapter_name=model.active_adapter, save_embedding_layers=False))
    problems = [f"{name}: in the file, unknown to the model" for name in sorted(stored - own)]
    problems += [f"{name}: in the model, not in the file" for name in sorted(own - stored)]
    if problems:
        raise HeadMismatchError(
            f"Taking the adapter in {folder}: it was saved from a model with other names, so that PEFT did not load it.",
            remedy="Load the base with the class under which the adapter was trained, or rename the adapter's tensors.",
            problems=problems,
        )


class JointAdapter(Made):
    """What the class of a PEFT model has in front of its original, where its base is a joint model."""

    def save_pretrained(
        self: Any, save_directory: str | os.PathLike[str], *args: Any, is_main_process: bool = True, **options: Any
    ) -> None:
        """Write the adapter as PEFT does, and the head beside it."""
        head = getattr(self.get_base_model(), HEAD)
        tensors = {name: unsharded(value) for name, value in head.state_dict().items()}  # shards gather on every rank
        super().save_pretrained(save_directory, *args, is_main_process=is_main_process, **options)  # pyright: ignore[reportAttributeAccessIssue]
        if is_main_process:
            _save_head(head, tensors, Path(save_directory))

    def load_adapter(self: Any, model_id: str | os.PathLike[str], *args: Any, **options: Any) -> Any:
        """Load an adapter as PEFT does, and the head where one lies beside it: what resuming a training calls."""
        result = super().load_adapter(model_id, *args, **options)  # pyright: ignore[reportAttributeAccessIssue]
        check_adapter(self, model_id)
        place = Path(model_id) / HEAD_FILE
        if place.is_file():
            head = getattr(self.get_base_model(), HEAD)
            head.load_state_dict(canonical_tensors(head, load_file(place)))
        return result


@functools.cache
def adapter_class(original: type) -> type:
    """The class of a PEFT model around a joint model; one for each class, of the same name."""
    own: dict[str, Any] = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    own["_made_from"] = (adapter_class, original)
    return type(original)(original.__name__, (JointAdapter, original), own)


def _save_head(head: DraftHead, tensors: dict[str, Any], folder: Path) -> None:
    natives = {name: value.cpu() for name, value in to_native(bindings_of(head), tensors).items()}
    partial = folder / f".{HEAD_FILE}.partial"
    save_file(natives, partial, metadata={"format": "pt", "family": head.family.name, "depths": str(head.num_depths)})
    os.replace(partial, folder / HEAD_FILE)


def load_adapter_head(source: str | Path, base: str) -> DraftHead | None:
    """The head that lies beside an adapter, in the dtypes of its file; None where there is none.

    Args:
        source: folder of the adapter.
        base: the checkpoint of the model that the adapter is for.

    Raises:
        HeadMismatchError: the file does not hold one whole head for that model.
    """
    path = Path(source) / HEAD_FILE
    if not path.is_file():
        return None
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
    head = load_head(base, family=about["family"], init="random", depths=int(about["depths"]))
    head.load_state_dict(canonical_tensors(head, load_file(path)), assign=True)
    head.train_only(GROUPS)
    return head
