"""Publish a directory under its name only when it is complete, for output that is written in one go."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from merganser.engine.directories import check_replaceable, check_writable
from merganser.engine.disk import Disk
from merganser.engine.staging import Staging
from merganser.errors import InputError, MerganserError


def check_out(out: Path, overwrite: bool, inputs: Iterable[Path] = ()) -> None:
    """Raise every reason not to create the directory OUT before any work. Missing parents are created later."""
    check_replaceable(out, inputs)
    Staging(out, Disk()).check(resume=False, overwrite=overwrite)
    check_writable(out, out.absolute().parent)


def publish(out: Path, write: Callable[[Path], object], *, overwrite: bool = False, disk: Disk | None = None) -> Path:
    """Let `write` fill a new directory, which gets the name `out` once it is complete and on disk.

    A failure leaves `out` as it was, and nothing else behind. The next run removes what a killed process left.

    Args:
        out: The directory to create; an empty one may exist.
        write: Called with the directory to fill.
        overwrite: Whether to replace an existing `out`.
        disk: The interface to the disk.

    Returns:
        `out`.

    Raises:
        InputError: If `out` exists, or another process writes there.
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
                raise InputError(
                    f"{out} was created by another process meanwhile and is not replaced; choose another name"
                )
        except BaseException:
            staging.discard()
            raise
        staging.finish()
    except OSError as error:
        raise MerganserError(f"{out} could not be written: {error}") from error
    return out
