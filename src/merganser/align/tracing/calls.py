"""One operation of the graph with its arguments by name, and the registry of rules for axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from merganser.align.tracing.dims import Axes, Dim, find
from merganser.align.tracing.nesting import Forbidden

OutputAxes: TypeAlias = Axes | list[Axes]


class Unsupported(Exception):
    """A rule does not cover this case: the operation is treated as unknown, and everything it touches is pinned."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an ATen operator: `call["input"]` is an argument by its name in the operator's schema."""

    op: str
    arguments: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    forbidden: list[Forbidden]
    hints: list[tuple[Dim, str]]
    consumed: list[tuple[list[Axes], list[Axes]]]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the (first) output."""
        return self.shapes[0]

    @property
    def input(self) -> Axes:
        """Return the first tensor argument (`self` or `input`)."""
        return next(value for value in self.arguments.values() if isinstance(value, Axes))

    @property
    def tensors(self) -> list[Axes]:
        """Return every tensor among the arguments, also inside lists."""
        found: list[Axes] = []
        for value in self.arguments.values():
            found += [v for v in (value if type(value) is list else [value]) if isinstance(v, Axes)]
        return found

    def forbid(self, parents: Iterable[Dim], children: Iterable[Dim]) -> None:
        """Forbid units of `children` to depend on the index of `parents`, which this operation mixes."""
        children = [child for child in children if child.size != 1]
        self.forbidden.extend(
            Forbidden(parent, child)
            for parent in parents
            if parent.size != 1
            for child in children
            if find(parent) is not find(child)
        )

    def mix(self, dims: Iterable[Dim]) -> None:
        """Mark all units of these axes as used inside the operation, although its results have them too."""
        self.consumed.append(([Axes(dims)], []))

    def hint(self, dim: Dim, label: str) -> None:
        """Suggest a name for an atom on this axis."""
        self.hints.append((dim, label))

    def dims(self, name: str = "dim", rank: int | None = None) -> list[int]:
        """Return an argument that names axes (an int, a list, or None for all), as non-negative positions."""
        rank = len(self.input) if rank is None else rank
        value = self.arguments.get(name)
        if value is None or value == []:
            return list(range(rank))
        return [d % rank if rank else 0 for d in ([value] if isinstance(value, int) else value)]


TraceRule: TypeAlias = Callable[[Call], OutputAxes]
RULES: dict[str, TraceRule] = {}


def rule(*names: str) -> Callable[[TraceRule], TraceRule]:
    """Register a rule for ATen operators by name, without overload and without the underscore of in-place forms."""

    def register(function: TraceRule) -> TraceRule:
        for name in names:
            assert name not in RULES, f"two rules for {name}"
            RULES[name] = function
        return function

    return register


def replaced(axes: Axes, dims: Sequence[int], new: Sequence[Dim]) -> Axes:
    """Return `axes` with some of them replaced."""
    result = list(axes)
    for place, dim in zip(dims, new, strict=True):
        result[place] = dim
    return Axes(result)


def without(axes: Axes, dims: Sequence[int]) -> list[Dim]:
    return [dim for place, dim in enumerate(axes) if place not in dims]
