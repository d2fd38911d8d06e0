"""Checks of output paths: never overwrite data in use, nor anything without permission."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from merganser.checkpoints.references import exists, parts
from merganser.errors import InputError

#: Bytes by which names of files beside an output may be longer: unfinished output, locks, the lock of a single file.
_ADDED = 32


def paths_in(reference: object) -> Iterator[Path]:
    """Yield the existing files and directories that a reference such as `base+adapter` names."""
    if isinstance(reference, (str, os.PathLike)):
        yield from (Path(os.path.expanduser(part)) for part in parts(os.fspath(reference)) if exists(part))


def check_replaceable(out: Path, inputs: Iterable[Path]) -> None:
    """Refuse an OUT whose replacement would remove data in use; also checks the unfinished output beside it.

    Refused are an OUT that is or contains the current directory or an input, and one inside an input's directory, which
    counts as part of that input.
    """
    if out.name in ("", ".."):
        raise InputError(f"{out}: not a name for a new directory")
    if (home := os.path.expanduser(out)) != str(out):
        raise InputError(f"{out}: '~' is not expanded here; write {home}")
    used = [("current directory", Path.cwd()), *(("input", path) for path in dict.fromkeys(inputs))]
    for place in (out, out.with_name(f"{out.name}.partial")):
        if not os.path.lexists(place):
            continue
        for kind, path in used:
            if _holds(place, path):
                what = f"it is the {kind} {path}" if _same(place, path) else f"the {kind} {path} is in it"
                raise InputError(f"{place} cannot be replaced: {what}; choose another name for the output")
            if kind == "input" and path.is_dir() and not is_empty(place) and _holds(path, place):
                raise InputError(
                    f"{place} cannot be replaced: it is in the input {path}; choose another name for the output"
                )


def check_writable(out: Path, directory: Path) -> Path:
    """Check that OUT can be written in a directory, which may have to be created; return the nearest existing one."""
    place = next(path for path in (directory, *directory.absolute().parents) if os.path.exists(path))
    if not place.is_dir():
        raise InputError(f"{out} cannot be created: {place} is not a directory")
    if not os.access(place, os.W_OK | os.X_OK):
        raise InputError(f"{out} cannot be created: {place} is not writable")
    length = os.pathconf(place, "PC_NAME_MAX") - _ADDED
    if len(os.fsencode(out.name)) > length:
        raise InputError(
            f"{out.name[:40]}… cannot be created: the name is too long ({len(os.fsencode(out.name))} bytes; at most "
            f"{length} fit here)"
        )
    return place


def is_empty(path: Path) -> bool:
    """Return whether this is an empty directory, which counts as absent."""
    if path.is_symlink() or not path.is_dir():
        return False
    try:
        return next(path.iterdir(), None) is None
    except OSError:
        return False


def check_absent(out: Path, overwrite: bool) -> None:
    """Check that OUT is absent or an empty directory, or that it may be overwritten."""
    if os.path.lexists(out) and not overwrite and not is_empty(out):
        what = "exists already" if out.exists() else "is a broken link"
        raise InputError(f"{out} {what}; choose another name or overwrite it (overwrite=True)")


def check_file(file: Path, option: str = "") -> None:
    """Check that a file can be written there, before any work. `option` is the command-line option with the path."""
    said = f"{option} {file}".lstrip()
    if file.is_dir():
        raise InputError(f"{said}: a directory; name the file to be written in it")
    if not file.resolve().parent.is_dir():
        raise InputError(f"{said}: no directory {file.resolve().parent}")


def _holds(place: Path, path: Path) -> bool:
    """Return whether a path is at or below a place, either as written or after resolving links."""
    spelt = path.absolute()
    forms = (spelt.parent.resolve() / spelt.name, spelt.resolve())
    return any(_same(place, each) for form in forms for each in (form, *form.parents))


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
