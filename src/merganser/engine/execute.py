"""`execute(merge, sink)`: compute the tensors of a merge."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

from merganser.engine import fused
from merganser.engine.blocks import SPAN, Piece
from merganser.engine.compute import Arithmetic, Computation, Computations
from merganser.engine.merge import Merge
from merganser.engine.plan import Output, Plan
from merganser.engine.sinks import Sink, place_of
from merganser.engine.workers import DEFAULT_MEMORY
from merganser.lazy import once_imported, torch

T = TypeVar("T")
#: Fixed cost of an output, in entries.
_OVERHEAD = 1 << 14
#: So many small tensors take longer without torch than to import it.
_MANY = 4000


@dataclass(frozen=True)
class Progress:
    """Bytes of output finished, bytes in all, and the tensor finished last."""

    done: int
    total: int
    name: str


def execute(
    merge: Merge,
    sink: Sink,
    *,
    workers: int | None = None,
    memory: int = DEFAULT_MEMORY,
    settings: Arithmetic | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> None:
    """Compute every output of a merge that `sink` does not have and pass it on in pieces, with `workers` threads.

    `memory` bounds the tensors in flight; a single tensor that needs more is computed alone. The result does not
    depend on either.
    """
    workers = workers or os.cpu_count() or 1
    todo = find_pending(Computations(merge, settings), sink)
    run_in_threads(todo, sink, workers, memory, Counter(todo, merge.plan, on_progress))


def run_in_threads(todo: Sequence[Computation], sink: Sink, workers: int, memory: int, counter: Counter) -> None:
    """Compute small outputs in batches, and large ones by all threads together."""
    with one_torch_thread(), _Pool(workers, memory) as pool:
        for batch in batches(todo):
            if len(batch) == 1 and len(batch[0].spans) > 1:
                _submit_large(pool, batch[0], sink, counter)
            else:
                for computation in batch:
                    computation.prefetch(computation.spans[0])
                pool.submit(max(computation.footprint() for computation in batch), run_batch, batch, sink, counter.add)


def find_pending(computations: Computations, sink: Sink) -> list[Computation]:
    """Return the computations of the outputs that `sink` does not have."""
    have = sink.done()
    todo = [computations.of(output) for output in computations.merge.plan.outputs if output.name not in have]
    if sum(fused.is_costly(computation.method, computation.shape) for computation in todo) > _MANY:
        import_module("torch")
    return todo


def run_batch(
    batch: Sequence[Computation], sink: Sink, on_finished: Callable[[Output], None] = lambda output: None
) -> None:
    """Compute several outputs one after the other in this thread."""
    for computation in batch:
        with computation.noting():  # a small tensor is read once for its reduction and merge
            state = computation.state()
        for span in computation.spans:
            _run_span(computation, span, state, sink)
        sink.finished(computation.output, computation.change(), computation.digests())
        on_finished(computation.output)


def _run_span(computation: Computation, span: list[Piece], state: Any, sink: Sink) -> None:
    place = place_of(sink, computation.output)
    with computation.noting():
        for block, entries in computation.results(span, state, place):
            sink.write(computation.output, block, entries)


def _submit_large(pool: _Pool, computation: Computation, sink: Sink, counter: Counter) -> None:
    """Compute one tensor with all workers: its reduction first, then its spans in any order."""
    need = computation.footprint()
    state = computation.state(lambda function, items: pool.map(need, function, items))
    left = itertools.count(len(computation.spans) - 1, -1)

    def run(span: list[Piece]) -> None:
        _run_span(computation, span, state, sink)
        if next(left) == 0:
            sink.finished(computation.output, computation.change(), computation.digests())
            counter.add(computation.output)

    for span in computation.spans:
        computation.prefetch(span)
        pool.submit(need, run, span)


def work(computation: Computation) -> int:
    """Return the amount of work, in entries."""
    return computation.output.spec.numel + _OVERHEAD


def batches(computations: Sequence[Computation]) -> Iterator[list[Computation]]:
    """Yield batches of small tensors, so that ten thousand of them do not need ten thousand round trips."""
    batch: list[Computation] = []
    held = 0
    for computation in computations:
        size = work(computation)
        if batch and held + size > SPAN:
            yield batch
            batch, held = [], 0
        batch.append(computation)
        held += size
    if batch:
        yield batch


class Counter:
    """Reports the progress of a plan to a listener."""

    def __init__(
        self, todo: Sequence[Computation], plan: Plan, listener: Callable[[Progress], None] | None = None
    ) -> None:
        self._total = plan.bytes_out
        self._done = self._total - sum(c.output.spec.nbytes for c in todo)
        self._listener = listener
        self._lock = threading.Lock()

    def add(self, output: Output) -> None:
        with self._lock:
            self._done += output.spec.nbytes
            if self._listener is not None:
                self._listener(Progress(self._done, self._total, output.name))


class _Pool:
    """Threads that admit work while it fits in memory; the first failure stops everything."""

    def __init__(self, workers: int, memory: int) -> None:
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="merganser")
        self._pending: deque[Future[Any]] = deque()
        self._backlog = 8 * workers
        self._memory = memory
        self._used = 0
        self._gate = threading.Condition()
        self._stopped = threading.Event()

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            while self._pending and error is None:
                self._pending.popleft().result()
        finally:
            self._stopped.set()
            self._executor.shutdown(wait=True, cancel_futures=True)

    def submit(self, need: int, function: Callable[..., None], *args: Any) -> None:
        while len(self._pending) >= self._backlog:
            self._pending.popleft().result()
        self._pending.append(self._executor.submit(self._run, need, function, *args))

    def map(self, need: int, function: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
        futures = [self._executor.submit(self._run, need, function, item) for item in items]
        return [future.result() for future in futures]

    def _run(self, need: int, function: Callable[..., T], *args: Any) -> T:
        with self._gate:
            self._gate.wait_for(lambda: self._used == 0 or self._used + need <= self._memory)
            self._used += need
        try:
            if self._stopped.is_set():
                raise RuntimeError("stopped")
            return function(*args)
        finally:
            with self._gate:
                self._used -= need
                self._gate.notify_all()


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """Limit torch to one thread, also if it is imported inside the block: workers are the parallelism, and one thread
    fixes the bits of decompositions.
    """
    before: list[int] = []

    def limit(torch: Any) -> None:
        before.append(torch.get_num_threads())
        torch.set_num_threads(1)

    try:
        with once_imported("torch", limit):
            yield
    finally:
        if before:
            torch.set_num_threads(before[0])
