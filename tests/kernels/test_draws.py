"""The compiled draws are those of numpy's generator, by words one after the other and by vectors of them."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import numpy as np
import pytest

from merganser.kernels import tiles
from merganser.kernels.compiled import load_library

pytestmark = pytest.mark.skipif(tiles.library() is None, reason="no compiled runner")


def halves(number: int) -> list[int]:
    """Return a number of 128 bits as two words, the lower one first."""
    return [number & (1 << 64) - 1, number >> 64]


def has_wide_vectors() -> bool:
    """Return whether the processor has vectors of 512 bits, and the runner was compiled by a compiler that can use
    them: `WITH_WIDE_VECTORS` in `vectors.h`.
    """
    processor = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not processor.exists() or "avx512dq" not in processor.read_text():
        return False
    compiler = Path(load_library("tiles", tiles.VERSION)._name).read_bytes()  # ELF files name it
    return b"GCC: (" in compiler and b"clang version" not in compiler


@pytest.mark.parametrize("name", ["draw_groups", "draw_groups_wide"])
@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_groups_of_draws_are_those_of_numpy(name, seed):
    if name == "draw_groups_wide" and not has_wide_vectors():
        pytest.skip("no wide vectors here")
    draw = getattr(load_library("tiles", tiles.VERSION), name)
    generator = np.random.PCG64DXSM(seed)
    state = generator.state["state"]
    words = [*halves(state["state"]), *halves(state["inc"]), 0, 0]  # a `Stream` and what aligns it
    room = (ctypes.c_uint64 * (len(words) + 1))()
    place = -(-ctypes.addressof(room) // 16) * 16
    stream = (ctypes.c_uint64 * len(words)).from_address(place)
    stream[:] = words
    made = np.empty((1 + 500, 8), np.uint64)
    draw(ctypes.c_void_p(place), made.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(1))
    draw(ctypes.c_void_p(place), made[1:].ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(500))
    assert np.array_equal(made.reshape(-1), generator.random_raw(made.size))
    assert stream[4] == 501
    assert list(stream[:2]) == halves(generator.state["state"]["state"])
