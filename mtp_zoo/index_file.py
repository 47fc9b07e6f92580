"""`model.safetensors.index.json`: which file holds which tensor, as somebody once wrote it down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, cast

from mtp_zoo.errors import BrokenCheckpointError, UnsafeCheckpointError
from mtp_zoo.json_text import CONTROLS, parse_object, read_bounded, refuse_controls
from mtp_zoo.safetensors_header import HEADER_LIMIT, LFS_POINTER

INDEX_NAME = "model.safetensors.index.json"
INDEX_LIMIT = HEADER_LIMIT
"""Longest index in bytes: it says less of a tensor than a header does."""

PATH_LIMIT = 1024
"""Longest listed path in letters."""

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
CONVERT_PICKLES = (
    "Convert it in an environment that you trust: load it with transformers, `model.save_pretrained(directory)`; "
    "then add the head's tensors, which transformers leaves out."
)


class Listing(NamedTuple):
    """What an index file says.

    Attributes:
        nbytes: its size.
        weight_map: tensor name -> relative path, normalised; None where there is no index.
        metadata: what it says besides; `total_size`, for example.
    """

    nbytes: int
    weight_map: dict[str, str] | None
    metadata: Mapping[str, Any]


def read_index(root: Path) -> Listing:
    """The index in `root`.

    Raises:
        BrokenCheckpointError: it is no JSON object with a weight_map of unique names.
        UnsafeCheckpointError: a path leaves the directory, or names a pickle.
    """
    path = root / INDEX_NAME
    if not path.exists() and not path.is_symlink():
        return Listing(0, None, {})
    try:
        raw = read_bounded(path, INDEX_LIMIT)
        if raw.startswith(LFS_POINTER):
            raise _unreadable(root, "a git-lfs pointer, not the file that it points to (`git lfs pull` gets it)")
        content = parse_object(raw, unique=True)
        weight_map = content.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("it holds no 'weight_map'")
        refuse_controls(cast("dict[str, Any]", weight_map))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(root, str(error)) from error
    places: dict[str, str] = {}  # each file is looked at once: an index can hold a hundred thousand names
    for name, file in cast("dict[str, Any]", weight_map).items():
        if not isinstance(file, str) or not file:
            raise _unreadable(root, f"the file of '{name}' is {file!r}, not a name")
        if file not in places:
            places[file] = _inside(root, name, file)
    found = {name: places[file] for name, file in cast("dict[str, str]", weight_map).items()}
    metadata = content.get("metadata")
    return Listing(len(raw), found, cast("dict[str, Any]", metadata) if isinstance(metadata, dict) else {})


def encode_index(weight_map: Mapping[str, str], metadata: Mapping[str, object]) -> str:
    """The text of an index file."""
    content = {"metadata": dict(metadata), "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(content, indent=2) + "\n"


def _unreadable(root: Path, reason: str) -> BrokenCheckpointError:
    return BrokenCheckpointError(
        f"Reading {root / INDEX_NAME}: {reason}.", remedy="Restore the index from the original checkpoint."
    )


def _inside(root: Path, name: str, file: str) -> str:
    """A listed path, normalised; inside the directory."""
    if len(file) > PATH_LIMIT:
        raise UnsafeCheckpointError(
            f"Reading {root / INDEX_NAME}: it puts '{name}' in a path of {len(file)} letters, {file[:40]!r} and more.",
            remedy="Do not use this checkpoint, or give the file a shorter name.",
        )
    path = PurePosixPath(file)
    # A file may be a link out of the directory (that is how the Hugging Face cache stores it); its folder may not.
    outside = (
        path.is_absolute() or ".." in path.parts or any(letter in file for letter in "\\:") or CONTROLS.search(file)
    )
    if outside or not (root / path).parent.resolve().is_relative_to(root.resolve()):
        raise UnsafeCheckpointError(
            f"Reading {root / INDEX_NAME}: it puts '{name}' in {file!r}, outside the checkpoint's directory.",
            remedy="Do not use this checkpoint, or correct the path if you made it yourself.",
        )
    if file.endswith(PICKLE_SUFFIXES):
        raise UnsafeCheckpointError(
            f"Reading {root / INDEX_NAME}: it puts '{name}' in '{file}', a pickle; reading it would run code.",
            remedy=CONVERT_PICKLES,
        )
    return str(path)
