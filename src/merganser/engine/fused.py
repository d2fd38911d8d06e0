"""Run rules on the stored bytes of their sources with the compiled runner (`kernels.tiles`).

The operations of a rule on a block are recorded once (`kernels.recording`) and run over every block, in one pass from
the files' dtype to the result's. Torch handles rules that cannot be recorded and blocks with values that are not
finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from merganser.checkpoints.dtypes import Element
from merganser.checkpoints.stored_entries import StoredEntries
from merganser.engine.blocks import Piece
from merganser.engine.changes import RUNS, compare, read_sums
from merganser.kernels import tiles
from merganser.kernels.recording import Draws, Recording, check_filled, fill_in
from merganser.lazy import is_imported, np
from merganser.methods.base import Group, Method

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

#: Smaller tensors are not worth recording, unless torch would be imported for them.
WORTH = 1 << 15


class _Unknown(int):
    """Placeholder for the offset of a block, which differs between blocks; any arithmetic with it is refused."""

    def _refuse(self, *others: object) -> NoReturn:
        raise TypeError("the offset of a block is not known while a rule is recorded")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __mod__ = __index__ = _refuse
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __float__ = __int__ = _refuse
    __hash__ = int.__hash__


class _StandIn(Group):
    """A group of recorded lanes in place of tensors. `specific` is set once a rule asks which tensor it is."""

    specific = False

    def __getattribute__(self, attribute: str) -> Any:
        if attribute in ("name", "shape"):
            object.__setattr__(self, "specific", True)
        return super().__getattribute__(attribute)

    def random_bits(self, model: int) -> Tensor:
        return Draws(model)  # type: ignore[return-value]


@dataclass(frozen=True)
class Recorded:
    """The recorded operations of a function on the blocks of an output, and the structure of its return value.

    `specific` tells whether they depend on the output (its name, its shape, its random bits); otherwise they are those
    of every output with the same rule.
    """

    program: tiles.Program
    seeds: npt.NDArray[np.uint64]
    found: Any
    specific: bool = True


def record(function: Callable[[Group], Any], group: Mapping[str, Any], stores: bool = False) -> Recorded | None:
    """Record the operations of `function` on a block.

    Args:
        function: Takes a group; returns numbers (also in lists or tuples), or a tensor to be stored.
        group: The fields of the group except its tensors; `models` is their number, `base` whether there is one.
        stores: Whether the function returns a tensor.

    Returns:
        The recording; None if the function cannot be recorded.
    """
    recording = Recording()
    count = group["models"]
    stand_in = _StandIn(
        **{
            **group,
            "models": tuple(recording.load(number) for number in range(count)),
            "base": recording.load(count) if group["base"] else None,
            "offset": _Unknown(),
            "finite": True,
        }
    )
    try:
        found = function(stand_in)
        if stores:
            recording.note("STORE", found.value)
        else:
            check_filled(found)
        program = recording.program()
    except Exception:
        return None  # torch runs it and raises any real error
    halves = [word for model in program.draws for word in _seed(stand_in, model)]
    return Recorded(program, np.array(halves, np.uint64), found, stand_in.specific)


@lru_cache(maxsize=64)
def record_comparison(models: int, with_base: bool) -> Recorded:
    """Record `changes.compare` of `models` models, an optional base and the result."""
    recording = Recording()
    *parents, made = (recording.load(number) for number in range(models + with_base + 1))
    base = parents.pop() if with_base else None
    found = compare(parents, base, made)  # type: ignore[arg-type]
    return Recorded(recording.program(), np.empty(0, np.uint64), found)


def _seed(group: Group, model: int) -> tuple[int, ...]:
    state: Any = group.generator(model).state["state"]
    low = (1 << 64) - 1
    return state["state"] >> 64, state["state"] & low, state["inc"] >> 64, state["inc"] & low


class Addresses:
    """The addresses of the same rows of tensors.

    Args:
        rows: The rows of each tensor, in dtypes that can be read (`of`).
        origin: The flat index of their first entry.
    """

    def __init__(self, rows: Sequence[StoredEntries], origin: int) -> None:
        self._rows = rows  # kept alive
        self._origin = origin
        self._sizes = np.array([each.element.itemsize for each in rows], np.int64)
        #: The address of each tensor's rows and the number of its dtype.
        self.table = np.array([_place(each) for each in rows], np.int64)

    @classmethod
    def of(cls, rows: Sequence[StoredEntries | None], origin: int) -> Addresses | None:
        """Return the addresses; None if there are none, or a dtype cannot be read."""
        fit = [each for each in rows if each is not None and each.element.name in tiles.DTYPES]
        return cls(fit, origin) if len(fit) == len(rows) else None

    def overlap(self, entries: StoredEntries) -> bool:
        """Return whether one of the tensors has memory in common with other entries."""
        return any(each.overlap(entries) for each in self._rows)

    def rows(self, block: Piece) -> list[StoredEntries]:
        """Return the entries of a block."""
        start = self.start(block)
        return [each[start : start + block.numel] for each in self._rows]

    def start(self, block: Piece) -> int:
        """Return the index of a block's first entry in the rows."""
        return block.offset - self._origin

    def at(self, block: Piece, made: StoredEntries) -> npt.NDArray[np.int64]:
        """Return the table for a block, with its result, entries of that size, as the last source."""
        table = np.empty((len(self.table) + 1, 2), np.int64)
        table[:-1] = self.table
        table[:-1, 0] += self.start(block) * self._sizes
        table[-1] = _place(made)
        return table


