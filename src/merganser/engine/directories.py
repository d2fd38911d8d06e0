"""Where results may be written, and a directory that gets its name only when it is complete."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from merganser.checkpoints.references import exists, parts
from merganser.engine.disk import Disk
from merganser.errors import InputError, MerganserError


def paths_in(reference: object) -> Iterator[Path]:
    """The files and directories a reference such as `base+adapter` names, as far as they are here."""
    if isinstance(reference, (str, os.PathLike)):
        yield from (Path(part).expanduser() for part in parts(os.fspath(reference)) if exists(part))


def check_replaceable(out: Path, inputs: Iterable[Path]) -> None:
    """What stands at OUT is removed in the end, and must not take with it what is in use.

    An input may itself be what is replaced: a running average takes the place of the last one.
    """
    if out.name in ("", ".."):
        raise InputError(f"{out}: not a name for the directory to be made")
    place = out.resolve()
    others = [("input", path) for path in inputs if path.resolve() != place]
    for kind, used in (("current directory", Path.cwd()), *others):
        if used.resolve().is_relative_to(place):
            raise InputError(f"{out} cannot be replaced: the {kind} {used} is in it; choose another name")


def check_writable(out: Path, directory: Path) -> Path:
    """That OUT can be written in a directory, or in one that can be made there: the nearest directory there is."""
    place = next(path for path in (directory, *directory.absolute().parents) if os.path.exists(path))
    if not place.is_dir():
        raise InputError(f"{out} cannot be made: {place} is not a directory")
    if not os.access(place, os.W_OK | os.X_OK):
        raise InputError(f"{out} cannot be made: {place} is not writable")
    return place


def check_absent(out: Path, overwrite: bool) -> None:
    """That nothing stands at OUT, or may be overwritten."""
    if os.path.lexists(out) and not overwrite:
        what = "exists already" if out.exists() else "is a broken link"
        raise InputError(f"{out} {what}; choose another name or overwrite it (--overwrite, overwrite=True)")


def check_out(out: Path, overwrite: bool, inputs: Iterable[Path] = ()) -> None:
    """Whatever speaks against making the directory OUT, said before any work. Missing parents are made later."""
    check_replaceable(out, inputs)
    check_absent(out, overwrite)
    check_writable(out, out.absolute().parent)


def publish(out: Path, write: Callable[[Path], object]) -> Path:
    """`write` fills a new directory beside OUT, which takes the name once it is complete and on disk.

    A failure leaves what stood at OUT as it was, and nothing else behind.
    """
    disk = Disk()
    staging: Path | None = None
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f"{out.name}.", suffix=".partial", dir=out.absolute().parent))
        made = staging / out.name
        made.mkdir()
        write(made)
        disk.sync_tree(made)
        if os.path.lexists(out):
            disk.rename(out, staging / ".replaced")
        disk.rename(made, out)
    except OSError as error:
        raise MerganserError(f"{out} could not be written: {error}") from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
    return out
