"""A directory that gets its name only when it is complete: for what is written in one go."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from merganser.engine.directories import check_replaceable, check_writable
from merganser.engine.disk import Disk
from merganser.engine.staging import Staging
from merganser.errors import InputError, MerganserError


def check_out(out: Path, overwrite: bool, inputs: Iterable[Path] = ()) -> None:
    """Whatever speaks against making the directory OUT, said before any work. Missing parents are made later."""
    check_replaceable(out, inputs)
    Staging(out, Disk()).check(resume=False, overwrite=overwrite)
    check_writable(out, out.absolute().parent)


def publish(out: Path, write: Callable[[Path], object], *, overwrite: bool = False, disk: Disk | None = None) -> Path:
    """Have `write` fill a new directory, which takes the name `out` once it is complete and on disk.

    A failure leaves what stood at `out` as it was, and nothing else behind. What a process that was killed left is
    removed by the next one.

    Args:
        out: The directory to be made; an empty one may be there already.
        write: Called with the directory to be filled.
        overwrite: Whether to replace what stands at `out`.
        disk: What touches the disk.

    Returns:
        `out`.

    Raises:
        InputError: If something stands at `out`, or another process writes there.
        MerganserError: If writing fails.

    Example:
        >>> publish(Path("notes"), lambda directory: (directory / "a.txt").write_text("a"))  # doctest: +SKIP
    """
    disk = disk or Disk()
    staging = Staging(out, disk)
    try:
        journal = staging.open(resume=False, overwrite=overwrite)
        try:
            journal.append({"once": True})
            disk.make_directory(staging.model)
            write(staging.model)
            disk.sync_tree(staging.model)
            if not staging.publish(overwrite):
                raise InputError(f"{out} has appeared meanwhile and is left alone; choose another name")
        except BaseException:
            staging.discard()
            raise
        staging.finish()
    except OSError as error:
        raise MerganserError(f"{out} could not be written: {error}") from error
    return out
