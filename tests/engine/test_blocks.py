from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from merganser.engine.blocks import Piece, bounds, cut, take

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@given(shapes, st.integers(1, 60))
def test_pieces_cover_a_tensor_once_in_order(shape: tuple[int, ...], size: int) -> None:
    tensor = torch.arange(math.prod(shape)).view(shape)
    pieces = cut(shape, size)
    parts = [take(tensor[p.start : p.stop] if shape else tensor, p, p.start) for p in pieces]
    assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), tensor.reshape(-1))
    for piece, part in zip(pieces, parts, strict=True):
        assert part.numel() == piece.numel
        if piece.numel:
            assert part.reshape(-1)[0] == piece.offset


@given(shapes, st.integers(1, 60), st.data())
def test_a_range_of_rows_is_cut_alike(shape: tuple[int, ...], size: int, data: st.DataObject) -> None:
    if not shape:
        return
    first = data.draw(st.integers(0, shape[0]))
    last = data.draw(st.integers(first, shape[0]))
    pieces = cut(shape, size, (first, last))
    assert bounds(pieces) == (first, last)
    assert sum(p.numel for p in pieces) == math.prod((last - first, *shape[1:]))


def test_matrices_keep_their_rows() -> None:
    assert cut((2, 100), 10) == [Piece(0, 1, 0, 100), Piece(1, 2, 100, 100)]
    assert cut((1, 4, 10), 20)[0].inner == (0, 2)
    assert cut((1 << 60, 0), 10) == [Piece(0, 1 << 60, 0, 0)]
