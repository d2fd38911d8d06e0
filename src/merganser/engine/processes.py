"""Forked processes as workers: merging blocks in cache is many short operations, in which threads wait for the GIL."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from merganser.checkpoints.references import is_remote, parts
from merganser.engine.compute import Arithmetic, Computation, Computations
from merganser.engine.execute import (
    Counter,
    Progress,
    batches,
    find_pending,
    one_torch_thread,
    run_batch,
    run_in_threads,
    work,
)
from merganser.engine.merge import Merge
from merganser.engine.plan import Output
from merganser.engine.sinks import Finished, ReportingSink, SharedSink
from merganser.engine.workers import DEFAULT_MEMORY
from merganser.errors import MerganserError
from merganser.lazy import is_imported

WorkBatch = Sequence[Computation]
#: Least work that is worth forking for.
_WORTH = 1 << 25
#: Likely cause of death of a worker that was ended by a signal.
_LIKELY = {
    signal.SIGKILL: " (out of memory?)",
    signal.SIGBUS: " (a file it read was cut short, or its disk failed)",
}


def execute_in_processes(
    merge: Merge,
    sink: SharedSink,
    *,
    workers: int | None = None,
    memory: int = DEFAULT_MEMORY,
    settings: Arithmetic | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> None:
    """Run `execute` with processes as workers if that is possible and faster, else with threads."""
    workers = workers or os.cpu_count() or 1
    computations = Computations(merge, settings)
    todo = find_pending(computations, sink)
    counter = Counter(todo, merge.plan, on_progress)
    cut = list(batches(todo))
    # Threads share the state of an inner merge and fetched data.
    shared = any(model.plan or any(map(is_remote, parts(model.path or ""))) for model in merge.plan.models)
    if shared or not is_worthwhile(cut, workers):
        run_in_threads(todo, sink, workers, memory, counter)
    else:
        with one_torch_thread():
            import_what_rules_need(computations, todo)
            _run(cut, sink, workers, memory, counter.add)


def is_worthwhile(cut: Sequence[WorkBatch], workers: int) -> bool:
    """Return whether processes are possible and faster than threads.

    A batch is never split, so the largest must not keep the others waiting. Decompositions are long operations that use
    all cores themselves; a GPU does not survive a fork.
    """
    computations = [computation for batch in cut for computation in batch]
    if workers < 2 or not sys.platform.startswith("linux") or not computations:
        return False
    if any(c.settings.device != "cpu" or c.whole for c in computations):
        return False
    sizes = [sum(map(work, batch)) for batch in cut]
    return sum(sizes) >= max(_WORTH, workers * max(sizes))


def import_what_rules_need(computations: Computations, todo: Sequence[Computation]) -> None:
    """Try each kind of rule on its smallest tensor: if it needs torch, that is imported once, before workers start."""
    smallest: dict[Any, Output] = {}
    for computation in sorted(todo, key=work):
        smallest.setdefault((type(computation.method), computation.output.base is None), computation.output)
    for output in smallest.values():
        trial = computations.of(output)
        if len(trial.spans) == 1 and not is_imported("torch"):
            with contextlib.suppress(Exception):  # raised again by the worker that computes this output
                for _ in trial.results(trial.spans[0], trial.state()):
                    pass


def _run(
    cut: Sequence[WorkBatch], sink: SharedSink, workers: int, memory: int, on_finished: Callable[[Output], None]
) -> None:
    """Run every batch in one of `workers` children, the largest first; `memory` limits them together.

    Children only write; only this process knows what is finished. They stop when it ends for any reason.
    """
    order = sorted(cut, key=lambda batch: -sum(map(work, batch)))
    needs = [max(computation.footprint() for computation in batch) for batch in order]
    with _children(order, sink, min(workers, len(order))) as children:
        idle = list(children)
        busy: dict[_Child, int] = {}
        coming = 0
        while coming < len(order) or busy:
            while idle and coming < len(order):
                if busy and sum(needs[number] for number in busy.values()) + needs[coming] > memory:
                    break
                child = idle.pop()
                child.send(coming)
                busy[child] = coming
                coming += 1
                _read_ahead(order[coming + len(children) - 1 : coming + len(children)])
            ready = wait([child.pipe for child in busy])
            failures = []
            for child in [child for child in busy if child.pipe in ready]:
                number = busy.pop(child)
                try:
                    report = child.receive()
                except Exception as failure:
                    failures.append(failure)
                    continue
                idle.append(child)
                for computation in order[number]:
                    sink.finished_elsewhere(computation.output, report[computation.output.name])
                    on_finished(computation.output)
            if failures:
                raise failures[0]


def _read_ahead(coming: Sequence[WorkBatch]) -> None:
    for batch in coming:
        if len(batch) == 1:
            for span in batch[0].spans:
                batch[0].prefetch(span)


class _InWorker(Exception):
    """The traceback of an error in a worker, as text."""


@dataclass(frozen=True)
class _Child:
    process: Any
    pipe: Connection

    def send(self, number: int) -> None:
        with self._alive():
            self.pipe.send(number)

    def receive(self) -> Mapping[str, Finished]:
        """Wait for the batch and return its results; raise the worker's error here."""
        with self._alive():
            report, failure, where = self.pipe.recv()
        if failure is not None:
            raise failure from _InWorker(where)
        finished: Mapping[str, Finished] = report
        return finished

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            how += _LIKELY.get(-code, "")
            raise MerganserError(
                f"a worker was ended by {how}: finished tensors are kept; continue with resume=True, "
                "with fewer workers if memory is short"
            ) from None


@contextlib.contextmanager
def _children(order: Sequence[WorkBatch], sink: SharedSink, count: int) -> Iterator[list[_Child]]:
    """Start as many workers as the system allows, at least one."""
    context = multiprocessing.get_context("fork")
    children: list[_Child] = []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            others = [ours, *(child.pipe for child in children)]
            process = context.Process(target=_serve, args=(order, sink, theirs, others), daemon=True)
            try:
                with warnings.catch_warnings():
                    # Other threads may hold locks, but the child's code takes none of them.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
            except OSError as error:
                if not children:
                    raise MerganserError(f"no worker could be started: {error}; try one worker (workers=1)") from error
                ours.close()
                break
            finally:
                theirs.close()
            children.append(_Child(process, ours))
        yield children
    finally:
        for child in children:
            child.process.terminate()
        for child in children:
            child.process.join()
            child.pipe.close()


def _serve(order: Sequence[WorkBatch], sink: SharedSink, pipe: Connection, others: Sequence[Connection]) -> None:
    """Run batches by number in a child until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too and stops its children
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The parent's streams may be locked by a thread that does not exist here.
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
    for other in others:
        other.close()  # if kept open here, they would outlive the parent
    own = sink.for_worker()
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send(_attempt(order[pipe.recv()], own))
    os._exit(0)


def _attempt(batch: WorkBatch, sink: ReportingSink) -> tuple[Mapping[str, Finished], Exception | None, str]:
    """Run the batch; return its results, or its error and traceback, in a form that can be sent to the parent."""
    try:
        run_batch(batch, sink)
        return sink.report(), None, ""
    except Exception as error:
        where = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
            return {}, error, where
        except Exception:
            return {}, RuntimeError(f"{type(error).__name__}: {error}"), where
