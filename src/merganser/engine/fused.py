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

from merganser.engine.blocks import Piece
from merganser.engine.changes import RUNS, compare, read_sums
from merganser.kernels import tiles
from merganser.kernels.recording import Draws, Recording, check_filled, fill_in
from merganser.lazy import np
from merganser.methods.base import Group

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    from torch import Tensor

#: Smaller tensors are not worth recording.
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
    """The addresses of the rows of tensors that were read together; None if they cannot be used in place."""

    def __init__(self, tensors: Sequence[Tensor], origin: int) -> None:
        self._tensors = tensors  # kept alive
        self._origin = origin
        self._sizes = np.array([tensor.itemsize for tensor in tensors], np.int64)
        self._table = np.array([[tensor.data_ptr(), tiles.DTYPES[str(tensor.dtype)]] for tensor in tensors], np.int64)

    @classmethod
    def of(cls, tensors: Sequence[Tensor], origin: int) -> Addresses | None:
        """Return the addresses; `origin` is the flat index of the first entry read."""
        fit = all(str(t.dtype) in tiles.DTYPES and t.is_contiguous() and t.device.type == "cpu" for t in tensors)
        return cls(tensors, origin) if fit else None

    def include(self, tensor: Tensor) -> bool:
        """Return whether one of the tensors has memory in common with another."""
        memory = tensor.untyped_storage().data_ptr()
        return any(each.untyped_storage().data_ptr() == memory for each in self._tensors)

    def at(self, block: Piece, *more: Tensor) -> npt.NDArray[np.int64]:
        """Return the addresses of a block, and of further tensors of that size, with the codes of their dtypes."""
        own = len(self._table)
        table = np.empty((own + len(more), 2), np.int64)
        table[:own] = self._table
        table[:own, 0] += (block.offset - self._origin) * self._sizes
        for row, tensor in enumerate(more, own):
            table[row] = tensor.data_ptr(), tiles.DTYPES[str(tensor.dtype)]
        return table


def find(recorded: Recorded, addresses: Addresses, block: Piece, stride: int = 1) -> list[Any] | None:
    """Return the values of the recorded function for a block, or a sample of it; None if torch must compute them."""
    results = tiles.run(recorded.program, addresses.at(block), recorded.seeds, block.offset, block.numel, stride=stride)
    return None if results is None else [fill_in(recorded.found, results)]


def find_change(recorded: Recorded, addresses: Addresses, block: Piece, made: Tensor) -> list[float]:
    """Return the number of sampled entries and `changes.compare` of a block that was just computed."""
    table = addresses.at(block, made)
    results = tiles.run(recorded.program, table, recorded.seeds, block.offset, block.numel, stride=RUNS)
    assert results is not None, "compiled results are finite"
    return read_sums(results)


def store(recorded: Recorded, addresses: Addresses, block: Piece, out: Tensor, dtype: torch.dtype) -> bool:
    """Compute a block, rounded to `dtype`, into `out`; return False if torch must compute it."""
    program, table = recorded.program, addresses.at(block)
    return tiles.run(program, table, recorded.seeds, block.offset, block.numel, out, dtype=dtype) is not None


def can_store(place: Tensor, dtype: torch.dtype) -> bool:
    """Return whether results of a dtype can be computed into a tensor: one of that dtype, or of float32."""
    fits = place.dtype == dtype or (str(place.dtype) == "torch.float32" and str(dtype) in tiles.ROUNDED)
    return fits and place.device.type == "cpu" and place.is_contiguous()


def is_possible(output_dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Return whether there is a compiled runner, and whether a tensor of this shape is worth it."""
    return str(output_dtype) in tiles.DTYPES and math.prod(shape) >= WORTH and tiles.library() is not None
