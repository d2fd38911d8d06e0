"""`OUT.partial`: where a directory is made before it takes its name.

It holds the directory to be (`model/`), a journal, and for a moment what stood at OUT before (`replaced/`). The journal
is made first and removed last, so that at every moment it says what the rest is:

    mkdir OUT.partial, journal          nothing is lost if the rest is removed
    model/                              being filled
    "publishing" in the journal         model/ is complete and on disk
    OUT -> replaced/                    only where OUT may be overwritten
    model/ -> OUT                       the result has its name
    remove replaced/, journal, OUT.partial
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from merganser.engine.directories import check_absent
from merganser.engine.disk import Disk
from merganser.engine.journal import Journal, read_records
from merganser.engine.lock import Lock
from merganser.errors import InputError

_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


class Staging:
    """The directory beside `out`, locked from `open` until `finish`, `keep` or `discard`."""

    def __init__(self, out: Path, disk: Disk) -> None:
        self.out = out
        self.path = out.with_name(f"{out.name}.partial")
        self.model = self.path / "model"
        self.replaced = self.path / "replaced"
        self.journal: Journal | None = None
        self._journal_file = self.path / "journal"
        self._disk = disk
        self._lock: Lock | None = None

    def check(self, resume: bool, overwrite: bool) -> bool:
        """Whatever speaks against writing here, said before anything is touched; whether there is work to resume."""
        records = self._records()
        unfinished = bool(records) and not records[0].get("once")
        if unfinished and not (resume or overwrite):
            kept = f", and what stood at {self.out} before in {self.replaced.name}/" if self._must_put_back() else ""
            raise InputError(
                f"{self.path} holds an unfinished merge{kept}; resume=True continues it, overwrite=True starts again"
            )
        if not (unfinished and resume):
            check_absent(self.out, overwrite)
        return unfinished and resume

    def is_idle(self) -> bool:
        """Whether nothing is there to be resumed."""
        return not self._records()

    def tidy(self) -> None:
        """Remove what a process that was killed at its very end has left of an empty staging directory."""
        self._lock = Lock(self.out, self._disk)
        try:
            if self.is_idle():
                self._clear()
        finally:
            self._release()

    def open(self, resume: bool, overwrite: bool) -> Journal:
        """Take the lock, and the journal: the one there is if it can be resumed, else a new one."""
        self._disk.make_directory(self.path.absolute().parent)
        self._lock = Lock(self.out, self._disk)
        try:
            if not self.check(resume, overwrite):
                self._clear()
                check_absent(self.out, overwrite)  # what an interrupted replacement had moved away is back
            self._disk.make_directory(self.path)
            self.journal = Journal(self._journal_file, self._disk)
        except BaseException:
            self.keep()
            raise
        return self.journal

    def publish(self, overwrite: bool, file: str | None = None) -> bool:
        """Give `model/` the name of `out`; what stands there is moved to `replaced/` first if it may be overwritten.

        Without that, an empty directory is all that gives way, and nothing gives way to a file.

        Args:
            overwrite: Whether what stands at `out` may be replaced.
            file: The file in `model/` that takes the name instead.

        Returns:
            Whether the name was free: False if something has appeared there, which is left alone.
        """
        if overwrite and os.path.lexists(self.out):
            if os.path.lexists(self.replaced):
                self._disk.remove(self.replaced)
            self._disk.rename(self.out, self.replaced)
        try:
            if file is None:
                self._disk.rename(self.model, self.out)
            else:
                self._disk.name_file(self.model / file, self.out)
        except OSError as error:
            if error.errno not in _TAKEN or not os.path.lexists(self.out):
                raise
            return False
        return True

    def finish(self) -> None:
        """Remove everything but the result."""
        self._clear()
        self._release()

    def discard(self) -> None:
        """Remove everything, with what stood at `out` back in its place."""
        with suppress(OSError):
            self._clear()
        self._release()

    def keep(self) -> None:
        """Leave everything for whoever resumes."""
        self._close_journal()
        self._release()

    def leave(self) -> None:
        """Close in a forked child what belongs to its parent."""
        self._close_journal()
        if self._lock is not None:
            self._lock.leave()

    def _records(self) -> list[dict[str, Any]]:
        """What the journal says; nothing where there is no staging directory. Refuses what is not ours."""
        if not os.path.lexists(self.path):
            return []
        if self.path.is_symlink() or not self.path.is_dir():
            raise InputError(f"{self.path} is in the way and not ours: it is not a directory")
        names = {entry.name for entry in self.path.iterdir()}
        known = {self._journal_file.name, self.model.name, self.replaced.name}
        if strange := sorted(names - known):
            raise InputError(f"{self.path} is in the way and not ours: it holds {strange[0]!r}")
        if not names:
            return []
        records = read_records(self._journal_file)
        if records is None or (not records and len(names) > 1):
            raise InputError(f"{self.path} is in the way and not ours: it has no journal; move it away")
        return records

    def _must_put_back(self) -> bool:
        return os.path.lexists(self.replaced) and not os.path.lexists(self.out)

    def _clear(self) -> None:
        """Remove what is ours, the journal last, after what stood at `out` is back or its successor is there."""
        self._close_journal()
        if not os.path.lexists(self.path):
            return
        if self._must_put_back():
            self._disk.rename(self.replaced, self.out)
        for path in (self.replaced, self.model, self._journal_file):
            if os.path.lexists(path):
                self._disk.remove(path)
        self._disk.before("remove", self.path)
        self.path.rmdir()

    def _close_journal(self) -> None:
        if self.journal is not None:
            self.journal.close()
            self.journal = None

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None
