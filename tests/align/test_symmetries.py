"""Symmetries as data: validation, tables, JSON, pinning."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from merganser.align.blocks import blocks
from merganser.align.symmetries import Atom, AxisSegment, Factor, Symmetry, concatenation, product
from merganser.errors import InputError

HEAD, INNER, STREAM = Factor("head", 4), Factor("head:inner", 3), Factor("stream", 5)


@pytest.fixture
def small() -> Symmetry:
    return Symmetry(
        {"head": Atom("head", 4), "head:inner": Atom("head:inner", 3, "head"), "stream": Atom("stream", 5)},
        {
            "value.weight": (product(HEAD, INNER), product(STREAM)),
            "joined.weight": (product(Factor(None, 2)), concatenation(product(HEAD, INNER), product(STREAM))),
            "statistics": (product(STREAM),),
            "again": (product(HEAD, INNER), product(STREAM)),
        },
        buffers=frozenset({"statistics"}),
        aliases={"again": "value.weight"},
    )


def test_table_names_atoms_sizes_and_places(small: Symmetry) -> None:
    lines = str(small).splitlines()
    assert lines[1].split() == ["head", "4", "value.weight[0],", "joined.weight[1],", "again[0]"]
    assert lines[2].startswith("  head:inner")
    assert "4 × 3" in lines[2]


def test_json_round_trip(small: Symmetry) -> None:
    assert Symmetry.from_json(small.to_json()) == small


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"atoms": [], "axes": {"w": [[{"factors": 3}]]}}'])
def test_bad_json(text: str) -> None:
    with pytest.raises(InputError, match="not the JSON of a symmetry"):
        Symmetry.from_json(text)


def test_objective_counts_ties_once_and_no_buffers(small: Symmetry) -> None:
    assert small.objective == ("value.weight", "joined.weight")


def test_blocks_tile_the_tensor(small: Symmetry) -> None:
    weight = torch.arange(34).reshape(2, 17)
    cut = list(blocks(small, "joined.weight"))
    assert [block.segments[1].factors for block in cut] == [(HEAD, INNER), (STREAM,)]
    again = torch.zeros_like(weight)
    for block in cut:
        block.unfold(block.fold(weight), again)
    assert torch.equal(again, weight)


def test_strided_segments() -> None:
    """Rows (head, {q, v}, unit), as some fused projections have them: each part has the gaps of the other."""
    q = AxisSegment((HEAD, INNER), 0, (6, 1))
    v = AxisSegment((HEAD, INNER), 3, (6, 1))
    atoms = {"head": Atom("head", 4), "head:inner": Atom("head:inner", 3, "head")}
    symmetry = Symmetry(atoms, {"fused": ((q, v),)})
    rows = torch.arange(24).reshape(4, 2, 3)
    first, second = (block.fold(rows.reshape(-1)) for block in blocks(symmetry, "fused"))
    assert torch.equal(first[:, 0], rows[:, 0].reshape(-1))
    assert torch.equal(second[:, 0], rows[:, 1].reshape(-1))
    assert np.array_equal(q.positions[1], [6, 7, 8])


def test_pin_takes_descendants(small: Symmetry) -> None:
    assert set(small.pin("head").atoms) == {"stream"}
    assert small.pin("head").axes["value.weight"] == (
        product(Factor(None, 4), Factor(None, 3)),
        product(STREAM),
    )
    with pytest.raises(InputError, match="did you mean 'stream'"):
        small.pin("steam")


def test_extend(small: Symmetry) -> None:
    more = small.extend([Atom("hidden", 7)], {"up.weight": [product(Factor("hidden", 7)), product(STREAM)]})
    assert more.tensor_shape("up.weight") == (7, 5)
    assert more.occurrences["hidden"] == (("up.weight", 0),)


def test_validation_says_what_and_where() -> None:
    atoms = {"a": Atom("a", 4), "b": Atom("b", 3, "a")}
    with pytest.raises(InputError, match=r"unknown atom 'c' in axis 0 of 'w'"):
        Symmetry(atoms, {"w": (product(Factor("c", 4)),)})
    with pytest.raises(InputError, match=r"axis 0 of 'w': factor of size 5, but atom 'a' has 4"):
        Symmetry(atoms, {"w": (product(Factor("a", 5)),)})
    with pytest.raises(InputError, match=r"needs its parent 'a'"):
        Symmetry(atoms, {"w": (product(Factor("b", 3)),)})
    with pytest.raises(InputError, match="overlap or leave a gap"):
        Symmetry(atoms, {"w": ((AxisSegment((Factor("a", 4),), 1, (1,)),),)})
    with pytest.raises(InputError, match="its own ancestor"):
        Symmetry({"a": Atom("a", 2, "b"), "b": Atom("b", 2, "a")}, {})