def _place(entries: StoredEntries) -> tuple[int, int]:
    return entries.address, tiles.DTYPES[entries.element.name]


def find(recorded: Recorded, addresses: Addresses, block: Piece, stride: int = 1) -> list[Any] | None:
    """Return the values of the recorded function for a block, or a sample of it; None if torch must compute them."""
    start = addresses.start(block)
    results = tiles.run(recorded.program, addresses.table, recorded.seeds, block.offset, block.numel, stride, start)
    return None if results is None else [fill_in(recorded.found, results)]


def find_change(addresses: Addresses, with_base: bool, block: Piece, made: StoredEntries) -> list[float]:
    """Return the number of sampled entries and `changes.compare` of a block that was just computed."""
    table = addresses.at(block, made)
    recorded = record_comparison(len(table) - 1 - with_base, with_base)
    results = tiles.run(recorded.program, table, recorded.seeds, block.offset, block.numel, stride=RUNS)
    assert results is not None, "compiled results are finite"
    return read_sums(results)


def store(recorded: Recorded, addresses: Addresses, block: Piece, out: StoredEntries, element: Element) -> bool:
    """Compute a block, rounded to a dtype, into `out` of this dtype or float32; return False if torch must do it."""
    number = (tiles.DTYPES if out.element == element else tiles.ROUNDED)[element.name]
    start, address = addresses.start(block), out.address
    return tiles.store(
        recorded.program, addresses.table, recorded.seeds, block.offset, block.numel, start, address, number
    )


def can_store(place: StoredEntries, element: Element) -> bool:
    """Return whether results of a dtype can be computed into a place: one of that dtype, or of float32."""
    return place.element == element or (place.element.name == "float32" and element.name in tiles.ROUNDED)


def is_costly(method: Method, shape: tuple[int, ...]) -> bool:
    """Return whether to record a rule takes longer than to let torch run it: for small tensors, if each has a state."""
    return method.reach == "reduce_map" and math.prod(shape) < WORTH


def is_possible(element: Element, shape: tuple[int, ...]) -> bool:
    """Return whether outputs of a dtype can be compiled, and whether one of this shape is worth it."""
    if element.name not in tiles.DTYPES or tiles.library() is None:
        return False
    return math.prod(shape) >= WORTH or not is_imported("torch")
