"""The compiled draws are those of numpy's generator, by words one after the other and by vectors of them."""

from __future__ import annotations

import ctypes
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
    return "avx512dq" in Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else False


@pytest.mark.parametrize("name", ["draw_groups", "draw_groups_wide"])
@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_groups_of_draws_are_those_of_numpy(name, seed):
    draw = getattr(load_library("tiles", tiles.VERSION), name, None)
    if name == "draw_groups_wide" and (draw is None or not has_wide_vectors()):
        pytest.skip("no wide vectors here")
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
