"""The compiled runner of recorded rules (`tiles.c`), built if there is a C compiler at installation.

Without it torch computes everything, with the same bits. `recording` makes the programs that run here.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from merganser.kernels.arrays import AnyArray
from merganser.kernels.compiled import load_library
from merganser.lazy import np

if TYPE_CHECKING:
    pass


#: Entries of a tile, and of a run of `spheres.total`.
TILE = 1024
#: Entries of a tile of a sample of scores: short, so that the sample has entries of many rows.
SAMPLED = 64
#: The dtypes that can be read and written, by their numbers in the library.
DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
#: The numbers of results that are rounded to a dtype and stored in float32.
ROUNDED = {"bfloat16": 3, "float16": 4}
#: The version of the library that this module speaks to; another was built from older sources.
VERSION = 6
#: The fields of a step, as numpy has them.
STEP = [
    *((name, "<i4") for name in ("op", "to", "a", "b", "c")),
    *((name, "<f4") for name in ("x", "y")),
    *((name, "<i4") for name in ("low", "high", "unused")),
    *((name, "<i8") for name in ("place", "table", "more")),
]


class _TileJob(ctypes.Structure):
    _fields_ = [
        ("sources", ctypes.c_void_p),
        ("seeds", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("offset", "size", "start", "tile", "stride", "row")),
        ("out", ctypes.c_void_p),
        ("dtype", ctypes.c_int64),
        ("sums", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("kept", ctypes.c_void_p),
        ("room", ctypes.c_int64),
    ]


@lru_cache(maxsize=1)
def library() -> Any:
    """Return the function that runs tiles, or None if it was not built or cannot be loaded."""
    loaded = load_library("tiles", VERSION)
    if loaded is None:
        return None
    run = loaded.run_tiles
    run.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    run.restype = ctypes.c_int
    return run


@dataclass(frozen=True)
class Program:
    """A recorded rule, ready to run.

    `steps` is an array of `STEP`; `draws` are the models whose random bits it uses, `sums`, `divergences` and `scans`
    the number of results of each kind. `tables` keeps the arrays that steps point to alive.
    """

    steps: AnyArray
    registers: int
    draws: tuple[int, ...]
    sums: int
    divergences: int
    scans: int
    takes: bool
    tile: int
    row: int
    tables: tuple[AnyArray, ...]

    @cached_property
    def address(self) -> int:
        """Where the steps are in memory."""
        return int(self.steps.ctypes.data)


@dataclass(frozen=True)
class Results:
    """The results of a program on the `size` entries of a block that it processed: for each sum a value per tile,
    for each divergence a value per row, for each scan four counts and the kept scores.
    """

    size: int
    sums: AnyArray
    rows: AnyArray
    counts: AnyArray
    kept: AnyArray

    def total(self, number: int) -> float:
        """Return a sum, as `spheres.total` gives it."""
        runs = self.sums[number].tolist()
        return math.fsum(runs[:-1]) + runs[-1] if self.size % TILE else math.fsum(runs)

    def scores(self, number: int) -> AnyArray:
        """Return the kept scores, as the bits of floats."""
        return self.kept[number, : self.size].view(np.int32)


def run(
    program: Program, sources: AnyArray, seeds: AnyArray, offset: int, size: int, stride: int = 1, start: int = 0
) -> Results | None:
    """Run a program over a block.

    Args:
        program: The program, which stores nothing.
        sources: For each source its address, and the number of its dtype.
        seeds: For each of the program's draws the state and the increment of its generator, in halves.
        offset: The flat index of the block's first entry.
        size: The number of its entries.
        stride: Compute one in `stride` tiles.
        start: The index of the block's first entry in the sources.

    Returns:
        The results; None if an input is not finite, so that torch must compute it.
    """
    tile = SAMPLED if program.takes and stride > 1 else program.tile
    tiles = -(-size // tile)
    taken = -(-tiles // stride)
    last = (taken - 1) * stride * tile
    seen = (taken - 1) * tile + min(tile, size - last)
    sums = np.empty((program.sums, tiles))
    rows = np.empty((program.divergences, size // program.row))
    counts = np.zeros((program.scans, 4), np.int64)
    room = 0 if not program.scans else taken * tile if program.takes else size // 8
    kept = np.empty((program.scans, room), np.uint32)
    results = [array.ctypes.data if array.size else None for array in (sums, rows, counts, kept)]
    job = _TileJob(
        sources.ctypes.data, seeds.ctypes.data, offset, size, start, tile, stride, program.row, None, 0, *results, room
    )
    found = Results(seen, sums[:, :taken], rows[:, : seen // program.row], counts, kept)
    return found if _run(program, job) else None


def store(
    program: Program, sources: AnyArray, seeds: AnyArray, offset: int, size: int, start: int, out: int, dtype: int
) -> bool:
    """Run a program that stores its result, and nothing else, over a block; the arguments are those of `run`.

    Args:
        program: The program.
        sources: The sources.
        seeds: The generators.
        offset: The place of the block.
        size: The number of its entries.
        start: Its place in the sources.
        out: The address of the result.
        dtype: The number of the result's dtype.

    Returns:
        Whether inputs and results are finite; otherwise torch must compute the block.
    """
    tile, row = program.tile, program.row
    return _run(
        program, _TileJob(sources.ctypes.data, seeds.ctypes.data, offset, size, start, tile, 1, row, out, dtype)
    )


def _run(program: Program, job: _TileJob) -> bool:
    state = library()(program.address, len(program.steps), program.registers, len(program.draws), ctypes.addressof(job))
    if state < 0:
        raise MemoryError("no memory for a few tiles")
    return not state
