"""Confine a path that a file names to the directory of that file."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath, PureWindowsPath

from merganser.errors import CheckpointError
from merganser.excerpts import shorten

_LONGEST = 255  # maximum bytes of a file name on common systems


def confine(directory: Path, name: object, what: str) -> Path:
    """Return the path of `name` inside `directory`, or refuse a name that leads anywhere else.

    Links are resolved before the path is checked. Snapshots in the hub's cache are made of links into the `blobs` of
    the same repository, so those count as inside.

    Args:
        directory: The directory that the path must not leave.
        name: The path in a manifest, an index or a journal; may have any type.
        what: The place of the name for messages, such as `"model.safetensors.index.json: weight_map"`.

    Returns:
        `directory / name`. It need not exist.

    Raises:
        CheckpointError: If the name is not text, is empty or absolute, contains `..` or NUL, or is a link to the
            outside.

    Example:
        >>> confine(Path("library"), "experts/math.safetensors", "library.json: file")
        PosixPath('library/experts/math.safetensors')
    """
    if not isinstance(name, str):
        raise CheckpointError(f"{what}: expected the name of a file, got {_show(name)}")
    if _leaves(name):
        raise CheckpointError(f"{what}: {_show(name)} is not the name of a file inside {directory}")
    path = directory / name
    try:
        if any(len(os.fsencode(part)) > _LONGEST for part in path.parts):
            raise ValueError("it is too long")
        inside = _contains(directory.resolve(), path.resolve())
    except (OSError, RuntimeError, ValueError) as error:  # a cycle of links, or an invalid name
        raise CheckpointError(f"{what}: {_show(name)} is not the name of a file ({error})") from None
    if not inside:
        raise CheckpointError(
            f"{what}: {_show(name)} is a link that leads out of {directory}; put the file itself in its place"
        )
    return path


def _leaves(name: str) -> bool:
    """Return whether the text of a name alone shows that it is not a file inside, on this or any other system."""
    if "\0" in name or PurePosixPath(name).is_absolute() or PureWindowsPath(name).anchor:
        return True
    parts = {*PurePosixPath(name).parts, *PureWindowsPath(name).parts}
    return ".." in parts or not parts


def _contains(directory: Path, path: Path) -> bool:
    if path.is_relative_to(directory):
        return True
    snapshots = next((parent for parent in (directory, *directory.parents) if parent.parent.name == "snapshots"), None)
    return snapshots is not None and path.is_relative_to(snapshots.parent.parent / "blobs")


def _show(name: object) -> str:
    return shorten(repr(name), 100, "start")
