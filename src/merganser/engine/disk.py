"""All operations that modify the disk, in one place, so that tests can make any of them fail."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from merganser.errors import MerganserError

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Disk:
    """Plain POSIX calls. `before` is called before each of them; tests override it to fail."""

    def before(self, operation: str, path: Path) -> None:
        pass

    def make_directory(self, path: Path) -> None:
        self.before("mkdir", path)
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path, size: int) -> int:
        """Create a file of this size with its space reserved, open for writing."""
        self.before("create", path)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if size and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, size)
            os.ftruncate(handle, size)
        except OSError:
            os.close(handle)
            raise
        return handle

    def write_at(self, handle: int, data: memoryview, offset: int, path: Path) -> None:
        """Write all of the data, even if each call writes only a part."""
        self.before("write", path)
        while data:
            written = self._pwrite(handle, data, offset)
            data, offset = data[written:], offset + written

    def append(self, handle: int, line: bytes, path: Path) -> None:
        self.before("append", path)
        left = memoryview(line)
        while left:
            left = left[self._write(handle, left) :]
        self.before("sync", path)
        self._sync(handle)

    def sync(self, handle: int, path: Path) -> None:
        """Sync the content of a file; its size was synced from the beginning."""
        self.before("sync", path)
        self._sync(handle, getattr(os, "fdatasync", os.fsync))

    def write_file(self, path: Path, content: bytes) -> None:
        """Write a file in place of an existing one, without syncing it."""
        self.before("write", path)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            left = memoryview(content)
            while left:
                left = left[self._write(handle, left) :]
        finally:
            os.close(handle)

    def sync_tree(self, directory: Path) -> None:
        """Sync everything in a directory and the directory itself."""
        for path in (*sorted(directory.rglob("*")), directory):
            if path.is_file() or path.is_dir():
                self.before("sync", path)
                self.sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or directory. A directory only replaces an empty one."""
        self.before("rename", target)
        os.rename(source, target)
        self.sync_directory(target.parent)

    def name_file(self, source: Path, target: Path) -> None:
        """Rename a file, by a hard link where possible; never replaces anything."""
        self.before("rename", target)
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP) or os.path.lexists(target):
                raise
            os.rename(source, target)  # the file system has no hard links
        self.sync_directory(target.parent)

    def sync_directory(self, directory: Path) -> None:
        handle = os.open(directory, os.O_RDONLY)
        try:
            self._sync(handle)
        finally:
            os.close(handle)

    def remove(self, path: Path) -> None:
        """Remove a file, a link, or a directory with its content."""
        self.before("remove", path)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()

    def _sync(self, handle: int, how: Callable[[int], None] = os.fsync) -> None:
        how(handle)

    def _pwrite(self, handle: int, data: memoryview, offset: int) -> int:
        return os.pwrite(handle, data, offset)

    def _write(self, handle: int, data: memoryview) -> int:
        return os.write(handle, data)


def explain(error: OSError, staging: Path) -> MerganserError:
    """Return the error for a failed write; everything finished so far is kept."""
    if error.errno in _FULL:
        return MerganserError(
            f"no space left on the disk of {staging}: finished tensors are kept there; "
            "free some space and continue with resume=True"
        )
    if error.errno == errno.EFBIG:
        return MerganserError(
            f"a file in {staging} is larger than the file system or a limit (ulimit -f) allows: raise the limit and "
            "continue with resume=True, or start again with a smaller shard_size and overwrite=True"
        )
    if error.errno == errno.EMFILE:
        return MerganserError(
            f"writing {staging} failed: too many open files; raise the limit (ulimit -n) and continue with resume=True"
        )
    return MerganserError(f"writing {staging} failed: {error}; continue with resume=True")
