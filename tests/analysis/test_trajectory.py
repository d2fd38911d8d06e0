"""Trajectories, the linear-regime verdict and the projection, against plain numpy on flattened checkpoints."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from merganser.analysis import trajectory as tr
from merganser.analysis.gradients import TaskLosses, descend
from merganser.analysis.inner_products import distances, inner_products
from merganser.engine.geometry import cosines
from merganser.errors import CheckpointError, InputError


def state(seed, base=None, size=1.0):
    g = torch.Generator().manual_seed(seed)
    fresh = {
        "a.weight": torch.randn(7, 5, generator=g),
        "a.bias": torch.randn(7, generator=g),
        "norm.running_mean": torch.randn(7, generator=g) * 100,
        "scale": torch.randn((), generator=g),
        "steps": torch.tensor(seed),
    }
    if base is None:
        return fresh
    return {k: base[k] + size * v if v.is_floating_point() else v for k, v in fresh.items()}


def flat(s):
    return np.concatenate([s[k].double().numpy().reshape(-1) for k in ("a.weight", "a.bias", "scale")])


def test_inner_products_against_flattened():
    states = [state(i) for i in range(4)]
    matrix = np.stack([flat(s) for s in states])
    np.testing.assert_allclose(inner_products(states), matrix @ matrix.T, rtol=1e-12)
    moved = matrix[1:] - matrix[0]
    gram = inner_products(states[1:], base=states[0])
    np.testing.assert_allclose(gram, moved @ moved.T, rtol=1e-12)
    pairs = np.linalg.norm(moved[:, None] - moved[None], axis=-1)
    np.testing.assert_allclose(distances(states[1:]), pairs, rtol=1e-12)
    unit = moved / np.linalg.norm(moved, axis=1, keepdims=True)
    np.testing.assert_allclose(cosines(gram), unit @ unit.T, atol=1e-12)


def test_checkpoints_that_do_not_match_are_named():
    a, b = state(0), state(1)
    del b["a.bias"]
    with pytest.raises(CheckpointError, match=r"checkpoint 1 .*'a\.bias'"):
        inner_products([a, b])
    with pytest.raises(CheckpointError, match=r"checkpoint 0 .*'a\.bias'"):
        inner_products([b, a])
    c = state(2)
    c["a.bias"] = torch.zeros(6)
    with pytest.raises(CheckpointError, match=r"\[7\].*\[6\]"):
        inner_products([a, c])


def test_trajectory_against_the_definitions():
    base = state(0)
    run = [base]
    for epoch in range(1, 5):
        run.append(state(epoch, run[-1], 1 / epoch))
    rates = [0.1, 0.1, 0.05, 0.01]
    report = tr.trajectory(run, learning_rates=rates)
    points = np.stack([flat(s) for s in run])
    tau = points[1:] - points[0]
    steps = np.linalg.norm(np.diff(points, axis=0), axis=1)
    np.testing.assert_allclose(report.shares, steps / rates / (steps / rates).sum(), rtol=1e-9)
    cos = tau @ tau[0] / np.linalg.norm(tau, axis=1) / np.linalg.norm(tau[0])
    np.testing.assert_allclose(report.cosines, cos, rtol=1e-9)
    np.testing.assert_allclose(report.straightness, np.linalg.norm(tau, axis=1) / np.cumsum(steps), rtol=1e-9)
    np.testing.assert_allclose(np.array(report.departure) ** 2 + cos**2, 1, rtol=1e-9)
    json.dumps(report.to_dict(), allow_nan=False)


def test_shares_are_gradient_norms_under_gradient_descent():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    losses = TaskLosses.of(module, F.cross_entropy, {"t": (torch.randn(20, 4).double(), torch.randint(0, 3, (20,)))})
    path = descend(lambda theta: losses.gradient("t", theta), losses.start, 0.5, 5)
    states = [losses.layout.unpack(theta) for theta in path]
    norms = np.array([float(losses.gradient("t", theta).norm()) for theta in path[:-1]])
    np.testing.assert_allclose(tr.trajectory(states).shares, norms / norms.sum(), rtol=1e-9)


def straight_and_turned(angle):
    base, first, other = state(0), state(1), state(2)
    u, v = flat(first), flat(other)
    lam = float(u @ v / (u @ u))
    orthogonal = {k: other[k] - lam * first[k] if other[k].is_floating_point() else other[k] for k in other}
    ratio = float(np.linalg.norm(u) / np.linalg.norm(flat(orthogonal)))

    def at(x, y):
        return {
            k: base[k] + x * first[k] + y * ratio * orthogonal[k] if base[k].is_floating_point() else base[k]
            for k in base
        }

    return [base, at(0.5, 0), at(np.cos(angle), np.sin(angle))]


@pytest.mark.parametrize(("angle", "verdict"), [(0.1, "linear"), (0.8, "bent"), (1.4, "left"), (2.5, "left")])
def test_verdict_follows_the_worst_expert(angle, verdict):
    report = tr.linear_regime({"good": straight_and_turned(0.0), "turned": straight_and_turned(angle)})
    assert report.verdict == verdict
    assert report.worst == "turned"
    assert report.final_cosines["turned"] == pytest.approx(np.cos(angle), abs=1e-5)
    assert report.linear_through["good"] == 2
    json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("place", "name"), [(0, "the base"), (2, "checkpoint 2 after it")])
def test_weights_that_are_no_numbers_are_named(bad, place, name):
    run = [{"w": torch.tensor([float(i), 1.0])} for i in range(4)]
    run[place]["w"][1] = bad
    for judge in (tr.trajectory, lambda r: tr.linear_regime({"x": r}), lambda r: tr.project({"x": r})):
        with pytest.raises(InputError, match="contains NaN, infinite or enormous values"):
            judge(run)
    with pytest.raises(InputError, match=name):
        tr.trajectory(run)


def test_a_run_that_returns_to_its_base():
    run = tr.trajectory([{"w": torch.tensor([float(x)])} for x in (0, 1, 0)])
    assert run.cosines == (1.0, 0.0)
    assert run.straightness == (1.0, 0.0)


def test_a_run_that_never_moved_and_mistakes():
    with pytest.raises(InputError, match="epoch 1 equals the base"):
        tr.linear_regime({"x": [state(0), state(0), state(1)]})
    with pytest.raises(InputError, match="one epoch"):
        tr.linear_regime({"x": [state(0), state(1)]})
    with pytest.raises(InputError, match="learning rates"):
        tr.trajectory([state(0), state(1)], learning_rates=[0.1, 0.2])
    with pytest.raises(InputError, match="base"):
        tr.trajectory([state(0)])


def test_projection_is_pca():
    strategies = {"atm": [state(i) for i in range(4)], "ties": [state(i) for i in (7, 8)]}
    report = tr.project(strategies)
    matrix = np.stack([flat(s) for run in strategies.values() for s in run])
    centred = matrix - matrix.mean(0)
    _, sigma, rows = np.linalg.svd(centred, full_matrices=False)
    expected = centred @ rows[:2].T
    found = np.array([*report.points["atm"], *report.points["ties"]])
    np.testing.assert_allclose(np.abs(found), np.abs(expected), atol=1e-6)
    np.testing.assert_allclose(report.explained, (sigma**2 / (sigma**2).sum())[:2], rtol=1e-6)
    assert (found[np.abs(found).argmax(0), [0, 1]] > 0).all()
