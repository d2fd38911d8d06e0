"""The checkpoint writer: preallocated files, written in place in any order and published when complete."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from merganser.checkpoints.stored_entries import StoredEntries
from merganser.engine.blocks import Piece
from merganser.engine.changes import FILE, Change, Changes
from merganser.engine.directories import check_writable
from merganser.engine.disk import Disk, explain
from merganser.engine.layout import lay_out, make_index
from merganser.engine.origin import LOCK_FILE, Origin, are_digests, lock_path
from merganser.engine.plan import Output, Plan
from merganser.engine.shard_files import ShardFiles, WorkerSink
from merganser.engine.sinks import Digests, Finished
from merganser.engine.source_files import SourceFiles
from merganser.engine.staging import Staging
from merganser.errors import InputError, MerganserError


@dataclass(frozen=True)
class Destination:
    """Where a merge is written, and what may be there already.

    Attributes:
        out: The directory to create; or a file, `OUT.safetensors`, of the weights alone.
        resume: Continue a merge that was interrupted.
        overwrite: Replace `out`, or an unfinished merge.
        on_complete: Called, with nothing else done, if `resume` finds that `out` is complete.
        disk: The interface to the disk.
        sync_seconds: How often to sync finished outputs; 0 means after every output.
    """

    out: Path
    resume: bool = False
    overwrite: bool = False
    on_complete: Callable[[Path], None] = lambda out: None
    disk: Disk = field(default_factory=Disk)
    sync_seconds: float = 5.0


class CheckpointWriter:
    """A sink that survives kill -9, power loss and a full disk.

    Work happens in `OUT.partial/` (`engine.staging`). An output counts as done once its bytes are synced and the
    journal records them with their checksum. Resuming reads them again and recomputes whatever differs.

    `fingerprint` identifies the merge. `sources` are the files it reads, which must not change until the end; resuming
    requires the same ones.
    """

    def __init__(
        self,
        destination: Destination,
        plan: Plan,
        fingerprint: str,
        sources: SourceFiles | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.out = destination.out
        self._origin = origin
        self.published = False
        self._plan = plan
        self._sources = sources or SourceFiles()
        self._overwrite = destination.overwrite
        self._disk = destination.disk
        self._staging = Staging(self.out, self._disk)
        self._shards = lay_out(plan)
        #: The one file that gets the name of `out`, if `out` is not a directory.
        self._file = self._shards[0].file if plan.sidecars.single else None
        self._files: ShardFiles | None = None
        self._done: set[str] = set()
        self._lock = threading.Lock()
        self._committing = threading.Lock()
        self._unsynced: dict[str, Finished] = {}
        self._changes: dict[str, Change] = {}
        self._written: dict[str, str] = {}
        self._read: dict[str, dict[str, str]] = {}
        self._failure: Exception | None = None
        self._sync_seconds = destination.sync_seconds
        self._closing = threading.Event()
        self._syncer = threading.Thread(target=self._sync_now_and_then, name="merganser-sync", daemon=True)
        self._staging.check(destination.resume, destination.overwrite)
        self._check_room()
        try:
            self._journal = self._staging.open(destination.resume, destination.overwrite)
            try:
                self._begin(fingerprint)
            except BaseException:
                self._close_files()
                self._staging.keep()
                raise
        except OSError as error:
            raise explain(error, self._staging.path) from error
        if self._sync_seconds:
            self._syncer.start()

    @property
    def directory(self) -> Path:
        """The directory of the files until the result is published."""
        return self._staging.model

    def _check_room(self) -> None:
        place = check_writable(self.out, self.out.absolute().parent)
        held = sum(f.stat().st_blocks * 512 for f in self.directory.rglob("*")) if self.directory.is_dir() else 0
        free = shutil.disk_usage(place).free
        if free + held < self._plan.bytes_out:
            raise InputError(
                f"{self.out.parent}: the result needs {self._plan.bytes_out:,} bytes, but only {free:,} are free"
            )

    def _begin(self, fingerprint: str) -> None:
        """Continue the journal where it ends, or start one."""
        records = self._journal.records
        if not records:
            states = sorted(self._sources.states)
            self._journal.append({"plan": fingerprint, "files": states, "overwrite": self._overwrite})
        else:
            self._check_same(records[0], fingerprint)
            self._overwrite = self._overwrite or bool(records[0].get("overwrite"))
            self.published = bool(records[-1].get("publishing")) and self._is_named()
            if self.published:
                return
        self._disk.make_directory(self.directory)
        kept = {shard.file.partition("/")[0] for shard in self._shards}
        for stray in [path for path in self.directory.iterdir() if path.name not in kept]:
            self._disk.remove(stray)  # sidecars are written again
        digest = self._origin.digest if self._origin else None
        self._files = ShardFiles(self.directory, self._shards, self._disk, digest=digest)
        self._done = self._find_done(records, self._files)

    def _is_named(self) -> bool:
        """Return whether the result already has the name of `out`."""
        if self._file is None or not self.directory.exists():
            return os.path.lexists(self.out) and not self.directory.exists()
        made = self.directory / self._file
        return self.out.exists() and (not made.exists() or os.path.samefile(made, self.out))

    def _check_same(self, begun: dict[str, Any], fingerprint: str) -> None:
        if begun.get("plan") != fingerprint:
            raise InputError(
                f"{self._staging.path} was started with another recipe, other sources or another version; "
                "overwrite it to start again (overwrite=True)"
            )
        if changed := self._sources.changed_since(begun.get("files", ())):
            raise InputError(
                f"{changed} is not the file that {self._staging.path} was started with: it was written since, or "
                "replaced by a copy; overwrite it to start again (overwrite=True)"
            )

    def _find_done(self, records: Iterable[dict[str, Any]], files: ShardFiles) -> set[str]:
        """Return the outputs that the journal lists as done and whose bytes are unchanged."""
        known: dict[str, str] = {}
        changes: dict[str, Any] = {}
        for record in records:
            read = record.get("read", {})
            if isinstance(record.get("done"), dict) and _are_all_digests(read):
                known |= record["done"]
                changes |= record["changes"] if isinstance(record.get("changes"), dict) else {}
                _unite(self._read, read)
        done = {o.name for o in self._plan.outputs if o.name in known and files.holds(o, known[o.name])}
        self._written = {name: known[name] for name in done}
        for name in done & changes.keys():
            with contextlib.suppress(ValueError):  # a damaged change is left out
                self._changes[name] = Change.from_list(changes[name])
        return done

    def done(self) -> Collection[str]:
        return frozenset(self._done)

    def write(self, output: Output, piece: Piece, entries: StoredEntries) -> None:
        self._raise_failure()
        self._open_files.write(output, piece, entries)

    def for_worker(self) -> WorkerSink:
        self._staging.leave()  # lock and journal belong to the parent
        return WorkerSink(self._open_files)

    def finished(self, output: Output, change: Change | None, sources: Digests) -> None:
        self.finished_elsewhere(output, self._open_files.close_output(output, change, sources))

    def finished_elsewhere(self, output: Output, finished: Finished) -> None:
        self._raise_failure()
        with self._lock:
            self._unsynced[output.name] = finished
        if not self._sync_seconds:
            self.commit()

    def commit(self) -> None:
        """Sync what is finished, then record it in the journal."""
        with self._committing:
            with self._lock:
                finished, self._unsynced = self._unsynced, {}
            if not finished:
                return
            try:
                self._open_files.sync({self._open_files.shard_of(name) for name in finished})
                changes = {name: each.change for name, each in finished.items() if each.change is not None}
                record: dict[str, Any] = {"done": {name: each.checksum for name, each in finished.items()}}
                if changes:
                    record["changes"] = {name: change.to_list() for name, change in changes.items()}
                if self._origin is not None:
                    record["read"] = {}
                    for each in finished.values():
                        _unite(record["read"], each.sources)
                self._journal.append(record)
            except OSError as error:
                raise explain(error, self._staging.path) from error
            self._done |= finished.keys()
            self._changes |= changes
            self._written |= record["done"]
            _unite(self._read, record.get("read", {}))

    def publish(self, add_sidecars: Callable[[Path], None]) -> Path:
        """Add sidecars and index beside the weights, sync everything, then publish the result under its name."""
        try:
            if not self.published:
                self._raise_failure()
                self._stop_syncing()
                self.commit()
                self._check_complete()
                self._close_files()
                if self._file is None:
                    self._add_beside(add_sidecars)
                self._add_lock()
                self._disk.sync_tree(self.directory)
                self._sources.check()
                self._journal.append({"publishing": True})
                if not self._staging.publish(self._overwrite, self._file):
                    raise MerganserError(
                        f"{self.out} was created since the merge began and is not replaced; the result is in "
                        f"{self._staging.path}: move {self.out} away and continue with resume=True, or replace it with "
                        "resume=True and overwrite=True"
                    )
                self.published = True
            if self._file is not None and (lock := self.directory / LOCK_FILE).exists():
                self._disk.rename(lock, lock_path(self.out))
            self._staging.finish()
        except OSError as error:
            raise explain(error, self._staging.path) from error
        return self.out

    def _add_beside(self, add_sidecars: Callable[[Path], None]) -> None:
        add_sidecars(self.directory)
        if (index := make_index(self._shards, self._plan)) is not None:
            self._disk.write_file(self.directory / index[0], index[1])
        if any(change.looked_at for change in self._changes.values()):
            self._disk.write_file(self.directory / FILE, self._noted().to_bytes())

    def _add_lock(self) -> None:
        if self._origin is not None:
            self._sources.check()
            shown = {self._file: self.out.name} if self._file else {}
            lock = self._origin.render(self.directory, self._shards, self._written, self._read, shown)
            self._disk.write_file(self.directory / LOCK_FILE, lock)

    def _noted(self) -> Changes:
        labels = tuple(model.label for model in self._plan.models)
        names = [output.name for output in self._plan.outputs if output.name in self._changes]
        return Changes(labels, {name: self._changes[name] for name in names})

    def abandon(self) -> None:
        """Keep finished outputs for resuming, as far as possible; called after a failure."""
        self._stop_syncing()
        if not self.published and self._files is not None:
            with contextlib.suppress(MerganserError):
                self.commit()
        self._close_files()
        self._staging.keep()

    def discard(self) -> None:
        """Remove what was written; called if an input must change, so that none of it can be used."""
        self._stop_syncing()
        self._close_files()
        self._staging.keep() if self.published else self._staging.discard()

    def _check_complete(self) -> None:
        if missing := [output.name for output in self._plan.outputs if output.name not in self._done]:
            raise MerganserError(f"{missing[0]!r} was never written; this is a bug in merganser; please report it")

    @property
    def _open_files(self) -> ShardFiles:
        if self._files is None:
            raise MerganserError(f"{self.out}: nothing is being written")
        return self._files

    def _close_files(self) -> None:
        if self._files is not None:
            self._files.close()
            self._files = None

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


def _are_all_digests(value: object) -> bool:
    return isinstance(value, dict) and all(map(are_digests, value.values()))


def _unite(into: dict[str, dict[str, str]], digests: Digests) -> None:
    for file, tensors in digests.items():
        into.setdefault(file, {}).update(tensors)
