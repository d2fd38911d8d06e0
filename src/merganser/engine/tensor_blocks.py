"""The blocks of one output as rules see them, and how they are processed in parallel."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from merganser.engine import fused
from merganser.engine.blocks import Piece
from merganser.kernels.selection import chosen
from merganser.methods.base import Group

if TYPE_CHECKING:
    from merganser.engine.compute import Computation

T = TypeVar("T")


class Mapper(Protocol):
    """A `map` that keeps the order, wherever the work runs."""

    def __call__(self, function: Callable[[Any], T], items: Sequence[Any], /) -> list[T]: ...


def serial(function: Callable[[Any], T], items: Sequence[Any], /) -> list[T]:
    return [function(item) for item in items]


class TensorBlocks:
    """The blocks of one output, streamed from its sources as often as the rule needs (`methods.base.Blocks`)."""

    def __init__(self, computation: Computation, mapper: Mapper = serial) -> None:
        self.name, self.labels = computation.output.name, computation.labels
        self.shape, self.prepared = computation.shape, computation.preparation.state
        self._computation = computation
        self._mapper = mapper

    def __len__(self) -> int:
        return sum(map(len, self._computation.spans))

    def __getitem__(self, index: int, /) -> Group:
        block = next(itertools.islice(itertools.chain.from_iterable(self._computation.spans), index, None))
        ((_, group),) = self._computation.groups([block])
        return group

    def __iter__(self) -> Iterator[Group]:
        for span in self._computation.spans:
            for _, group in self._computation.groups(span):
                yield group

    def map(self, function: Callable[[Group], T], only: int | None = None, stride: int = 1) -> list[T]:
        recorded = self._computation.record(function)
        wanted = set(chosen(len(self), only, 1 if recorded else stride))
        numbers = itertools.count()
        spans = [[block for block in span if next(numbers) in wanted] for span in self._computation.spans]

        def over(span: list[Piece]) -> list[T]:
            addresses = self._computation.addresses(span) if recorded else None
            if recorded is None or addresses is None:
                return [function(group) for _, group in self._computation.groups(span)]
            found: list[T] = []
            for block in span:
                result = fused.find(recorded, addresses, block, stride)
                if result is None:
                    result = [function(group) for _, group in self._computation.groups([block])]
                found += result
            return found

        return [result for part in self._mapper(over, [span for span in spans if span]) for result in part]
