"""A queue that computes concurrent requests together: samples of one kind share a forward pass."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from merganser.errors import InputError, MerganserError
from merganser.modules.inputs import Inputs, concatenate

#: What one sample gets back.
Answer = dict[str, Any]
#: From a batch to one answer per sample.
AnswerBatch = Callable[[Inputs], Sequence[Answer]]


class Busy(MerganserError):
    """The queue is full."""


class Closed(MerganserError):
    """The server is stopping and takes no new requests."""


@dataclass(frozen=True)
class Limits:
    """Limits of a server.

    Args:
        body_bytes: Largest request body.
        samples: Most samples in a request.
        batch: Most samples in one forward pass.
        queue: Most samples waiting.
        wait: Seconds to wait for further requests to fill a batch.
        timeout: Seconds for a body to arrive, and for an answer.
        header_seconds: Seconds for the headers to arrive.
        connections: Most open connections.

    Example:
        >>> limits = mg.routing.Limits(batch=16, timeout=10)
    """

    body_bytes: int = 1 << 20
    samples: int = 64
    batch: int = 64
    queue: int = 512
    wait: float = 0.005
    timeout: float = 30.0
    header_seconds: float = 10.0
    connections: int = 512

    def __post_init__(self) -> None:
        for name in ("body_bytes", "samples", "batch", "queue", "connections"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} {getattr(self, name)}: must be at least 1")
        if not (0 <= self.wait < math.inf and 0 < self.timeout < math.inf and 0 < self.header_seconds < math.inf):
            raise InputError("wait must not be negative, timeout and header_seconds must be positive, and all finite")


@dataclass(frozen=True)
class _Job:
    work: str
    inputs: Inputs
    answer: asyncio.Future[Sequence[Answer]]


class Batcher:
    """A queue in front of a model.

    Jobs are answered in order, and a job that fails does not affect others. With `together=False`, for models whose
    answers depend on the whole batch, every job is computed alone.
    """

    def __init__(self, works: dict[str, AnswerBatch], limits: Limits, together: bool = True) -> None:
        self.limits = limits
        self.together = together
        self.batches = 0
        self.samples = 0
        self._works = works
        self._waiting: deque[_Job] = deque()
        self._arrived = asyncio.Event()
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="merganser-serve")
        self._loop: asyncio.Task[None] | None = None

    @property
    def queued(self) -> int:
        """Number of waiting samples."""
        return sum(job.inputs.size for job in self._waiting)

    @property
    def closed(self) -> bool:
        return self._closed

    def start(self) -> None:
        self._loop = asyncio.get_running_loop().create_task(self._serve())

    async def stop(self) -> None:
        """Accept no more jobs, answer those that wait, and stop."""
        self._closed = True
        self._arrived.set()
        if self._loop is not None:
            await self._loop
        self._thread.shutdown(wait=True)

    async def submit(self, work: str, inputs: Inputs) -> Sequence[Answer]:
        """Return the answers for a request; raise `TimeoutError` when they take too long."""
        if self._closed:
            raise Closed("the server is stopping")
        if self.queued + inputs.size > self.limits.queue and self._waiting:
            raise Busy(f"{self.queued} samples wait already")
        answer: asyncio.Future[Sequence[Answer]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Job(work, inputs, answer))
        self._arrived.set()
        return await asyncio.wait_for(answer, self.limits.timeout)

    async def _serve(self) -> None:
        while self._waiting or not self._closed:
            if not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            if self.together and self.queued < self.limits.batch and not self._closed:
                await asyncio.sleep(self.limits.wait)
            await self._run(self._take())

    def _take(self) -> list[_Job]:
        """Take the oldest job and later ones of its kind that fit into the batch; drop jobs nobody waits for."""
        self._waiting = deque(job for job in self._waiting if not job.answer.done())
        taken: list[_Job] = []
        size = 0
        for job in self._waiting:
            if taken and not self.together:
                break
            if taken and (_kind(job) != _kind(taken[0]) or size + job.inputs.size > self.limits.batch):
                continue
            taken.append(job)
            size += job.inputs.size
        chosen = set(map(id, taken))
        self._waiting = deque(job for job in self._waiting if id(job) not in chosen)
        return taken

    async def _run(self, jobs: Sequence[_Job]) -> None:
        if not jobs:
            return
        loop = asyncio.get_running_loop()
        try:
            whole = concatenate([job.inputs for job in jobs])
            answers = await loop.run_in_executor(self._thread, self._works[jobs[0].work], whole)
        except Exception as error:
            if len(jobs) == 1:
                _settle(jobs[0], error=error)
                return
            for job in jobs:
                await self._run([job])
            return
        self.batches += 1
        self.samples += len(answers)
        start = 0
        for job in jobs:
            _settle(job, answers=answers[start : start + job.inputs.size])
            start += job.inputs.size


def _settle(job: _Job, answers: Sequence[Answer] | None = None, error: Exception | None = None) -> None:
    # The one who asked may have given up in the meantime.
    with contextlib.suppress(asyncio.InvalidStateError):
        if error is not None:
            job.answer.set_exception(error)
        elif answers is not None:
            job.answer.set_result(answers)


def _kind(job: _Job) -> Hashable:
    """Return the kind of a request: requests of one kind have the same tensors except for the number of samples."""

    def shape(value: Any) -> Hashable:
        return (tuple(value.shape[1:]), value.dtype) if isinstance(value, Tensor) else None

    tensors = [(key, shape(value)) for key, value in sorted(job.inputs.kwargs.items())]
    return (job.work, tuple(map(shape, job.inputs.args)), tuple(tensors))
