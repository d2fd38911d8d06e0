"""A lock on an output directory, held by one process at a time.

The lock is a file beside the directory, so that it is independent of the directory's content. It exists while a process
works and is removed at the end; a killed process leaves an empty file, which the next one takes over. A directory that
stays, such as a library, may have a file of its own for it instead, which also stays.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

from merganser.engine.disk import Disk
from merganser.errors import InputError

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)


def lock_file(out: Path) -> Path:
    """Return the file beside an output that its lock is on."""
    return out.with_name(f".{out.name}.lock")


class Lock:
    """A lock on `out`, acquired on construction; in `file`, which stays, or else in one beside `out`.

    If the file system has no locks, a second file names the process and machine that hold it.
    """

    def __init__(self, out: Path, disk: Disk, file: Path | None = None) -> None:
        self.path = file or lock_file(out)
        self._stays = file is not None
        self._owner = self.path.with_suffix(".owner")
        self._out = out
        self._claimed = False
        disk.before("lock", self.path)
        self._handle: int | None = self._take()

    def release(self) -> None:
        """Release the lock. The file is removed first, so that a process that opened it meanwhile finds it gone."""
        if self._handle is not None:
            if not self._stays:
                self.path.unlink(missing_ok=True)
            if self._claimed:
                self._owner.unlink(missing_ok=True)
            self.leave()

    def leave(self) -> None:
        """Drop the lock in a forked child; its parent keeps it."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _take(self) -> int:
        while True:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if os.fstat(handle).st_size:
                    raise InputError(
                        f"{self.path} exists and was not written by merganser; choose another name for {self._out}"
                    )
                self._lock(handle)
                if _still_there(self.path, handle):
                    return handle
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)

    def _lock(self, handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise self._busy() from None
            self._claim()

    def _claim(self) -> None:
        """Create the owner file, replacing one whose process on this machine has ended."""
        while not self._claimed:
            try:
                made = os.open(self._owner, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                host, _, process = _text(self._owner).rpartition(" ")
                if host != socket.gethostname() or not process.isdecimal() or _lives(int(process)):
                    raise self._busy(f"; if that is wrong, remove {self._owner}") from None
                self._owner.unlink(missing_ok=True)
            else:
                with os.fdopen(made, "w") as file:
                    file.write(f"{socket.gethostname()} {os.getpid()}")
                self._claimed = True

    def _busy(self, hint: str = "") -> InputError:
        return InputError(f"{self._out}: another process is writing there{hint}")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _still_there(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True
