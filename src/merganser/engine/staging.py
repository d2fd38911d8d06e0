"""`OUT.partial`: the directory in which an output is built before it gets its name.

It contains the new directory (`model/`), a journal, and briefly the previous OUT (`replaced/`). The journal is created
first and removed last, so that it describes the state at every moment:

    mkdir OUT.partial, journal          removing the rest loses nothing
    model/                              being filled
    "publishing" in the journal         model/ is complete and on disk
    OUT -> replaced/                    only where OUT may be overwritten
    model/ -> OUT                       the result is published
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
from merganser.engine.lock import Lock, lock_file
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
        """Raise every reason not to write here before anything is changed; return whether there is work to resume."""
        records = self._records()
        unfinished = bool(records) and not records[0].get("once")
        if unfinished and not (resume or overwrite):
            self._refuse_running()
            kept = f", and the previous {self.out} in {self.replaced.name}/" if self._must_put_back() else ""
            raise InputError(
                f"{self.path} contains an unfinished merge{kept}; resume=True continues it, overwrite=True starts again"
            )
        if not (unfinished and resume):
            check_absent(self.out, overwrite)
        return unfinished and resume

    def _refuse_running(self) -> None:
        """Refuse an output that another process writes now: it is neither to be resumed nor to be started again."""
        if self._lock is None and lock_file(self.out).exists():
            with suppress(OSError):
                Lock(self.out, self._disk).release()

    def is_idle(self) -> bool:
        """Return whether there is nothing to resume."""
        return not self._records()

    def tidy(self) -> None:
        """Remove an empty staging directory left by a process that was killed at its very end."""
        self._lock = Lock(self.out, self._disk)
        try:
            if self.is_idle():
                self._clear()
        finally:
            self._release()

    def open(self, resume: bool, overwrite: bool) -> Journal:
        """Take the lock and open the journal: the existing one if it can be resumed, else a new one."""
        self._disk.make_directory(self.path.absolute().parent)
        self._lock = Lock(self.out, self._disk)
        try:
            if not self.check(resume, overwrite):
                self._clear()
                check_absent(self.out, overwrite)  # an interrupted replacement has been undone
            self._disk.make_directory(self.path)
            self.journal = Journal(self._journal_file, self._disk)
        except BaseException:
            self.keep()
            raise
        return self.journal

    def publish(self, overwrite: bool, file: str | None = None) -> bool:
        """Rename `model/` to `out`; an existing `out` is moved to `replaced/` first if it may be overwritten.

        Otherwise a directory only replaces an empty directory, and a file replaces nothing.

        Args:
            overwrite: Whether an existing `out` may be replaced.
            file: The file in `model/` that gets the name instead.

        Returns:
            Whether the name was free; False if something was created there meanwhile, which is not changed.
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
        """Remove everything and restore the previous `out`."""
        with suppress(OSError):
            self._clear()
        self._release()

    def keep(self) -> None:
        """Leave everything for a later resume."""
        self._close_journal()
        self._release()

    def leave(self) -> None:
        """Close what belongs to the parent in a forked child."""
        self._close_journal()
        if self._lock is not None:
            self._lock.leave()

    def _records(self) -> list[dict[str, Any]]:
        """Return the records of the journal, none if there is no staging directory. Refuses foreign files."""
        if not os.path.lexists(self.path):
            return []
        if self.path.is_symlink() or not self.path.is_dir():
            raise InputError(f"{self.path} was not written by merganser: it is not a directory")
        names = {entry.name for entry in self.path.iterdir()}
        known = {self._journal_file.name, self.model.name, self.replaced.name}
        if strange := sorted(names - known):
            raise InputError(f"{self.path} was not written by merganser: it contains {strange[0]!r}")
        if not names:
            return []
        records = read_records(self._journal_file)
        if records is None or (not records and len(names) > 1):
            raise InputError(f"{self.path} was not written by merganser: it has no journal; move it away")
        return records

    def _must_put_back(self) -> bool:
        return os.path.lexists(self.replaced) and not os.path.lexists(self.out)

    def _clear(self) -> None:
        """Remove our files, the journal last, after the previous `out` is restored or its successor published."""
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
