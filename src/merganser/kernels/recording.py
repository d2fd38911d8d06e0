"""Record the operations of a rule on a block once, with placeholders for its tensors, to run them over tiles (`tiles`).

A rule is defined by its torch code. If the compiled runner is available, the rule is called once with `Lane`s instead
of tensors, which record the operations. Anything that a lane cannot record (a sum over columns, a sort, a shape) ends
the recording with an exception, and torch computes the rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from merganser.kernels.arrays import AnyArray
from merganser.kernels.layouts import DROPS, lay_out
from merganser.kernels.tiles import STEP, TILE, Program, Results
from merganser.lazy import defer, np, torch

if TYPE_CHECKING:
    pass


class NotRecordable(Exception):
    """A rule needs an operation that cannot be done tile by tile."""


class _Step(NamedTuple):
    op: str
    inputs: tuple[int, ...]
    fields: tuple[tuple[str, Any], ...]
    tables: tuple[AnyArray, ...]


@dataclass(frozen=True)
class Draws:
    """Placeholder for the random bits of a model."""

    model: int

    def view(self, *shape: int) -> Draws:
        return self


@dataclass(frozen=True)
class Pending:
    """Placeholder for a number, or a function `read` of the results, until the block has been run."""

    read: Callable[[Results], Any]


class Recording:
    """The recorded steps; equal steps are recorded once."""

    def __init__(self) -> None:
        self.steps: list[_Step] = []
        self.ends: Counter[str] = Counter()
        self.tile = TILE
        self.row = 1
        self._known: dict[Any, int] = {}

    def note(self, op: str, *inputs: int, tables: tuple[AnyArray, ...] = (), **fields: Any) -> int:
        step = _Step(op, inputs, tuple(fields.items()), tables)
        key = (op, inputs, repr(step.fields) if fields else "", tuple(map(id, tables)) if tables else ())
        if key not in self._known:
            self._known[key] = len(self.steps)
            self.steps.append(step)
        return self._known[key]

    def load(self, source: int) -> Lane:
        """Return the lane of a source."""
        return Lane(self, self.note("LOAD", place=source))

    def end(self, op: str, read: Callable[[int, Results], Any], *lanes: Lane, **fields: Any) -> Any:
        """Record a step that produces results instead of a value; `read` finds them by their number."""
        kind = op if op in ("SUM", "DIVERGENCE") else "SCAN"
        number = self.ends[kind]
        self.ends[kind] += 1
        self.note(op, *(lane.value for lane in lanes), place=number, **fields)
        return Pending(lambda results: read(number, results))

    def program(self) -> Program:
        """Return the recorded program, without steps that lead to no result, in as few registers as possible."""
        if self.tile != TILE and (self.ends["SUM"] or self.ends["SCAN"]):
            raise NotRecordable("sums and scans of tiles of another length")
        laid = lay_out(tuple((step.op, step.inputs) for step in self.steps))
        draws: list[int] = []
        rows = []
        for op, registers, indices in laid.rows:
            fields = {name: value for index in indices for name, value in self.steps[index].fields}
            tables = [table.ctypes.data for index in indices for table in self.steps[index].tables] + [0, 0]
            place = fields.get("place", 0)
            if op in DROPS:
                draws += [] if place in draws else [place]
                place = draws.index(place)
            numbers = [fields.get(name, 0) for name in ("x", "y", "low", "high")]
            rows.append((op, *registers, *numbers, 0, place, *tables[:2]))
        return Program(
            np.array(rows, STEP),
            registers=laid.registers,
            draws=tuple(draws),
            sums=self.ends["SUM"],
            divergences=self.ends["DIVERGENCE"],
            scans=self.ends["SCAN"],
            takes=any(step.op == "TAKE" for step in self.steps),
            tile=self.tile,
            row=self.row,
            tables=tuple(table for step in self.steps for table in step.tables),
        )


class Lane:
    """Placeholder for the block of a tensor: operations on it are recorded instead of executed.

    In-place operations (with a trailing underscore) change the lane, as they would a tensor.
    """

    def __init__(self, recording: Recording, value: int) -> None:
        self.recording = recording
        self.value = value

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def itemsize(self) -> int:
        return 4

    def note(self, op: str, *others: Lane, **fields: Any) -> Lane:
        """Record a step whose first operand is this lane, and return the lane of its value."""
        if any(other.recording is not self.recording for other in others):
            raise NotRecordable("lanes of two recordings")
        return Lane(self.recording, self.recording.note(op, self.value, *(o.value for o in others), **fields))

    def become(self, other: Lane) -> Lane:
        """Take the value of another lane, as an in-place operation does."""
        self.value = other.value
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = _OPERATIONS.get(name.removesuffix("_"))
        if operation is None or name.startswith("_"):
            raise NotRecordable(name)
        if name.endswith("_"):
            return lambda *args, **options: self.become(operation(self, *args, **options))
        return lambda *args, **options: operation(self, *args, **options)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _call(function.__name__, *args, **(kwargs or {}))

    def __add__(self, other: Any) -> Lane:
        return _add(self, other)

    def __sub__(self, other: Any) -> Lane:
        return _sub(self, other)

    def __mul__(self, other: Any) -> Lane:
        return _mul(self, other)

    def __truediv__(self, other: Any) -> Lane:
        return _lanes("DIV")(self, other)

    def __neg__(self) -> Lane:
        return self.note("NEG")

    def __ge__(self, other: Any) -> Lane:
        return self.note("GES", x=_number(other))

    def __eq__(self, other: object) -> _Mask:  # type: ignore[override]
        return _Mask(self, _number(other))

    __hash__ = object.__hash__

    def __bool__(self) -> NoReturn:
        raise NotRecordable("a decision by the values of a tensor")


@dataclass(frozen=True, eq=False)
class _Mask:
    """Placeholder for `lane == number`."""

    lane: Lane
    number: float


def _number(value: Any) -> float:
    """Return a scalar as torch uses it: rounded to float32."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating)):
        raise NotRecordable(f"an operand of type {type(value).__name__}")
    return float(np.float32(value))


