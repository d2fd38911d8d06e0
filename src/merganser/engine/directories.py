"""Where results may be written: never over what is in use, never over anything without being told to."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from merganser.checkpoints.references import exists, parts
from merganser.errors import InputError


def paths_in(reference: object) -> Iterator[Path]:
    """The files and directories a reference such as `base+adapter` names, as far as they are here."""
    if isinstance(reference, (str, os.PathLike)):
        yield from (Path(os.path.expanduser(part)) for part in parts(os.fspath(reference)) if exists(part))


def check_replaceable(out: Path, inputs: Iterable[Path]) -> None:
    """What stands at OUT, or unfinished beside it, is removed in the end and must not take with it what is in use.

    Refused are an OUT that is or holds the current directory or an input, and one inside an input's directory, which is
    part of that input as far as anybody knows.
    """
    if out.name in ("", ".."):
        raise InputError(f"{out}: not a name for the directory to be made")
    if (home := os.path.expanduser(out)) != str(out):
        raise InputError(f"{out}: '~' stands for no directory here; write {home}")
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
    """That OUT can be written in a directory, or in one that can be made there: the nearest directory there is."""
    place = next(path for path in (directory, *directory.absolute().parents) if os.path.exists(path))
    if not place.is_dir():
        raise InputError(f"{out} cannot be made: {place} is not a directory")
    if not os.access(place, os.W_OK | os.X_OK):
        raise InputError(f"{out} cannot be made: {place} is not writable")
    return place


def is_empty(path: Path) -> bool:
    """Whether this is a directory with nothing in it, which is as good as none."""
    if path.is_symlink() or not path.is_dir():
        return False
    try:
        return next(path.iterdir(), None) is None
    except OSError:
        return False


def check_absent(out: Path, overwrite: bool) -> None:
    """That nothing but an empty directory stands at OUT, or that it may be overwritten."""
    if os.path.lexists(out) and not overwrite and not is_empty(out):
        what = "exists already" if out.exists() else "is a broken link"
        raise InputError(f"{out} {what}; choose another name or overwrite it (overwrite=True)")


def _holds(place: Path, path: Path) -> bool:
    """Whether a path lies at or below a place, as it is spelt or where its links lead."""
    spelt = path.absolute()
    forms = (spelt.parent.resolve() / spelt.name, spelt.resolve())
    return any(_same(place, each) for form in forms for each in (form, *form.parents))


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
