from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import merganser as mg
from merganser.errors import RecipeError
from merganser.methods.schedules import WarmupStableMerge, decay

SCHEDULES = ("linear", "sqrt", "cosine")


def run(count: int, **options: object) -> tuple[np.ndarray, np.ndarray]:
    """The checkpoints of a random walk, and their merge."""
    walk = np.cumsum(np.random.default_rng(count).normal(size=(count, 3, 4)), axis=0).astype(np.float32)
    merged = mg.merge([{"w": torch.from_numpy(each)} for each in walk], "wsm", **options)["w"]
    return walk, merged.numpy()


@given(count=st.integers(1, 9), schedule=st.sampled_from(SCHEDULES))
def test_steps_are_scaled_by_the_schedule(count: int, schedule: str) -> None:
    walk, merged = run(count, schedule=schedule)
    expected = walk[0].astype(np.float64)
    for step in range(1, count):
        x = step / count
        rate = {"linear": 1 - x, "sqrt": 1 - x**0.5, "cosine": 0.5 * (1 + np.cos(np.pi * x))}[schedule]
        expected += rate * (walk[step].astype(np.float64) - walk[step - 1])
    np.testing.assert_allclose(merged, expected, atol=1e-5)


@given(count=st.integers(1, 12), schedule=st.sampled_from(SCHEDULES), last=st.integers(0, 15))
def test_shares_are_an_average(count: int, schedule: str, last: int) -> None:
    shares = WarmupStableMerge(schedule=schedule, last=last).shares(count)
    assert len(shares) == count
    assert min(shares) >= 0
    assert sum(shares) == pytest.approx(1)
    assert sum(share > 0 for share in shares) == (min(last, count) if last else count)


def test_linear_is_the_plain_mean() -> None:
    walk, merged = run(5, schedule="linear")
    np.testing.assert_allclose(merged, walk.mean(0), atol=1e-5)


def test_the_last_checkpoints_alone() -> None:
    walk, merged = run(6, schedule="linear", last=2)
    np.testing.assert_allclose(merged, walk[-2:].mean(0), atol=1e-5)


def test_rates_fall_from_one_to_zero() -> None:
    for schedule in SCHEDULES:
        rates = [1.0, *decay(schedule, 6), 0.0]
        assert all(before > after for before, after in itertools.pairwise(rates))


def test_unknown_schedules_are_refused() -> None:
    with pytest.raises(RecipeError, match="'cosin' is not one of"):
        run(3, schedule="cosin")
