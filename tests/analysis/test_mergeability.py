"""The guess before merging: its ends, its monotony, and whom it blames."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from merganser.analysis.mergeability import judge_pair, mergeability, rank_correlation, sample
from merganser.engine.task_vector import TaskVector
from merganser.errors import InputError

SHAPE = (48, 40)


def base(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{i}.w": 10 * torch.randn(SHAPE, generator=generator) for i in range(3)} | {
        "b": torch.randn(5, generator=generator)
    }


def moved(start, seed, size=1.0):
    """A fine-tune by a matrix of rank 2 a layer."""
    generator = torch.Generator().manual_seed(seed)

    def low_rank():
        u, v = torch.randn(SHAPE[0], 2, generator=generator), torch.randn(2, SHAPE[1], generator=generator)
        return size * u @ v

    return {name: t + low_rank() if t.dim() == 2 else t + 0.01 for name, t in start.items()}


def mirrored(start, expert, factor=-1.0):
    return {name: t + factor * (expert[name] - t) for name, t in start.items()}


def test_identical_experts_are_easy_and_opposed_ones_hard():
    start = base()
    a, b = moved(start, 1, 0.01), moved(start, 2, 0.01)
    same = mergeability(start, {"a": a, "same": dict(a)})
    apart = mergeability(start, {"a": a, "b": b})
    opposed = mergeability(start, {"a": a, "not a": mirrored(start, a)})
    assert same.pairs[0].overlap == pytest.approx(1, abs=1e-6)
    assert same.pairs[0].conflict == pytest.approx(0, abs=1e-5)
    assert same.pairs[0].sign_agreement == 1
    assert apart.pairs[0].overlap < 0.2
    assert opposed.pairs[0].conflict == pytest.approx(1, abs=1e-5)
    assert opposed.pairs[0].sign_agreement == 0
    assert opposed.verdict == "hard"
    assert same.difficulty < 0.1
    assert apart.difficulty < opposed.difficulty


def test_thepair_to_blame_is_named():
    start = base()
    a, b = moved(start, 1, 0.05), moved(start, 2, 0.05)
    found = mergeability(start, {"a": a, "b": b, "anti b": mirrored(start, b)})
    assert found.blame == ("b", "anti b")
    assert "same directions to different ends" in found.reason
    assert found.by_expert["a"] < found.by_expert["b"]
    assert json.loads(json.dumps(found.to_dict()))["blame"] == ["b", "anti b"]
    far = mergeability(start, {"a": moved(start, 1, 3.0), "b": moved(start, 2, 3.0)})
    assert "far from the base" in far.reason
    uneven = mergeability(start, {"a": moved(start, 1, 0.001), "b": moved(start, 2, 0.01)})
    assert "differ in size" in uneven.reason


def test_runs_that_bend_count():
    start = base()
    a, b = moved(start, 1, 0.01), moved(start, 2, 0.01)
    turned = moved(start, 3, 0.01)
    straight = mergeability(start, {"a": a, "b": b}, runs={"a": [start, a, a], "b": [start, b, b]})
    bent = mergeability(start, {"a": a, "b": b}, runs={"a": [start, turned, a], "b": [start, b, b]})
    assert straight.pairs[0].bend == pytest.approx(0, abs=1e-6)
    assert bent.difficulty > straight.difficulty
    assert "linear regime" in bent.reason


unit = st.floats(0, 1)


@given(unit, st.floats(-1, 1), st.floats(0.01, 2), st.floats(0.01, 2), unit, st.floats(0, 0.5))
def test_difficulty_is_bounded_and_rises_with_every_signal(overlap, cosine, x, y, bend, more):
    def difficulty(overlap=overlap, cosine=cosine, norms=(x, y), bend=bend):
        lengths = (*norms, 10.0)
        return judge_pair(("a", "b"), lengths, overlap=overlap, cosine=cosine, signs=0.5, bend=bend).difficulty

    at = difficulty()
    assert 0 <= at <= 1
    assert difficulty(overlap=overlap + more) >= at - 1e-12
    assert difficulty(cosine=max(-1, cosine - more)) >= at - 1e-12
    assert difficulty(norms=(x * (1 + more), y * (1 + more))) >= at - 1e-12
    assert difficulty(bend=bend + more) >= at - 1e-12
    assert difficulty(norms=(y, x)) == pytest.approx(at)


def test_sampling_spreads_over_the_depth():
    start = {f"l{i}": torch.randn(4, 4) for i in range(20)}
    vector = TaskVector({n: t + 1 for n, t in start.items()}, start)
    assert sample(vector, 3) == ["l0", "l10", "l19"] or sample(vector, 3) == ["l0", "l9", "l19"]
    assert sample(vector, 1) == ["l0"]
    assert len(sample(vector, 50)) == 20


def test_rank_correlation():
    assert rank_correlation([0.1, 0.2, 0.9], [1, 5, 50]) == pytest.approx(1)
    assert rank_correlation([0.1, 0.2, 0.9, 0.3], [4, 3, 1, 2]) == pytest.approx(-1)
    with pytest.raises(InputError, match="expected equal numbers"):
        rank_correlation([1, 2], [1, 2])


def test_refusals():
    start = base()
    with pytest.raises(InputError, match="two or more experts"):
        mergeability(start, {"a": moved(start, 1)})
    with pytest.raises(InputError, match="'b' equals the base"):
        mergeability(start, {"a": moved(start, 1), "b": start})
    with pytest.raises(InputError, match="name the same tasks"):
        mergeability(start, {"a": moved(start, 1), "b": moved(start, 2)}, runs={"a": [start]})
    vectors = mergeability({"b": torch.ones(3)}, {"x": {"b": torch.zeros(3)}, "y": {"b": torch.full((3,), 2.0)}})
    assert vectors.sampled == ()
    assert not math.isnan(vectors.difficulty)


@pytest.mark.parametrize(("broken", "name"), [("expert", "b"), ("base", "the base")])
def test_weights_that_are_not_numbers_are_not_easy_to_merge(broken, name):
    base = {"w": torch.randn(4, 4), "bias": torch.zeros(4)}
    experts = {label: {n: t + torch.randn(t.shape) for n, t in base.items()} for label in "ab"}
    (base if broken == "base" else experts["b"])["bias"][1] = torch.nan
    with pytest.raises(InputError, match=f"^{name}: contains NaN"):
        mergeability(base, experts)


def test_a_rank_below_one_is_refused():
    base = {"w": torch.zeros(4, 4)}
    with pytest.raises(InputError, match="rank of at least 1, got 0"):
        mergeability(base, {label: {"w": torch.randn(4, 4)} for label in "ab"}, rank=0)
