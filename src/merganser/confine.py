"""The one rule for a path that a file names: it stays inside the directory of that file."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath, PureWindowsPath

from merganser.errors import CheckpointError

_LONGEST = 255  # bytes that the name of a file may have on the systems there are


def confine(directory: Path, name: object, what: str) -> Path:
    """Return the path of `name` inside `directory`, or refuse a name that leads anywhere else.

    Links are followed before the path is judged. Snapshots in the hub's cache are made of links into the `blobs` of
    the same repository, so those count as inside.

    Args:
        directory: The directory that the path must not leave.
        name: What a manifest, an index or a journal gives as the path: nothing is assumed of its type.
        what: How the message calls the place of the name, such as `"model.safetensors.index.json: weight_map"`.

    Returns:
        `directory / name`. Nothing needs to exist there.

    Raises:
        CheckpointError: The name is not a text, empty, absolute, has `..` or a NUL in it, or is a link to outside.

    Example:
        >>> confine(Path("library"), "experts/math.safetensors", "library.json: file")
        PosixPath('library/experts/math.safetensors')
    """
    if not isinstance(name, str):
        raise CheckpointError(f"{what}: expected the name of a file, got {_shown(name)}")
    if _leaves(name):
        raise CheckpointError(f"{what}: {_shown(name)} is not the name of a file inside {directory}")
    path = directory / name
    try:
        if any(len(os.fsencode(part)) > _LONGEST for part in path.parts):
            raise ValueError("it is too long")
        inside = _contains(directory.resolve(), path.resolve())
    except (OSError, RuntimeError, ValueError) as error:  # a ring of links, a name that the file system cannot have
        raise CheckpointError(f"{what}: {_shown(name)} is not the name of a file ({error})") from None
    if not inside:
        raise CheckpointError(
            f"{what}: {_shown(name)} is a link that leads out of {directory}; put the file itself in its place"
        )
    return path


def _leaves(name: str) -> bool:
    """Whether the text alone says that a name is no file inside: on this system or on any other."""
    if "\0" in name or PurePosixPath(name).is_absolute() or PureWindowsPath(name).anchor:
        return True
    parts = {*PurePosixPath(name).parts, *PureWindowsPath(name).parts}
    return ".." in parts or not parts


def _contains(directory: Path, path: Path) -> bool:
    if path.is_relative_to(directory):
        return True
    snapshots = next((parent for parent in (directory, *directory.parents) if parent.parent.name == "snapshots"), None)
    return snapshots is not None and path.is_relative_to(snapshots.parent.parent / "blobs")


def _shown(name: object) -> str:
    text = repr(name)
    return text if len(text) <= 100 else f"{text[:100]}…"
