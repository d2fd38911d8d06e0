"""What each task adds to TSV-Merge."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import merganser as mg
from merganser.errors import InputError
from merganser.methods.tsv import TSV
from merganser.tuning.parts import tsv_parts


def world(seed, models, distance=None):
    """A base and experts; with a distance, the last expert is that close to the first."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w": (9, 6), "b": (9,), "k": (4, 3, 2, 2), "x.text_projection": (5, 5)}
    base = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    experts = {
        f"t{i}": {name: value + 0.1 * torch.randn(value.shape, generator=generator) for name, value in base.items()}
        for i in range(models)
    }
    if distance is not None:
        near = {n: v + distance * torch.randn(v.shape, generator=generator) for n, v in experts["t0"].items()}
        experts[f"t{models - 1}"] = near
    return base, experts, {t: {n: v - base[n] for n, v in expert.items()} for t, expert in experts.items()}


@given(
    st.integers(0, 1000),
    st.integers(1, 5),
    st.sampled_from([None, 0, 1e-5, 3e-4]),
    st.sampled_from([{}, {"convolutions": True}, {"low_rank": False}, {"orthogonalize": "none"}, {"rank_fraction": 1}]),
)
@settings(max_examples=25, deadline=None)
def test_parts_add_up_to_the_merge(seed, models, distance, options):
    base, experts, vectors = world(seed, models, distance)
    parts = tsv_parts(vectors, TSV(**options))
    merged = mg.merge(experts, "tsv", base, **options)
    for name, value in base.items():
        total = sum(part[name] for part in parts.values())
        assert torch.allclose(value + total, merged[name], atol=1e-5), name


def test_parts_of_different_tasks_are_orthogonal():
    _, _, vectors = world(0, 3)
    one, two, three = (part["w"].double() for part in tsv_parts(vectors).values())
    for a, b in ((one, two), (one, three), (two, three)):
        assert float((a.T @ b).abs().max()) < 1e-6
        assert float((a @ b.T).abs().max()) < 1e-6


def test_mistakes():
    _, _, vectors = world(0, 2)
    with pytest.raises(InputError, match="at least one task vector"):
        tsv_parts({})
    with pytest.raises(InputError, match="'t1' lacks 'b'"):
        tsv_parts({"t0": vectors["t0"], "t1": {n: v for n, v in vectors["t1"].items() if n != "b"}})
