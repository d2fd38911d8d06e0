"""The planned writer: files preallocated, tensors written in place by anyone in any order, and a directory that gets
its name only when it is complete and on disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from merganser.engine.blocks import Piece
from merganser.engine.directories import check_absent, check_replaceable, check_writable, paths_in
from merganser.engine.disk import Disk, explain
from merganser.engine.journal import Journal
from merganser.engine.layout import Shard, lay_out, make_index
from merganser.errors import InputError, MerganserError
from merganser.recipes.plan import Output, Plan

#: Path, size and time of writing: a fingerprint looks at samples of the weights only.
FileState = tuple[str, int, int]


class ShardFiles:
    """The open files of a layout and positional writes into them."""

    def __init__(self, directory: Path, shards: list[Shard], disk: Disk, create: bool = True) -> None:
        self._disk = disk
        self._staging = directory.parent
        self._paths = [directory / shard.file for shard in shards]
        self._handles: list[int] = []
        try:
            for path, shard in zip(self._paths, shards, strict=True):
                if create:
                    if path.parent != directory:
                        disk.make_directory(path.parent)
                    self._handles.append(disk.create(path, shard.size))
                    disk.write_at(self._handles[-1], memoryview(shard.header), 0, path)
                else:
                    self._handles.append(os.open(path, os.O_RDWR))
        except OSError:
            self.close()
            raise
        self._places = {
            name: (number, offset) for number, shard in enumerate(shards) for name, offset in shard.offsets.items()
        }

    def write(self, output: Output, piece: Piece, tensor: Tensor) -> None:
        if not piece.numel:
            return
        number, offset = self._places[output.name]
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        at = offset + piece.offset * output.spec.dtype.itemsize
        try:
            self._disk.write_at(self._handles[number], data, at, self._paths[number])
        except OSError as error:
            raise explain(error, self._staging) from error

    def shard_of(self, name: str) -> int:
        return self._places[name][0]

    def sync(self, numbers: Collection[int]) -> None:
        for number in sorted(numbers):
            self._disk.sync(self._handles[number], self._paths[number])

    def close(self) -> None:
        while self._handles:
            os.close(self._handles.pop())


class WorkerSink:
    """Writes into files that another process has laid out and keeps account of."""

    def __init__(self, files: ShardFiles) -> None:
        self.write = files.write

    def done(self) -> Collection[str]:
        return ()

    def finished(self, output: Output) -> None:
        pass


class CheckpointWriter:
    """A sink that survives kill -9, power loss and a full disk.

    Work happens in `OUT.partial/`: the checkpoint to be in `model/`, the journal beside it. An output counts as done
    once its bytes are synced and the journal says so. `publish` renames `model/` to `OUT`.

    `fingerprint` tells merges apart, `files` are what they read: resuming wants the same, of the same size and time.
    """

    def __init__(
        self,
        out: Path,
        plan: Plan,
        fingerprint: str,
        files: Iterable[Path] = (),
        *,
        resume: bool = False,
        overwrite: bool = False,
        disk: Disk | None = None,
        sync_seconds: float = 5.0,
    ) -> None:
        check_replaceable(out, _inputs(plan))
        self.out = out
        self.staging = out.with_name(f"{out.name}.partial")
        self.directory = self.staging / "model"
        self._plan = plan
        self._disk = disk or Disk()
        self._shards = lay_out(plan)
        self._lock = threading.Lock()
        self._committing = threading.Lock()
        self._unsynced: list[str] = []
        self._failure: Exception | None = None
        self._sync_seconds = sync_seconds
        self._closing = threading.Event()
        self._syncer = threading.Thread(target=self._sync_now_and_then, name="merganser-sync", daemon=True)
        self._check_room(resume, overwrite)
        try:
            self._disk.make_directory(self.staging)
            self._journal = Journal(self.staging / "journal", self._disk)
        except OSError as error:
            raise explain(error, self.staging) from error
        try:
            self._begin(fingerprint, _as_they_are(files), overwrite)
        except OSError as error:
            self._journal.close()
            raise explain(error, self.staging) from error
        except InputError:
            self._journal.close()
            raise
        if sync_seconds:
            self._syncer.start()

    def _check_room(self, resume: bool, overwrite: bool) -> None:
        """Whatever speaks against writing here, said before anything is touched."""
        if os.path.lexists(self.staging):
            if not self.staging.is_dir():
                raise InputError(f"{self.staging} is in the way and not ours: it is not a directory")
            if strange := {p.name for p in self.staging.iterdir()} - {"journal", "model", "replaced"}:
                raise InputError(f"{self.staging} is in the way and not ours: it holds {sorted(strange)[0]!r}")
            if not resume and not overwrite:
                raise InputError(
                    f"{self.staging} holds an unfinished merge; --resume (resume=True) continues it, --overwrite "
                    "(overwrite=True) starts again"
                )
            if not resume:
                Journal(self.staging / "journal", self._disk).close()  # refuses while another process writes
                self._disk.remove(self.staging)
        else:
            check_absent(self.out, overwrite)
        place = check_writable(self.out, self.out.absolute().parent)
        held = sum(f.stat().st_blocks * 512 for f in self.directory.iterdir()) if self.directory.is_dir() else 0
        free = shutil.disk_usage(place).free
        if free + held < self._plan.bytes_out:
            raise InputError(f"{self.out.parent}: the result needs {self._plan.bytes_out:,} bytes, {free:,} are free")

    def _begin(self, fingerprint: str, files: set[FileState], overwrite: bool) -> None:
        """Take up the journal where it ends, or begin one."""
        records = self._journal.records
        if not records:
            self._journal.append({"plan": fingerprint, "files": sorted(files), "overwrite": overwrite})
        elif records[0].get("plan") != fingerprint:
            raise InputError(
                f"{self.staging} was begun with another recipe, other sources or another version; "
                "overwrite it to start again (--overwrite, overwrite=True)"
            )
        elif changed := sorted(files ^ {(path, size, time) for path, size, time in records[0]["files"]}):
            raise InputError(
                f"{changed[0][0]} is not the file that {self.staging} was begun with: it was written since, or "
                "replaced by a copy; overwrite it to start again (--overwrite, overwrite=True)"
            )
        elif os.path.lexists(self.out) and self.directory.exists() and not (records[0]["overwrite"] or overwrite):
            raise InputError(
                f"{self.out} has appeared since {self.staging} was begun; overwrite it (--overwrite, overwrite=True)"
            )
        self._done = {name for record in records for name in record.get("done", ())}
        self.published = not self.directory.exists() and records[-1].get("publishing", False)
        if self.published:
            return
        self._disk.make_directory(self.directory)
        for shard in self._shards:
            path = self.directory / shard.file
            if not self._done.isdisjoint(shard.offsets) and (not path.exists() or path.stat().st_size != shard.size):
                raise InputError(f"{path} was changed since it was written; start again (--overwrite, overwrite=True)")
        self._files = ShardFiles(self.directory, self._shards, self._disk)

    def done(self) -> Collection[str]:
        return frozenset(self._done)

    def write(self, output: Output, piece: Piece, tensor: Tensor) -> None:
        self._raise_failure()
        self._files.write(output, piece, tensor)

    def for_worker(self) -> WorkerSink:
        self._journal.close()  # its lock belongs to the parent alone
        return WorkerSink(self._files)

    def finished(self, output: Output) -> None:
        self._raise_failure()
        with self._lock:
            self._unsynced.append(output.name)
        if not self._sync_seconds:
            self.commit()

    def commit(self) -> None:
        """Sync what is finished, then journal it."""
        with self._committing:
            with self._lock:
                names, self._unsynced = self._unsynced, []
            if not names:
                return
            try:
                self._files.sync({self._files.shard_of(name) for name in names})
                self._journal.append({"done": names})
            except OSError as error:
                raise explain(error, self.staging) from error

    def publish(self, add_sidecars: Callable[[Path], None]) -> Path:
        """Sidecars and index beside the weights, everything synced, then the name."""
        try:
            if not self.published:
                self._raise_failure()
                self._stop_syncing()
                self.commit()
                self._files.close()
                add_sidecars(self.directory)
                if (index := make_index(self._shards, self._plan)) is not None:
                    self._disk.write_file(self.directory / index[0], index[1])
                self._disk.sync_tree(self.directory)
                self._journal.append({"publishing": True})
                if os.path.lexists(self.out):
                    self._disk.rename(self.out, self.staging / "replaced")
                self._disk.rename(self.directory, self.out)
            self._journal.close()
            self._disk.remove(self.staging)
        except OSError as error:
            raise explain(error, self.staging) from error
        return self.out

    def abandon(self) -> None:
        """Keep what is finished for `--resume`, as far as possible; called when the work has failed already."""
        self._stop_syncing()
        if not self.published:
            with contextlib.suppress(MerganserError):
                self.commit()
            self._files.close()
        self._journal.close()

    def _sync_now_and_then(self) -> None:
        while not self._closing.wait(self._sync_seconds):
            try:
                self.commit()
            except Exception as error:
                self._failure = error
                return

    def _stop_syncing(self) -> None:
        self._closing.set()
        if self._syncer.is_alive():
            self._syncer.join()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _as_they_are(files: Iterable[Path]) -> set[FileState]:
    found = ((file, file.stat()) for file in files)
    return {(str(file), state.st_size, state.st_mtime_ns) for file, state in found}


def _inputs(plan: Plan) -> Iterator[Path]:
    """The files and directories a plan reads, as far as its references are paths."""
    for model in plan.models:
        if model.plan is not None:
            yield from _inputs(model.plan)
            continue
        yield from paths_in(model.path)
