"""Execute a plan on a Ray cluster: tasks are whole outputs, written to a shared file system."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from merganser.engine.changes import Change
from merganser.engine.compute import Arithmetic, Computations
from merganser.engine.disk import Disk
from merganser.engine.execute import Counter, Progress, batches, find_pending, run_batch
from merganser.engine.layout import lay_out
from merganser.engine.merge import Merge
from merganser.engine.nested import reopen
from merganser.engine.plan import Output
from merganser.engine.ray_cluster import start_ray
from merganser.engine.shard_files import ShardFiles, WorkerSink
from merganser.engine.sinks import Digests, Finished
from merganser.engine.writer import CheckpointWriter
from merganser.errors import MerganserError, require


def execute_on_ray(
    merge: Merge,
    writer: CheckpointWriter,
    address: str,
    *,
    workers: int | None = None,
    settings: Arithmetic | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> None:
    """Compute the outputs that `writer` does not have. A task whose worker dies is run again elsewhere: writing the
    same bytes to the same place twice is harmless, and only the driver writes the journal.
    """
    ray: Any = require("ray", "ray")
    settings = settings or Arithmetic()
    started = not ray.is_initialized()
    if started:
        start_ray(address, workers, log_to_driver=False)
    try:
        computations = Computations(merge, settings)
        todo = find_pending(computations, writer)
        counter = Counter(todo, merge.plan, on_progress)
        outputs = {output.name: output for output in merge.plan.outputs}
        shared = ray.put(pickle.dumps(merge.plan))
        task = ray.remote(max_retries=-1)(_compute)
        directory = str(writer.directory.absolute())
        running = [
            task.remote(shared, [c.output.name for c in batch], directory, settings, computations.prepared)
            for batch in batches(todo)
        ]
        while running:
            (ready,), running = ray.wait(running, num_returns=1)
            try:
                report = ray.get(ready)
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                raise cause if isinstance(cause, MerganserError) else MerganserError(str(cause)) from None
            except ray.exceptions.RayError as error:
                raise MerganserError(f"the Ray cluster failed: {error}; continue with resume=True") from error
            for name, finished in report.items():
                writer.finished_elsewhere(outputs[name], finished)
                counter.add(outputs[name])
    finally:
        if started:
            ray.shutdown()


class _RemoteSink(WorkerSink):
    """A sink that syncs what it wrote before it reports."""

    def __init__(self, files: ShardFiles) -> None:
        super().__init__(files)
        self._touched: set[int] = set()

    def finished(self, output: Output, change: Change | None, sources: Digests) -> None:
        super().finished(output, change, sources)
        self._touched.add(self._files.shard_of(output.name))

    def sync(self) -> None:
        self._files.sync(self._touched)


@functools.lru_cache(maxsize=2)
def _open(plan: bytes) -> Merge:
    return reopen(pickle.loads(plan))


def _compute(
    plan: bytes, names: list[str], directory: str, settings: Arithmetic, prepared: Mapping[str, Any]
) -> dict[str, Finished]:
    """Write the named outputs and return their results."""
    merge = _open(plan)
    computations = Computations(merge, settings, prepared)
    wanted = set(names)
    outputs = [output for output in merge.plan.outputs if output.name in wanted]
    files = ShardFiles(Path(directory), lay_out(merge.plan), Disk(), create=False, digest=settings.digest)
    try:
        sink = _RemoteSink(files)
        run_batch([computations.of(output) for output in outputs], sink)
        sink.sync()
    finally:
        files.close()
    return sink.report()
