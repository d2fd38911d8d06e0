"""Iso-C, Iso-CTS, SVC, subspace boosting, STAR and WUDI against naive float64 versions."""

import numpy as np
import pytest
import torch

from merganser.methods.base import Group
from merganser.methods.isotropic import IsoC, IsoCTS, shares
from merganser.methods.registry import build
from merganser.methods.spectral import STAR, SVC, SubspaceBoosting, reaching
from merganser.methods.wudi import WUDI

SHAPES = [(40, 40), (64, 24), (36, 90)]
RULES = [IsoC, IsoCTS, SVC, SubspaceBoosting, STAR, WUDI]


def task_matrices(t, d, m, seed=0):
    rng = np.random.default_rng(seed)
    draws = (rng.standard_normal((d, m)) * np.exp(-np.arange(m) / m * 3) for _ in range(t))
    return [draw.astype(np.float32).astype(np.float64) for draw in draws]


def merge(rule, deltas, **parameters):
    base = torch.zeros(deltas[0].shape)
    models = tuple(torch.as_tensor(delta).float() for delta in deltas)
    labels = tuple(f"m{i}" for i in range(len(models)))
    return build(rule, parameters, labels).merge(Group("w", models, base, labels, tuple(base.shape))).double().numpy()


def svd(matrix):
    return np.linalg.svd(np.asarray(matrix, dtype=np.float64), full_matrices=False)


def polar(matrix):
    u, _, vt = svd(matrix)
    return u @ vt


def close(found, wanted, tolerance=1e-5):
    assert np.linalg.norm(found - wanted) <= tolerance * np.linalg.norm(wanted)


@pytest.mark.parametrize("shape", SHAPES)
def test_iso_c(shape):
    deltas = task_matrices(3, *shape)
    u, s, vt = svd(sum(deltas))
    close(merge(IsoC, deltas, scale=1.3), 1.3 * s.mean() * u @ vt)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fraction", [0.8, 0.5, 0.0])
def test_iso_cts(shape, fraction):
    t, n = 3, min(shape)
    deltas = task_matrices(t, *shape, seed=1)  # seed 0 draws a direction within the tolerance
    share = min(round((n - int(fraction * n)) / t), n // t)
    c = n - share * t
    u, s, vt = svd(sum(deltas))
    us, ss, vs = [u[:, :c]], [s[:c]], [vt[:c]]
    for delta in deltas:
        a, b, e = svd(delta - us[0] @ (us[0].T @ delta))
        us.append(a[:, :share])
        ss.append(b[:share])
        vs.append(e[:share])
    wanted = np.concatenate(ss).mean() * polar(np.concatenate(us, 1)) @ polar(np.concatenate(vs, 0))
    close(merge(IsoCTS, deltas, common_fraction=fraction), wanted)


def test_iso_cts_shares_make_up_the_whole():
    assert shares(100, 8, 0.8) == 2
    assert shares(4, 20, 0.8) == 0
    assert all(shares(n, t, f) * t <= n for n in range(1, 40) for t in range(1, 12) for f in (0, 0.3, 0.8, 1))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("floor", [1.0, 0.1])
def test_svc(shape, floor):
    deltas = task_matrices(3, *shape)
    u, s, vt = svd(sum(deltas))
    gamma = []
    for r in range(len(s)):
        total = u[:, r] @ sum(deltas)
        answers = [u[:, r] @ delta for delta in deltas]
        gamma.append(3 / sum(max(floor, total @ a / (a @ a)) for a in answers))
    close(merge(SVC, deltas, floor=floor), (u * s * gamma) @ vt)


def test_svc_counts_shared_knowledge_once():
    (delta,) = task_matrices(1, 30, 20)
    close(merge(SVC, [delta] * 5), delta)


@pytest.mark.parametrize("energy", [0.0, 0.5, 1.0])
def test_subspace_boosting(energy):
    deltas = task_matrices(3, 50, 34)
    u, s, vt = svd(sum(deltas))
    cut = next((i for i in range(len(s)) if s[: i + 1].sum() >= energy * s.sum() * (1 - 1e-12)), len(s) - 1)
    close(merge(SubspaceBoosting, deltas, energy=energy), (u * np.maximum(s, s[cut])) @ vt)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_star(share):
    deltas = task_matrices(3, 34, 50)
    wanted = 0
    for delta in deltas:
        u, s, vt = svd(delta)
        r = next(i + 1 for i in range(len(s)) if s[: i + 1].sum() >= share * s.sum() * (1 - 1e-12))
        wanted = wanted + (u[:, :r] * s[:r] * s.sum() / s[:r].sum()) @ vt[:r] / 3
    close(merge(STAR, deltas, nuclear_share=share), wanted)


def test_reaching_ends():
    s = torch.tensor([2.0, 1.0, 1.0])
    assert [reaching(s, share) for share in (0, 0.5, 0.51, 1)] == [1, 1, 2, 3]


def test_wudi_closed_form_is_the_penalised_minimum():
    deltas = task_matrices(3, 12, 9)
    curvatures = [d.T @ d / np.sum(d * d) for d in deltas]
    c, start = sum(curvatures), sum(deltas)
    target = sum(d @ own for d, own in zip(deltas, curvatures, strict=True))
    ridge = c + 0.05 * np.linalg.norm(c) * np.eye(9)
    close(merge(WUDI, deltas, damping=0.05), start + (target - start @ c) @ np.linalg.inv(ridge))
    close(merge(WUDI, deltas, damping=1e-9), target @ np.linalg.pinv(c), 1e-4)
    close(merge(WUDI, deltas, damping=1e9), start, 1e-4)


def test_wudi_iterations_lower_the_objective():
    deltas = task_matrices(3, 12, 9)

    def objective(merged):
        return sum(np.sum(((merged - d) @ d.T) ** 2) / np.sum(d * d) for d in deltas)

    values = [
        objective(merge(WUDI, deltas, solver="iterative", steps=steps, learning_rate=1e-2)) for steps in (0, 20, 200)
    ]
    assert values[0] > values[1] > values[2]
    assert objective(merge(WUDI, deltas, damping=1e-9)) <= values[2] * (1 + 1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_vectors_are_averaged_and_zero_is_harmless(rule):
    vectors = [np.full(5, value) for value in (1.0, 2.0, 6.0)]
    np.testing.assert_allclose(merge(rule, vectors), np.full(5, 3.0))
    assert not merge(rule, [np.zeros((40, 36))] * 2).any()
    assert np.isfinite(merge(rule, task_matrices(9, 5, 3))).all()


@pytest.mark.parametrize("rule", [IsoC, IsoCTS])
def test_isotropic_rules_ignore_directions_nobody_has(rule):
    rng = np.random.default_rng(0)
    left = np.linalg.qr(rng.standard_normal((40, 5)))[0]
    deltas = [left @ rng.standard_normal((5, 36)) for _ in range(2)]
    found = merge(rule, deltas)
    assert np.linalg.norm(found - left @ left.T @ found) < 1e-4 * np.linalg.norm(found)