def _add(one: Lane, other: Any, *, alpha: float = 1) -> Lane:
    if not isinstance(other, Lane):
        return one.note("ADDS", x=_number(_number(other) * alpha))
    return one.note("ADD", other) if alpha == 1 else one.note("AXPY", other, x=_number(alpha))


def _sub(one: Lane, other: Any, *, alpha: float = 1) -> Lane:
    if isinstance(other, Lane) and alpha == 1:
        return one.note("SUB", other)
    return _add(one, other, alpha=-alpha)


def _mul(one: Lane, other: Any) -> Lane:
    return one.note("MUL", other) if isinstance(other, Lane) else one.note("MULS", x=_number(other))


def _clamp(one: Lane, min: float | None = None, max: float | None = None) -> Lane:
    lane = one if min is None else one.note("MAXS", x=_number(min))
    return lane if max is None else lane.note("MINS", x=_number(max))


def _lerp(one: Lane, end: Any, weight: Any) -> Lane:
    _check_lane(end)
    share = np.float32(_number(weight))
    near = abs(share) < 0.5
    return one.note("LERP", end, x=float(share if near else share - np.float32(1)), place=int(not near))


def _addcmul(one: Lane, first: Any, second: Any, *, value: float = 1) -> Lane:
    _check_lane(first)
    _check_lane(second)
    return one.note("ADDCMUL", first, second, x=_number(value))


def _masked_fill(one: Lane, mask: Any, value: float) -> Lane:
    if not isinstance(mask, _Mask):
        raise NotRecordable("a mask of another kind")
    return mask.lane.note("SELECT", one, x=_number(value), y=mask.number)


def _fill(value: float) -> Callable[..., Lane]:
    return lambda one: Lane(one.recording, one.recording.note("FILL", x=value))


def _shrink(one: Lane, bound: float = 0.5) -> Lane:
    return one.note("SHRINK", x=_number(bound), y=_number(bound))


def _lanes(op: str) -> Callable[[Lane, Any], Lane]:
    def operation(one: Lane, other: Any) -> Lane:
        _check_lane(other)
        return one.note(op, other)

    return operation


def _check_lane(value: Any) -> None:
    if not isinstance(value, Lane):
        raise NotRecordable(f"an operand of type {type(value).__name__}")


def _itself(one: Lane, *shape: Any) -> Lane:
    return one


#: The operations of lanes, by the names of torch's functions and methods (without the underscore).
_OPERATIONS: dict[str, Callable[..., Lane]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _lanes("DIV"),
    "maximum": _lanes("MAX"),
    "minimum": _lanes("MIN"),
    "copysign": _lanes("COPYSIGN"),
    "abs": lambda one: one.note("ABS"),
    "neg": lambda one: one.note("NEG"),
    "sign": lambda one: one.note("SIGN"),
    "clamp": _clamp,
    "lerp": _lerp,
    "addcmul": _addcmul,
    "hardshrink": _shrink,
    "masked_fill": _masked_fill,
    "zeros_like": _fill(0.0),
    "zero": _fill(0.0),
    "clone": lambda one: Lane(one.recording, one.value),
    "contiguous": _itself,
    "view": _itself,
    "view_as": _itself,
}


def _call(name: str, *args: Any, out: Lane | None = None, **options: Any) -> Any:
    """Record a call of one of torch's functions."""
    operation = _OPERATIONS.get(name)
    if operation is None or not isinstance(args[0], Lane):
        raise NotRecordable(name)
    found = operation(*args, **options)
    return found if out is None else out.become(found)


# Recording a rule does not import torch.
defer("torch", _OPERATIONS, Lane, _call)


def check_filled(found: Any) -> None:
    """Refuse a result of a rule that contains anything but numbers, known or pending."""
    if isinstance(found, (list, tuple)):
        for each in found:
            check_filled(each)
    elif not isinstance(found, (Pending, int, float)):
        raise NotRecordable(f"a result of type {type(found).__name__}")


def fill_in(found: Any, results: Results) -> Any:
    """Return the result of a recorded rule with the numbers of a block in place of pending ones."""
    if isinstance(found, Pending):
        return found.read(results)
    if isinstance(found, (list, tuple)):
        return type(found)(fill_in(each, results) for each in found)
    return found
