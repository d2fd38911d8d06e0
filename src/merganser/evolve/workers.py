"""Run evaluations in this process, in processes of this machine, or on a Ray cluster.

An evaluator that raises fails its job. If a worker dies, another repeats its job, at most `ATTEMPTS` times.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, TypeAlias

import numpy as np

from merganser.engine.ray_cluster import start_ray
from merganser.errors import InputError, MerganserError, require
from merganser.evolve.costs import Costs
from merganser.evolve.domains import Values
from merganser.evolve.measures import task_of
from merganser.evolve.racing import Race
from merganser.evolve.store import Answers

ATTEMPTS = 3
Proposal: TypeAlias = "Values | str"


class Evaluate(Protocol):
    """Returns answers, by measure, of a candidate (its values by variable, or an endpoint's label) to items of each
    task.
    """

    def __call__(self, candidate: Proposal, items: Mapping[str, Sequence[int]]) -> Mapping[str, Sequence[float]]: ...


@dataclass(frozen=True)
class Job:
    """A candidate and the items of each task to ask, in order; in a race, not all if it loses.

    An `exact` job is asked in full precision, by the method `ask_exactly` of an evaluator that has one.
    """

    number: int
    candidate: Proposal
    items: Mapping[str, Sequence[int]]
    attempt: int = 1
    race: Race | None = None
    exact: bool = False


@dataclass(frozen=True)
class Outcome:
    """The result of a job: answers to `items`, or the error's text; in a race, the incumbent it lost to."""

    job: Job
    answers: Mapping[str, Sequence[float]] | None
    error: str | None
    seconds: float
    worker: str
    items: Mapping[str, Sequence[int]]
    lost: int | None = None
    costs: Costs = field(default_factory=dict)


def check_answers(outcome: Outcome, graded: Sequence[str]) -> dict[str, Answers]:
    """Return the evaluator's answers in the order of the items.

    Args:
        outcome: The outcome of a job that did not fail.
        graded: Tasks whose answers must be in [0, 1], for IRT.

    Raises:
        InputError: If there is not exactly one finite answer per item.
    """
    assert outcome.answers is not None
    requested = outcome.items
    if missing := [name for name in requested if name not in outcome.answers]:
        raise InputError(f"the evaluator gave no answers for task {missing[0]!r}")
    found = {}
    for measure, values in outcome.answers.items():
        items = requested.get(task_of(measure))
        if items is None:
            raise InputError(f"the evaluator answered {measure!r}, which is not a task of this study")
        if len(values) != len(items):
            raise InputError(f"the evaluator gave {len(values)} answers for the {len(items)} items of {measure!r}")
        order = np.argsort(items)
        found[measure] = Answers(np.asarray(items, dtype=np.int64)[order], np.asarray(values, dtype=np.float64)[order])
        if not np.isfinite(found[measure].values).all():
            raise InputError(f"the evaluator gave answers to {measure!r} that are not finite")
        low, high = found[measure].values.min(), found[measure].values.max()
        if measure in graded and (low < 0 or high > 1):
            raise InputError(f"answers to {measure!r} from {low:g} to {high:g}: IRT needs them in [0, 1]")
    return found


class Workers(Protocol):
    def run(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """Yield outcomes as they arrive, one per job."""
        ...

    def close(self) -> None: ...


def workers(evaluate: Evaluate, count: int = 1, *, ray: str | None = None) -> Workers:
    """Return `count` workers on this machine, or on the Ray cluster at `ray` ("auto" for this machine's cluster)."""
    if count < 1:
        raise InputError(f"{count} workers; at least 1")
    if ray is not None:
        return RayWorkers(evaluate, count, ray)
    return Processes(evaluate, count) if count > 1 else Inline(evaluate)


def perform(evaluate: Evaluate, job: Job, worker: str) -> Outcome:
    """Do a job; whatever the evaluator raises becomes the outcome's error. An evaluator that has a method `take_costs`
    tells what the job cost."""
    outcome = _perform(evaluate, job, worker)
    return replace(outcome, costs=getattr(evaluate, "take_costs", dict)())


def _perform(evaluate: Evaluate, job: Job, worker: str) -> Outcome:
    began = time.perf_counter()
    answers: dict[str, list[float]] = {}
    asked: dict[str, list[int]] = {task: [] for task in job.items}
    lost = None
    ask: Evaluate = getattr(evaluate, "ask_exactly", evaluate) if job.exact else evaluate
    try:
        for part in filter(None, [job.items] if job.race is None else job.race.parts(job.items)):
            for measure, values in _order_answers(ask(job.candidate, part)).items():
                answers.setdefault(measure, []).extend(values)
            for task, items in part.items():
                asked[task].extend(items)
            if job.race is not None and (lost := job.race.lost(answers)) is not None:
                break
    except Exception as raised:
        where = "".join(traceback.format_exception(raised, limit=-3))
        kind = "" if isinstance(raised, MerganserError) else f"{type(raised).__name__}: "
        error = f"{kind}{raised}\n{where}"
        return Outcome(job, None, error, time.perf_counter() - began, worker, asked)
    complete = all(len(asked[task]) == len(items) for task, items in job.items.items())
    return Outcome(job, answers, None, time.perf_counter() - began, worker, asked, None if complete else lost)


def _order_answers(answers: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return numbers in the order of the items; refuse unordered collections and text, which would be misread."""
    if not isinstance(answers, Mapping):
        raise InputError(f"an evaluator returns answers by task, not a {type(answers).__name__}")
    for measure, values in answers.items():
        if isinstance(values, (str, bytes, Mapping, Set)):
            raise InputError(
                f"answers to {measure!r} are a list of numbers, one for each item asked, not a {type(values).__name__}"
            )
    return {measure: list(map(float, values)) for measure, values in answers.items()}


class Inline:
    """Runs jobs one after the other in this process."""

    def __init__(self, evaluate: Evaluate) -> None:
        self._evaluate = evaluate

    def run(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        for job in jobs:
            yield perform(self._evaluate, job, f"{os.getpid()}")

    def close(self) -> None:
        pass


def _serve(connection: Connection, evaluate: Evaluate) -> None:
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            connection.send(perform(evaluate, connection.recv(), f"{os.getpid()}"))


@dataclass
class _Process:
    process: Any
    connection: Connection
    job: Job | None = None


class Processes:
    """Processes of this machine, each with its own copy of the evaluator (which must be picklable) and its own
    models.
    """

    def __init__(self, evaluate: Evaluate, count: int) -> None:
        try:
            pickle.dumps(evaluate)
        except Exception as error:  # pickling an object can raise anything
            raise InputError(
                f"the evaluator cannot be sent to other processes ({error}); use one worker, or make it a function or "
                "an object of a module"
            ) from None
        self._context = multiprocessing.get_context("spawn")
        self._evaluate = evaluate
        self._count = count
        self._idle: list[_Process] = []
        self._busy: list[_Process] = []

    def run(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        waiting = deque(jobs)
        while waiting or self._busy:
            while waiting and len(self._busy) < self._count:
                self._give(waiting.popleft())
            ready = wait([w.connection for w in self._busy] + [w.process.sentinel for w in self._busy])
            for worker in [w for w in self._busy if w.connection in ready or w.process.sentinel in ready]:
                job = worker.job
                assert job is not None
                self._busy.remove(worker)
                outcome = self._receive(worker)
                if outcome is not None:
                    self._idle.append(worker)
                    yield outcome
                elif job.attempt < ATTEMPTS:
                    waiting.appendleft(replace(job, attempt=job.attempt + 1))
                else:
                    yield Outcome(job, None, _report_death(worker.process.exitcode), 0.0, f"{worker.process.pid}", {})

    def _give(self, job: Job) -> None:
        worker = self._idle.pop() if self._idle else self._start()
        worker.job = job
        self._busy.append(worker)
        # If it died while idle, its sentinel reports that, and the job goes to another.
        with contextlib.suppress(OSError):
            worker.connection.send(job)

    def _start(self) -> _Process:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there, self._evaluate), daemon=True)
        process.start()
        there.close()
        return _Process(process, here)

    def _receive(self, worker: _Process) -> Outcome | None:
        try:
            if worker.connection.poll():
                outcome: Outcome = worker.connection.recv()
                return outcome
        except (EOFError, OSError):
            pass
        worker.process.join()
        return None

    def close(self) -> None:
        for worker in self._idle:
            worker.connection.close()
        for worker in self._busy:
            worker.process.terminate()
        for worker in self._idle + self._busy:
            worker.process.join(10)
        self._idle, self._busy = [], []


class RayWorkers:
    """Actors of a Ray cluster, each with its own models; checkpoints must be on a path visible to every node."""

    def __init__(self, evaluate: Evaluate, count: int, address: str) -> None:
        self._ray: Any = require("ray", "ray")
        self._started = not self._ray.is_initialized()
        if self._started:
            start_ray(address, count, log_to_driver=False)
        self._actor = self._ray.remote(_RayEvaluator)
        self._evaluate = self._ray.put(evaluate)
        self._count = count
        self._idle: list[Any] = []

    def run(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        waiting = deque(jobs)
        busy: dict[Any, tuple[Any, Job]] = {}
        while waiting or busy:
            while waiting and len(busy) < self._count:
                job = waiting.popleft()
                actor = self._idle.pop() if self._idle else self._actor.remote(self._evaluate)
                busy[actor.perform.remote(job)] = (actor, job)
            (reference, *_), _ = self._ray.wait(list(busy))
            actor, job = busy.pop(reference)
            try:
                outcome: Outcome = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                if job.attempt < ATTEMPTS:
                    waiting.appendleft(replace(job, attempt=job.attempt + 1))
                else:
                    yield Outcome(job, None, f"{_report_death(None)}: {error}", 0.0, "ray", {})
            else:
                self._idle.append(actor)
                yield outcome

    def close(self) -> None:
        for actor in self._idle:
            self._ray.kill(actor)
        self._idle = []
        if self._started:
            self._ray.shutdown()


class _RayEvaluator:
    def __init__(self, evaluate: Evaluate) -> None:
        self._evaluate = evaluate

    def perform(self, job: Job) -> Outcome:
        return perform(self._evaluate, job, f"{os.uname().nodename}:{os.getpid()}")


def _report_death(code: int | None) -> str:
    status = "" if code is None else f" (exit code {code})"
    return f"the worker died{status} in each of {ATTEMPTS} attempts; out of memory?"
